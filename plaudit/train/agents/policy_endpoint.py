"""An OpenAI-compatible endpoint of the policy in training, on this machine's loopback address.

The server's own listener and replies, with the rollout's engine behind them. Every episode has its own API key, which
identifies its requests: `agent_episode.py` finds the conversation that a request continues.
"""

from __future__ import annotations

import asyncio
import secrets
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

from plaudit.config.keys import KeyTable, hashed
from plaudit.config.prompting import SamplingTable
from plaudit.config.rl import AgentTable
from plaudit.config.serve import LimitsTable
from plaudit.core.sequence import Update
from plaudit.errors import PlauditError, RunError
from plaudit.records import Sample
from plaudit.serve.http.address import bind
from plaudit.serve.http.app import Admission, App
from plaudit.serve.http.keys import Keys
from plaudit.serve.http.listener import Listener
from plaudit.serve.http.message import HttpError, Limits, Reply, Request, Route, Routes
from plaudit.serve.logs import Log
from plaudit.serve.metrics import Metrics
from plaudit.serve.protocols.openai import wire
from plaudit.serve.protocols.openai.replies import PreparedRequest, reply, reply_head
from plaudit.serve.protocols.vllm.wire import FieldError, model_card
from plaudit.serve.workers.frames import Sampling
from plaudit.serve.workers.jobs import Continuation, GenerateJob
from plaudit.train.agents.agent_episode import AgentEpisode, AgentTurn, ChatTurn
from plaudit.train.agents.observation import ObservationEncoder
from plaudit.train.agents.turn_driver import TurnDriver
from plaudit.train.rollouts.rollouts import sampling_params

HOST = "127.0.0.1"
MODEL = "policy"
START_SECONDS = 30.0
STDERR = 2
# What a request may ask for and the recipe has: by its name, and the key of the recipe.
CHOSEN = {"temperature": "sampling.temperature", "top_p": "sampling.top_p", "top_k": "sampling.top_k"}
# Fields that would change the distribution that is trained on, with the values that change nothing.
RESHAPING: dict[str, tuple[Any, ...]] = {
    "seed": (), "min_p": (0,), "logit_bias": ({},), "presence_penalty": (0,), "frequency_penalty": (0,),
    "repetition_penalty": (1,),
}  # fmt: skip
NEVER: dict[str, tuple[Any, ...]] = {
    "n": (1,), "prompt_logprobs": (), "stop_token_ids": ([],), "min_tokens": (0,), "ignore_eos": (False,),
    "allowed_token_ids": (), "add_generation_prompt": (True,), "continue_final_message": (False,),
    "include_stop_str_in_output": (False,),
}  # fmt: skip


@dataclass(eq=False)
class Playing:
    """Episodes that run together.

    seed   of a turn, from its episode, conversation and number
    """

    driver: TurnDriver
    sampling: SamplingTable
    episodes: Sequence[AgentEpisode]
    seed: Callable[[AgentEpisode, int, int], str]


