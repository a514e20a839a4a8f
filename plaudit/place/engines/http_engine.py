"""An engine on an HTTP server, with the same `generate` as the core's engine.

Requests of one call go out together, one per prompt, and the server batches them as it likes. A request whose
connection breaks is sent again, for nothing of its answer was used; when all have come, the server is asked whether it
is still the same process with the same weights, so that one that was restarted in between cannot pass off samples of
other weights.
"""

from __future__ import annotations

import asyncio
import math
import threading
import time
from abc import ABC, abstractmethod
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, Self

import httpx

from plaudit.core.sampling.sampling_params import SamplingParams
from plaudit.errors import BadReply, EngineError, EngineLost, RequestError, StaleWeights, one_line
from plaudit.place.engines.engine_server import EngineServer
from plaudit.place.engines.http_wire import HttpWire
from plaudit.records import FinishReason, ItemError, Sample

AT_ONCE = 512  # connections
CONNECT = 5.0  # seconds to connect, and the longest pause between two attempts
AWAY = 20.0  # seconds for which a server may refuse connections before it is given up
CONTROL = 120.0  # seconds for pausing, waking and the like
AGAIN = (429, 503)  # what time may mend
BEAT_EVERY = 5.0  # seconds between two looks, while requests are under way, whether it still lives
BEAT_SECONDS = 120.0  # ... and how long an answer to that may take: it waits for the batch, and a first one may compile


@dataclass(frozen=True, slots=True)
class State:
    """version   of the weights; None where nobody has sent any since the process started
    life      another one after a restart; None where the server tells nothing of the kind
    """

    version: int | None
    life: str | None


@dataclass(frozen=True, slots=True)
class Drawn:
    """One sample as a server tells of it."""

    token_ids: list[int]
    logprobs: list[float]
    text: str
    finish_reason: str


