"""POST /v1/search, and OpenAI's chat completions with a field `search`: answers found by tree search.

The policy and the PRM are models of the server: steps of all searches are generated and scored in the batches of all
requests. A search runs in its own thread; when its client disconnects it is stopped.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncGenerator, AsyncIterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any

from plaudit.config.search import SearchServiceTable
from plaudit.config.serve import ServeTable
from plaudit.errors import ConfigError, Refused
from plaudit.records import Item
from plaudit.reward.process import ProcessReading
from plaudit.reward.reading import Intake
from plaudit.search.questions.answers import tally
from plaudit.search.questions.equivalence import open_equivalence
from plaudit.search.questions.questions import Question
from plaudit.search.questions.reading import AnswerReading
from plaudit.search.runner import Outcome
from plaudit.search.service.running import RunningSearch
from plaudit.search.service.search_request import SearchRequest, read_search, read_searched_chat, recipe_of
from plaudit.search.service.served_models import LoopCalls, ServedJudge, ServedPolicy
from plaudit.search.when import advise, following
from plaudit.serve.handle import ModelHandle
from plaudit.serve.http.message import HttpError, Reply, Request, Route
from plaudit.serve.model import ServedModel
from plaudit.serve.protocols.openai import wire
from plaudit.serve.protocols.openai.routes import chat_tokens, check_room, find_writer
from plaudit.serve.scoring import PROCESS_MODEL, REWARD_MODEL, ScoringService

EVENTS = [(b"cache-control", b"no-cache")]


class SearchRoutes:
    def __init__(self, scoring: ScoringService, table: ServeTable) -> None:
        self.scoring = scoring
        self.table: SearchServiceTable = table.search
        self._overload_status = table.overload_status
        self._alike = open_equivalence(self.table.steps.equivalence)
        self._threads = ThreadPoolExecutor(self.table.concurrent, thread_name_prefix="search")
        self._open = 0

    def routes(self) -> list[Route]:
        native = Route(
            "POST", "/v1/search", "key", self.search, "native", True,
            "Tree search for an answer, with a causal LM and a process model", fields=True,
        )  # fmt: skip
        chat = Route(
            "POST", "/v1/chat/completions", "key", self.chat, "openai", True,
            "With a field `search`: an answer found by tree search", wire.write_error,
            lambda fields: fields.get("search") is not None, True,
        )  # fmt: skip
        return [native, chat]

    async def search(self, request: Request) -> Reply:
        wanted = read_search(request.fields())
        search, about = await self._begin(request, wanted)
        if wanted.stream:
            return await _stream(self._events(request, search, about))
        try:
            return Reply.json(self._result(request, search, await search.outcome(), about))
        finally:
            search.calls.stop()

    async def chat(self, request: Request) -> Reply:
        wanted = read_searched_chat(request.fields())
        search, about = await self._begin(request, wanted)
        if wanted.stream:
            assert wanted.chat is not None
            return await _stream(self._chunks(request, search, about, wanted.chat.with_usage))
        try:
            result = self._result(request, search, await search.outcome(), about)
        finally:
            search.calls.stop()
        message = {"role": "assistant", "content": _content(result), "refusal": None}
        choice = {"index": 0, "message": message, "logprobs": None, "finish_reason": "stop"}
        head = _chat_head(request, result, "chat.completion")
        return Reply.json({**head, "choices": [choice], "usage": result["usage"], "search": _details(result)})

    async def _begin(self, request: Request, wanted: SearchRequest) -> tuple[RunningSearch, dict[str, Any]]:
        """Starts the search; returns it with the fields that describe it in the reply."""
        served, intake = find_writer(self.scoring, wanted.model)
        judge = self._judge(wanted.prm)
        question = await _question(request, wanted, served, intake)
        prompt = len(question.prompt_ids)
        judging = judge.reading if isinstance(judge, ServedModel) else None
        split = judging.format.split if isinstance(judging, ProcessReading) else "\n\n"
        recipe = recipe_of(wanted, self.table, split, intake.limit - prompt)
        advice = None
        if recipe.search.ground is not None:
            advice = advise(recipe.search.ground, recipe.search.width)
            recipe = following(recipe, advice.method)
        check_room(prompt, recipe.steps.max_tokens, intake.limit, "prompt" if wanted.chat is None else "messages")
        if self._open >= self.table.concurrent:
            self.scoring.models.metrics.rejected.labels("overload").inc()
            raise HttpError(
                self._overload_status, "overloaded", f"{self._open} searches are in progress; the limit is "
                f"{self.table.concurrent}; try again in 1 s", retry_after=1,
            )  # fmt: skip
        calls = LoopCalls(request, asyncio.get_running_loop())
        policy = ServedPolicy(calls, self.scoring, served, recipe.steps)
        reading = AnswerReading(recipe.steps, self._alike)
        try:
            search = RunningSearch(
                recipe, question, calls, policy, ServedJudge(calls, self.scoring, judge), reading, self._threads
            )
        except ConfigError as error:
            raise HttpError(422, "invalid_request", str(error)) from None
        self._open += 1
        loop = asyncio.get_running_loop()
        search.future.add_done_callback(lambda _: loop.call_soon_threadsafe(self._ended))
        about = {
            "id": f"search-{request.id}", "object": "search", "model": served.name, "prm": judge.name,
            "method": recipe.search.method, "width": recipe.search.width, "seed": recipe.seed,
            **({} if advice is None else {"why": advice.why}),
        }  # fmt: skip
        return search, about

    def _ended(self) -> None:
        self._open -= 1

    def _judge(self, name: str | None) -> ModelHandle:
        aliases = self.scoring.aliases
        if name is None and not {PROCESS_MODEL, REWARD_MODEL} & aliases.keys():
            raise HttpError(
                404, "unknown_model", "no served model scores steps: serve one with plaudit serve --model NAME=DIR"
            )
        judge = self.scoring.find(name or (PROCESS_MODEL if PROCESS_MODEL in aliases else REWARD_MODEL))
        if judge.kind in ("logprobs", "embedding"):
            raise HttpError(
                422, "wrong_kind", f"{judge.name} is of kind {judge.kind} and returns no scores: set a process model "
                "as prm, or for best-of-n an outcome model",
            )  # fmt: skip
        if isinstance(judge, ServedModel):
            judge.intake()  # 503 while it is loading
        return judge

    def _result(
        self, request: Request, search: RunningSearch, outcome: Outcome, about: dict[str, Any]
    ) -> dict[str, Any]:  # fmt: skip
        costs = outcome.driver.costs
        request.tokens += search.policy.generated
        prompt = len(outcome.question.prompt_ids)
        alike, vote = search.reading.alike, search.recipe.search.vote
        return {
            **about,
            "answer": None if outcome.answer is None else outcome.answer.text,
            "response": None if outcome.answer is None else outcome.tree.response(outcome.answer.node),
            "stopped": outcome.stopped,
            "votes": [{"answer": text, "votes": votes} for text, votes in tally(outcome.answers, vote, alike).items()],
            "rounds": costs.rounds, "calls": costs.calls, "kv_tokens": costs.kv_tokens,
            "usage": wire.usage(prompt, costs.generated),
        }  # fmt: skip

    async def _events(
        self, request: Request, search: RunningSearch, about: dict[str, Any]
    ) -> AsyncGenerator[bytes, None]:  # fmt: skip
        try:
            rounds, progress = await _first_round(search)
            yield b""
            try:
                while progress is not None:
                    yield wire.event({**about, "object": "search.progress", **progress})
                    progress = await anext(rounds, None)
                result = self._result(request, search, await search.outcome(), about)
                yield wire.event(result) + wire.DONE
            except HttpError as error:
                request.error = error.type
                yield wire.event(_native_error(error, request)) + wire.DONE
        finally:
            search.calls.stop()

    async def _chunks(
        self, request: Request, search: RunningSearch, about: dict[str, Any], with_usage: bool
    ) -> AsyncGenerator[bytes, None]:
        """An OpenAI stream: rounds are sent as comments, which keep the connection open."""
        try:
            rounds, progress = await _first_round(search)
            yield b""
            head = _chat_head(request, about, "chat.completion.chunk")
            chunk = {**head, **({"usage": None} if with_usage else {})}
            try:
                yield wire.event({**chunk, "choices": [_delta({"role": "assistant", "content": ""})]})
                while progress is not None:
                    yield f": round {progress['round']}\n\n".encode()
                    progress = await anext(rounds, None)
                result = self._result(request, search, await search.outcome(), about)
                yield wire.event({**chunk, "choices": [_delta({"content": _content(result)})]})
                yield wire.event({**chunk, "choices": [_delta({}, "stop")], "search": _details(result)})
                if with_usage:
                    yield wire.event({**head, "choices": [], "usage": result["usage"]})
                yield wire.DONE
            except HttpError as error:
                request.error = error.type
                yield wire.event(wire.error_body(error)) + wire.DONE
        finally:
            search.calls.stop()


async def _first_round(search: RunningSearch) -> tuple[AsyncIterator[dict[str, Any]], dict[str, Any] | None]:
    """The rounds and the first of them: errors before it set the HTTP status, and no stream begins."""
    rounds = search.rounds()
    progress = await anext(rounds, None)
    if progress is None:
        await search.outcome()
    return rounds, progress


async def _question(request: Request, wanted: SearchRequest, served: ServedModel, intake: Intake) -> Question:
    if wanted.chat is not None:
        tokens = await chat_tokens(request, wanted.chat, served, intake)
        return Question(0, tuple(dict(message) for message in wanted.chat.messages), "", tuple(tokens))
    assert wanted.prompt is not None
    try:
        intake.refuse_huge(Item(text=wanted.prompt))
        return Question(0, wanted.prompt, wanted.prompt, tuple(intake.prompt(wanted.prompt)))
    except Refused as error:
        raise HttpError(422, error.type, str(error)) from None


async def _stream(parts: AsyncGenerator[bytes, None]) -> Reply:
    await anext(parts)
    return Reply(200, b"", b"text/event-stream", list(EVENTS), parts)


def _content(result: dict[str, Any]) -> str:
    """The response that contains the answer."""
    if result["response"] is None:
        raise HttpError(422, "no_answer", f"the search found no answer: {result['stopped']}")
    return str(result["response"])


def _details(result: dict[str, Any]) -> dict[str, Any]:
    names = ("prm", "method", "why", "width", "seed", "answer", "stopped", "votes", "rounds", "calls", "kv_tokens")
    return {name: result[name] for name in names if name in result}


def _chat_head(request: Request, about: dict[str, Any], kind: str) -> dict[str, Any]:
    return {"id": f"chatcmpl-{request.id}", "object": kind, "created": int(time.time()), "model": about["model"]}


def _delta(content: dict[str, Any], finish: str | None = None) -> dict[str, Any]:
    return {"index": 0, "delta": content, "logprobs": None, "finish_reason": finish}


def _native_error(error: HttpError, request: Request) -> dict[str, Any]:
    return {"error": {"type": error.type, "message": str(error), "request_id": request.id}}