class PolicyEndpoint:
    """Listens from its creation to `close`, in its own thread."""

    def __init__(self, table: AgentTable, sampling: SamplingTable, tokenizer: Any, positions: int) -> None:
        self.table = table
        self.sampling = sampling  # of training, whatever episodes run
        self.tokenizer = tokenizer
        self.positions = positions
        self.encoder = ObservationEncoder(tokenizer)
        self._keys: dict[str, tuple[AgentEpisode, Playing]] = {}
        self._admitted = Keys({}, keyless=False, allow_open=frozenset())
        self._created = int(time.time())
        sock = bind(HOST, 0)
        self.url = f"http://{HOST}:{sock.getsockname()[1]}/v1"
        self._started = threading.Event()
        self._stop = asyncio.Event()
        self._loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self._run, args=(sock,), daemon=True, name="endpoint")
        self._thread.start()
        if not self._started.wait(START_SECONDS):
            raise RunError(f"the policy's endpoint does not listen after {START_SECONDS:g} s: check the machine's load")

    @staticmethod
    def new_key() -> str:
        return f"episode-{secrets.token_urlsafe(24)}"

    @contextmanager
    def playing(self, playing: Playing) -> Iterator[None]:
        """Answers these episodes' requests until the block ends."""
        try:
            self._call(lambda: self._admit(playing))
            yield
        finally:
            self._call(lambda: self._dismiss(playing))

    def end(self, episode: AgentEpisode) -> None:
        """Stop answering an episode's requests; returns when none is in progress."""
        self._call(lambda: self._end(episode))

    def close(self) -> None:
        if self._thread.is_alive():
            self._loop.call_soon_threadsafe(self._stop.set)
        self._thread.join(START_SECONDS)

    # The thread

    def _run(self, sock: Any) -> None:
        try:
            self._loop.run_until_complete(self._serve(sock))
            self._loop.run_until_complete(self._loop.shutdown_default_executor())
        finally:
            self._loop.close()

    async def _serve(self, sock: Any) -> None:
        limits = LimitsTable(connections=4 * self.table.concurrency + 64, request_seconds=self.table.timeout)
        metrics = Metrics()
        log = Log(metrics.log_failures.inc, STDERR)
        self._admission = Admission(limits.queued_tokens, limits.buffered_bytes, 1, 503, metrics)
        routes = Routes(
            [
                Route(
                    "POST", "/v1/chat/completions", "key", self._chat, "openai", True, "", wire.write_error, None, True
                ),
                Route("GET", "/v1/models", "key", self._models, "openai", errors=wire.write_error),
            ],
            {"/": wire.write_error},
        )  # fmt: skip
        app = App(
            routes, self._admitted, self._admission,
            Limits(limits.body_bytes, limits.body_seconds, limits.request_seconds), metrics, log, log_requests=False,
        )  # fmt: skip
        listener = Listener(app, limits)
        await listener.start([sock])
        self._started.set()
        try:
            await self._stop.wait()
        finally:
            await listener.stop()
            app.readers.close()
            log.close()

    def _call(self, work: Callable[[], None]) -> None:
        """Run this in the event loop's thread, and wait for it."""

        async def run() -> None:
            work()

        try:
            asyncio.run_coroutine_threadsafe(run(), self._loop).result(START_SECONDS)
        except TimeoutError:
            raise RunError(f"the policy's endpoint did not respond within {START_SECONDS:g} s") from None

    def _admit(self, playing: Playing) -> None:
        self._keys |= {episode.key: (episode, playing) for episode in playing.episodes}
        self._renew()

    def _dismiss(self, playing: Playing) -> None:
        for episode in playing.episodes:
            self._end(episode)
            del self._keys[episode.key]
        self._renew()

    def _renew(self) -> None:
        self._admitted.replace({key: KeyTable(sha256=hashed(key)) for key in self._keys})
        self._admission.share_among(len(self._keys), {})

    def _end(self, episode: AgentEpisode) -> None:
        episode.over = True
        for turn in [turn for turn in episode.turns if not turn.answer.done()]:
            self._give_up(episode, turn, _over())

    # Requests

    async def _models(self, request: Request) -> Reply:
        card = model_card(MODEL, MODEL, self.positions, self._created)
        return Reply.json({"object": "list", "data": [{"id": MODEL, "object": "model", **card}]})

    async def _chat(self, request: Request) -> Reply:
        episode, playing = self._keys.get(request.tenant, (None, None))
        if episode is None or playing is None or episode.over:
            raise _over()
        parsed = wire.read_chat(request.fields())
        check_sampling(parsed, (self.sampling, playing.sampling), ignore=self.table.ignore_sampling)
        form = parsed.sampling(parsed.most or 1)
        chat = ChatTurn.of(
            parsed.messages, parsed.variables, (parsed.most, parsed.stops, form.json_schema, form.regex)
        )  # fmt: skip
        context: list[int] = []  # set when the request is tokenised, and counted in the reply

        async def compute(jobs: Sequence[GenerateJob]) -> list[list[Continuation]]:
            (job,) = jobs
            turn = episode.claim(chat)
            if turn.work is None:
                turn.work = asyncio.create_task(self._work(episode, turn, playing, parsed, form))
            if job.listener is not None:
                turn.listen(job.listener)
            sample = await self._answered(episode, turn)
            context[:] = turn.context
            return [[_continuation(sample)]]

        head = reply_head(request, parsed, model=MODEL, version=MODEL)
        job = GenerateJob(context, form)
        return await reply(request, PreparedRequest(parsed, [job], head, self.tokenizer, (), compute))

    async def _answered(self, episode: AgentEpisode, turn: AgentTurn) -> Sample:
        """The answer of a turn. Without waiting clients it is cancelled: a client that repeats it starts it again."""
        turn.clients += 1
        try:
            return await asyncio.shield(turn.answer)
        finally:
            turn.clients -= 1
            if not turn.clients and not turn.answer.done():
                self._give_up(episode, turn, HttpError(499, "disconnected", "the client disconnected"))

    async def _work(
        self, episode: AgentEpisode, turn: AgentTurn, playing: Playing, parsed: wire.ChatRequest, form: Sampling
    ) -> None:
        """Tokenise a request and submit its turn to the engine."""
        table = playing.sampling
        try:
            await asyncio.to_thread(episode.tokenise, turn, self.encoder, self.positions, table.max_tokens)
            left = episode.left(turn)
            chosen = {"max_tokens": min(parsed.most or left, left), "stop": parsed.stops or table.stop}
            seed = playing.seed(episode, episode.transcripts.index(turn.transcript), turn.number)
            params = replace(
                sampling_params(table.model_copy(update=chosen), 1, seed), json_schema=form.json_schema,
                regex=form.regex, top_logprobs=parsed.top or 0,
            )  # fmt: skip
            turn.pending = playing.driver.submit(
                turn.context, params, lambda got: self._done(episode, turn, got),
                partial(self._heard, turn) if parsed.stream else None,
            )  # fmt: skip
        except HttpError as error:
            episode.drop(turn, error)
        except PlauditError as error:
            episode.drop(turn, HttpError(400, "refused", str(error)))
        except Exception as error:  # a bug of ours: the request fails with its message
            episode.drop(turn, HttpError(500, "internal", f"{type(error).__name__}: {error}"))

    def _heard(self, turn: AgentTurn, update: Update) -> None:
        """Called in the thread that drives the engine, as is `_done`."""
        self._loop.call_soon_threadsafe(turn.hear, update)

    def _done(self, episode: AgentEpisode, turn: AgentTurn, result: Sample | Exception) -> None:
        if isinstance(result, Exception):
            status = 400 if isinstance(result, PlauditError) else 500
            error = HttpError(status, "refused", str(result))
            self._loop.call_soon_threadsafe(lambda: episode.drop(turn, error) if turn in episode.turns else None)
        else:
            self._loop.call_soon_threadsafe(episode.complete, turn, result)

    def _give_up(self, episode: AgentEpisode, turn: AgentTurn, why: HttpError) -> None:
        if turn.pending is not None:
            _, playing = self._keys[episode.key]
            playing.driver.cancel(turn.pending)
        episode.drop(turn, why)