class HttpEngine(ABC):
    """name       for errors
    stop_ids   the model's end-of-sequence tokens, as the core has them
    timeout    seconds for one call of generate
    server     the process, if we have started it; closed with the engine
    wire       the control connection of a weight channel
    """

    wire: HttpWire

    def __init__(
        self, url: str, *, name: str, stop_ids: Sequence[int], timeout: float, server: EngineServer | None = None
    ) -> None:
        self.url = url.rstrip("/")
        self.name = f"{name} at {self.url}"
        self.stop_ids = tuple(sorted(stop_ids))
        self.timeout = timeout
        self.server = server
        self.version: int | None = None
        self.loading = False  # taking in weights, which may take long
        self._life: str | None = None
        self._weights = threading.RLock()  # held while they change
        # The address is the recipe's: redirects are not followed, and proxies of the environment not used.
        self._ssl = httpx.create_ssl_context(trust_env=False)  # once: it costs more than a short turn
        self._http = httpx.Client(
            base_url=self.url, follow_redirects=False, trust_env=False, timeout=CONTROL, verify=self._ssl
        )

    # What a server must say

    @abstractmethod
    def request(self, prompt: Sequence[int], params: SamplingParams) -> tuple[str, dict[str, Any]]:
        """Path and body that ask for a prompt's samples."""

    @abstractmethod
    def drawn(self, reply: Any) -> list[Drawn]:
        """What is in a reply."""

    @abstractmethod
    def logprobs_of(
        self, prompt: Sequence[int], params: SamplingParams, drawn: Drawn
    ) -> tuple[Sequence[float], Sequence[float]]:
        """Under the distribution that was sampled, and under the model's own."""

    @abstractmethod
    def state(self) -> State: ...

    @abstractmethod
    def beat(self, seconds: float) -> None:
        """Raises EngineError unless all of it still lives: a process may also hang, or have been stopped."""

    @abstractmethod
    def pause(self) -> None:
        """Nothing is computed until resume(); requests stay where they are."""

    @abstractmethod
    def resume(self) -> None: ...

    @abstractmethod
    def forget(self) -> None:
        """No KV that was computed before is used again."""

    @abstractmethod
    def top_logprobs(self, context: Sequence[int], count: int) -> dict[int, float]:
        """The likeliest next tokens, through the same path as any generation."""

    # Generating

    def generate(
        self, prompts: Sequence[Sequence[int]], params: Sequence[SamplingParams], begun: object = None
    ) -> list[Sample]:
        """As `Engine.generate`: all samples of the first prompt, then the second's."""
        if begun is not None:
            raise RequestError(f"{self.name} cannot continue samples of another engine: use the core")
        if len(prompts) != len(params):
            raise RequestError(f"{len(prompts)} prompts and {len(params)} SamplingParams: give one each")
        for name in (name for option in params for name in option.core_only()):
            raise RequestError(f"{name} is not supported by {self.name}: remove it, or use the core")
        version = self.version
        if version is None:
            raise StaleWeights(f"{self.name} has received no weights yet: publish before generating")
        replies = asyncio.run(self._ask_all(prompts, params))
        self.check_state()
        samples = []
        for group, (prompt, options, reply) in enumerate(zip(prompts, params, replies, strict=True)):
            if isinstance(reply, ItemError):
                samples += [_aborted(prompt, group, index, reply) for index in range(options.n)]
                continue
            drawn = self.drawn(reply)
            if len(drawn) != options.n or any(len(d.token_ids) != len(d.logprobs) for d in drawn):
                raise BadReply(
                    f"{self.name} gave {len(drawn)} samples for n = {options.n}, or not one log-prob per token"
                )
            samples += [self._sample(prompt, group, i, options, d, version) for i, d in enumerate(drawn)]
        return samples

    def _sample(
        self, prompt: Sequence[int], group: int, index: int, params: SamplingParams, drawn: Drawn, version: int
    ) -> Sample:
        """Where weights have changed under way, all tokens count as the older version's: nobody can tell which are."""
        count = len(drawn.token_ids)
        logprobs, raw = self.logprobs_of(prompt, params, drawn)
        known = params.reshapes and params.temperature == 1 and not any(map(math.isnan, raw))
        return Sample(
            tuple(prompt), tuple(drawn.token_ids), drawn.text, tuple(logprobs), tuple(raw), (version,) * count,
            (1,) * count, _finish_reason(drawn.finish_reason), group=group, index=index,
            tempered_logprobs=tuple(raw) if known else None,
        )  # fmt: skip

    def healthy(self) -> bool:
        """Whether it generates a token."""
        try:
            self.top_logprobs([self.stop_ids[0] if self.stop_ids else 0], 1)
        except EngineError:
            return False
        return True

    def check_state(self) -> None:
        """Raise unless the server has the weights that it was sent."""
        with self._weights:
            state = self.state()
        if self._life is not None and state.life != self._life:
            self.version = None
            raise StaleWeights(f"{self.name} was restarted, and has its first weights: publish before it generates")
        if state.version != self.version:
            raise StaleWeights(f"{self.name} has weights of version {state.version}, and should have {self.version}")

    def new_version(self, version: int | None) -> None:
        """It has received these weights; None: nobody knows what it has."""
        self.version = version
        self._life = self.state().life

    @contextmanager
    def paused(self) -> Iterator[None]:
        """Nothing is computed inside; nothing that was computed before it is used after it."""
        with self._weights:
            self.pause()
            try:
                yield
                self.forget()
            finally:
                self.resume()

    def close(self) -> None:
        self._http.close()
        if self.server is not None:
            self.server.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    # Inside

    def control(self, method: str, path: str, body: Any = None, seconds: float = CONTROL, **query: Any) -> Any:
        """One request that is not sent again."""
        try:
            reply = self._http.request(method, path, json=body, params=query or None, timeout=seconds)
        except httpx.TransportError as error:
            raise self.lost(error) from error
        if reply.status_code != 200:
            raise EngineError(f"{self.name} answered {method} {path} with {reply.status_code}: {_words(reply)}")
        is_json = reply.headers.get("content-type", "").startswith("application/json")
        return reply.json() if is_json and reply.content else None

    def lost(self, error: Exception) -> EngineLost:
        if self.server is not None:
            self.server.check()  # says why it ended
        return EngineLost(f"{self.name} does not answer: {type(error).__name__} {one_line(error)}")

    async def _ask_all(
        self, prompts: Sequence[Sequence[int]], params: Sequence[SamplingParams]
    ) -> list[dict[str, Any] | ItemError]:
        limits = httpx.Limits(max_connections=AT_ONCE, max_keepalive_connections=AT_ONCE)
        times = httpx.Timeout(None, connect=CONNECT)
        async with httpx.AsyncClient(
            base_url=self.url, limits=limits, timeout=times, follow_redirects=False, trust_env=False, verify=self._ssl
        ) as http:
            requests = [self._ask(http, prompt, options) for prompt, options in zip(prompts, params, strict=True)]
            answers = asyncio.gather(*requests)
            watch = asyncio.create_task(self._watch())
            both: set[asyncio.Future[Any]] = {answers, watch}
            try:
                done, _ = await asyncio.wait(both, timeout=self.timeout, return_when=asyncio.FIRST_COMPLETED)
                if answers in done:
                    return answers.result()
                if watch in done:
                    watch.result()
                raise EngineLost(
                    f"{self.name} did not finish {len(prompts)} prompts within engine.timeout = {self.timeout:g} s"
                )
            finally:
                watch.cancel()
                answers.cancel()
                await asyncio.gather(answers, watch, return_exceptions=True)

    async def _watch(self) -> None:
        """Ends only with an error."""
        while True:
            await asyncio.sleep(BEAT_EVERY)
            if not self.loading:
                await asyncio.to_thread(self.beat, BEAT_SECONDS)

    async def _ask(
        self, http: httpx.AsyncClient, prompt: Sequence[int], params: SamplingParams
    ) -> dict[str, Any] | ItemError:
        path, body = self.request(prompt, params)
        try:
            async with asyncio.timeout(params.deadline):
                return await self._post(http, path, body)
        except TimeoutError:
            return ItemError("Aborted", f"ran past its deadline of {params.deadline} s")

    async def _post(self, http: httpx.AsyncClient, path: str, body: dict[str, Any]) -> dict[str, Any]:
        pause, away_since = 0.1, time.monotonic()
        while True:
            try:
                reply = await http.post(path, json=body)
            except httpx.TransportError as error:
                if time.monotonic() - away_since > AWAY or (self.server is not None and not self.server.alive):
                    raise self.lost(error) from error
            else:
                away_since = time.monotonic()
                if reply.status_code == 200:
                    payload: dict[str, Any] = reply.json()
                    return payload
                if reply.status_code == 400:
                    raise RequestError(
                        f"{self.name} refuses a prompt of {len(body.get('prompt', ()))} tokens: {_words(reply)}"
                    )
                if reply.status_code not in AGAIN:
                    raise EngineError(f"{self.name} answered with {reply.status_code}: {_words(reply)}")
            await asyncio.sleep(pause)
            pause = min(2 * pause, CONNECT)


def _aborted(prompt: Sequence[int], group: int, index: int, error: ItemError) -> Sample:
    return Sample(tuple(prompt), (), "", (), (), (), (), "abort", group=group, index=index, error=error)


def _finish_reason(name: str) -> FinishReason:
    if name in ("stop", "length", "abort"):
        return name  # type: ignore[return-value]
    return "stop" if name == "repetition" else "error"


def _words(reply: httpx.Response) -> str:
    try:
        error = reply.json().get("error", reply.text)
        text = error.get("message", reply.text) if isinstance(error, dict) else str(error)
    except (ValueError, AttributeError):
        text = reply.text
    return one_line(ValueError(text))