def check_sampling(parsed: wire.ChatRequest, tables: Sequence[SamplingTable], *, ignore: bool) -> None:
    """Reject sampling options that differ from the recipe's: the learner recomputes the same distribution."""
    for name, harmless in NEVER.items():
        value = getattr(parsed, name)
        if value is not None and value not in harmless:
            raise FieldError(f"{name} is {value}, which a turn of an episode does not support: remove it", name)
    if ignore:
        return
    for name, key in CHOSEN.items():
        value = getattr(parsed, name)
        known = [getattr(table, name) for table in tables]
        if value is not None and value not in known and not (name == "top_k" and value == -1 and 0 in known):
            raise FieldError(
                f"{name} is {value:g}, and this run samples with {key} = {known[-1]:g}: remove it, or set "
                "agent.ignore_sampling = true to use the recipe's value", name,
            )  # fmt: skip
    for name, harmless in RESHAPING.items():
        value = getattr(parsed, name)
        if value is not None and value not in harmless:
            raise FieldError(
                f"{name} is {value}, and this run samples with the recipe's [sampling]: remove it, or set "
                "agent.ignore_sampling = true", name,
            )  # fmt: skip


def _over() -> HttpError:
    return HttpError(410, "episode_over", "this episode is over: its agent has returned, failed or run out of time")


def _continuation(sample: Sample) -> Continuation:
    return Continuation(
        list(sample.token_ids), list(sample.raw_logprobs), sample.text, sample.finish_reason,
        list(sample.top_logprobs or ()), stop=sample.stop,
    )  # fmt: skip
