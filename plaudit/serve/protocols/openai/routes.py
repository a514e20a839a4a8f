"""OpenAI's /v1/chat/completions and /v1/completions, answered by a causal LM that is served beside reward models.

A request's prompts wait in the model's queue as works do, and the worker's scheduler continues all that are there
together. A stream is the same request with a listener.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncGenerator, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

from plaudit.errors import Refused
from plaudit.records import Item, ItemError
from plaudit.reward.reading import Intake, LogprobsReading
from plaudit.serve.http.message import HttpError, Reply, Request, Route
from plaudit.serve.model import ServedModel
from plaudit.serve.protocols.openai import wire
from plaudit.serve.protocols.protocol import ProtocolRoutes
from plaudit.serve.protocols.vllm.wire import FieldError
from plaudit.serve.scoring import INPUT_ERRORS, LOGPROBS_MODEL, ScoringService
from plaudit.serve.workers.frames import TextPiece
from plaudit.serve.workers.jobs import Answer, Continuation, GenerateJob

GONE = ("model_failed", "model_closed")


@dataclass(slots=True)
class PreparedRequest:
    """A request that is ready to be computed: its choices are numbered prompt by prompt."""

    parsed: wire.ChatRequest | wire.CompletionRequest
    served: ServedModel
    jobs: list[GenerateJob]
    head: dict[str, Any]
    """What every reply and every chunk of it begins with."""

    @property
    def chat(self) -> bool:
        return isinstance(self.parsed, wire.ChatRequest)

    @property
    def prompt_tokens(self) -> int:
        return sum(len(job.tokens) for job in self.jobs)


class OpenAIRoutes(ProtocolRoutes):
    name = "openai"
    errors = staticmethod(wire.write_error)

    def routes(self) -> list[Route]:
        return [
            self.work("/v1/chat/completions", self.chat, "OpenAI: an answer to messages, by a causal LM"),
            self.work("/v1/completions", self.complete, "OpenAI: how a text goes on, by a causal LM"),
        ]

    async def chat(self, request: Request) -> Reply:
        parsed = wire.read_chat(request.fields())
        served, intake = find_writer(self.scoring, parsed.model)
        tokens = await chat_tokens(request, parsed, served, intake)
        remaining = intake.limit - len(tokens)
        return await self._reply(
            request, self._prepare(request, parsed, served, [tokens], parsed.most or max(1, remaining))
        )

    async def complete(self, request: Request) -> Reply:
        parsed = wire.read_completion(request.fields())
        served, intake = find_writer(self.scoring, parsed.model)
        self.scoring.check_count(len(parsed.prompt) * (parsed.n or 1))
        texts = iter(await served.tokenise([each for each in parsed.prompt if isinstance(each, str)], special=True))
        rows = [next(texts) if isinstance(each, str) else _checked(intake, each) for each in parsed.prompt]
        for place, row in enumerate(rows):
            if isinstance(row, ItemError) or not row:
                problem = row.message if isinstance(row, ItemError) else "there is not one token to continue"
                raise FieldError(f"prompt {place}: {problem}", "prompt", getattr(row, "type", "empty"))
        tokens = [row for row in rows if isinstance(row, list)]
        return await self._reply(
            request, self._prepare(request, parsed, served, tokens, parsed.max_tokens or wire.SHORT)
        )  # fmt: skip

    def _prepare(
        self, request: Request, parsed: wire.ChatRequest | wire.CompletionRequest, served: ServedModel,
        prompts: Sequence[list[int]], most: int,
    ) -> PreparedRequest:  # fmt: skip
        chat, limit = isinstance(parsed, wire.ChatRequest), served.intake().limit
        for tokens in prompts:
            check_room(len(tokens), most, limit, "messages" if chat else "prompt")
        head = {
            "id": f"{'chatcmpl' if chat else 'cmpl'}-{request.id}",
            "object": "chat.completion" if chat else "text_completion", "created": int(time.time()),
            "model": served.name, "system_fingerprint": served.deployment.version,
        }  # fmt: skip
        sampling = parsed.sampling(most)
        return PreparedRequest(parsed, served, [GenerateJob(tokens, sampling) for tokens in prompts], head)

    async def _reply(self, request: Request, prepared: PreparedRequest) -> Reply:
        if prepared.parsed.stream:
            return await self._stream(request, prepared)
        _, answers = await self.scoring.read(request, prepared.served, prepared.jobs)
        samples = [sample for answer in answers for sample in _samples(answer)]
        generated = sum(len(sample.tokens) for sample in samples)
        request.tokens += generated
        choices = [_choice(prepared, index, sample) for index, sample in enumerate(samples)]
        return Reply.json({**prepared.head, "choices": choices, "usage": wire.usage(prepared.prompt_tokens, generated)})

    async def _stream(self, request: Request, prepared: PreparedRequest) -> Reply:
        parts = self._events(request, prepared)
        await anext(parts)
        return Reply(200, b"", b"text/event-stream", [(b"cache-control", b"no-cache")], parts)

    async def _events(self, request: Request, prepared: PreparedRequest) -> AsyncGenerator[bytes, None]:
        """First nothing, once there is something to say: what fails before that has the status of its error, what fails
        later is the stream's last event."""
        pieces: asyncio.Queue[tuple[int, TextPiece] | None] = asyncio.Queue()
        count = prepared.jobs[0].sampling.n

        def on_piece(prompt: int, piece: TextPiece) -> None:
            pieces.put_nowait((prompt * count + piece.index, piece))

        jobs = [replace(job, listener=partial(on_piece, place)) for place, job in enumerate(prepared.jobs)]
        chunks = _Chunks(prepared)
        task = asyncio.create_task(self.scoring.read(request, prepared.served, jobs))
        task.add_done_callback(lambda _: pieces.put_nowait(None))
        try:
            piece = await pieces.get()
            if piece is None:  # no text ends without a piece
                _check(await task)
            yield b""
            try:
                while piece is not None:
                    yield chunks.of(*piece)
                    piece = await pieces.get()
                _check(await task)
                yield chunks.end()
            except HttpError as error:
                request.error = error.type
                yield wire.event(wire.error_body(error)) + wire.DONE
        finally:
            request.tokens += chunks.generated
            task.cancel()
            with suppress(asyncio.CancelledError, HttpError):
                await task


class _Chunks:
    """From pieces to the events of a stream."""

    def __init__(self, prepared: PreparedRequest) -> None:
        self.prepared = prepared
        self.generated = 0
        kind = "chat.completion.chunk" if prepared.chat else "text_completion"
        self.head = {**prepared.head, "object": kind, **({"usage": None} if prepared.parsed.with_usage else {})}
        self._begun: dict[int, int] = {}  # by choice: characters of its tokens so far

    def of(self, index: int, piece: TextPiece) -> bytes:
        self.generated += len(piece.tokens)
        events = b""
        if self.prepared.chat and index not in self._begun:
            events += self._event(index, {"delta": {"role": "assistant", "content": ""}}, None)
        offset = self._begun.setdefault(index, 0)
        logprobs = _logprobs(self.prepared, piece, offset)
        if logprobs is not None:
            self._begun[index] += sum(map(len, _texts(self.prepared, piece.tokens)))
        if piece.text or (logprobs is not None and piece.tokens):
            content = {"delta": {"content": piece.text}} if self.prepared.chat else {"text": piece.text}
            events += self._event(index, {**content, "logprobs": logprobs}, None)
        if piece.finish:
            events += self._event(index, {"delta": {}} if self.prepared.chat else {"text": ""}, piece.finish)
        return events

    def end(self) -> bytes:
        counts = wire.usage(self.prepared.prompt_tokens, self.generated)
        last = wire.event({**self.head, "choices": [], "usage": counts}) if self.prepared.parsed.with_usage else b""
        return last + wire.DONE

    def _event(self, index: int, content: dict[str, Any], finish: str | None) -> bytes:
        choice = {"index": index, "logprobs": None, **content, "finish_reason": finish}
        return wire.event({**self.head, "choices": [choice]})


def _choice(prepared: PreparedRequest, index: int, sample: Continuation) -> dict[str, Any]:
    message = {"role": "assistant", "content": sample.text, "refusal": None}
    content: dict[str, Any] = {"message": message} if prepared.chat else {"text": sample.text}
    choice = {"index": index, **content, "logprobs": _logprobs(prepared, sample, 0), "finish_reason": sample.finish}
    if prepared.parsed.prompt_logprobs is None:
        return choice
    tokens = prepared.jobs[index // prepared.jobs[0].sampling.n].tokens
    return {**choice, "prompt_logprobs": _prompt_logprobs(prepared, tokens, sample)}


def _logprobs(prepared: PreparedRequest, drawn: Continuation | TextPiece, offset: int) -> dict[str, Any] | None:
    top = prepared.parsed.top
    if top is None:
        return None
    texts = _texts(prepared, drawn.tokens)
    tops = [[(_texts(prepared, [token])[0], logprob) for token, logprob in likely] for likely in drawn.top]
    if prepared.chat:
        return wire.chat_logprobs(texts, drawn.logprobs, tops or [()] * len(texts))
    return wire.completion_logprobs(texts, drawn.logprobs, tops if top else None, offset)


def _prompt_logprobs(prepared: PreparedRequest, tokens: list[int], sample: Continuation) -> list[Any]:
    """As vLLM has them: nothing of the first token, then of each the log-prob of its own and of the likeliest."""
    own = sample.prompt or ()
    rows: list[Any] = [None]
    for token, logprob, top in zip(tokens[1:], own, sample.prompt_top or [()] * len(own), strict=True):
        ranks = {each: (rank, value) for rank, (each, value) in enumerate(top, 1)}
        entries = {token: ranks.get(token, (None, logprob)), **ranks}
        rows.append({
            str(each): {"logprob": value, "rank": rank, "decoded_token": _texts(prepared, [each])[0]}
            for each, (rank, value) in entries.items()
        })  # fmt: skip
    return rows


def _texts(prepared: PreparedRequest, tokens: list[int]) -> list[str]:
    tokenizer = prepared.served.intake().tokenizer
    return [tokenizer.decode([token]) for token in tokens]


def _samples(answer: Answer) -> list[Continuation]:
    if isinstance(answer, ItemError):
        status = 400 if answer.type in INPUT_ERRORS else 503 if answer.type in GONE else 500
        raise HttpError(status, answer.type, answer.message)
    assert isinstance(answer, list)
    return answer


def _check(read: tuple[str, list[Answer]]) -> None:
    for answer in read[1]:
        _samples(answer)


def find_writer(scoring: ScoringService, name: str | None) -> tuple[ServedModel, Intake]:
    """A causal LM by its name; the first one without it."""
    if not name and LOGPROBS_MODEL not in scoring.aliases:
        raise HttpError(404, "unknown_model", "no model here writes text: serve one, plaudit serve --model NAME=DIR")
    served = scoring.find(name or LOGPROBS_MODEL)
    if not isinstance(served, ServedModel) or served.kind != "logprobs":
        raise HttpError(
            422, "wrong_kind", f"{served.name} is of kind {served.kind} and writes no text: name a causal LM "
            "that is served without a reward.toml (/v1/models shows it as kind logprobs)",
        )  # fmt: skip
    intake = served.intake()
    assert isinstance(served.reading, LogprobsReading)
    return served, intake


async def chat_tokens(
    request: Request, parsed: wire.ChatRequest, served: ServedModel, intake: Intake
) -> list[int]:  # fmt: skip
    (tokens,) = await served.in_turn(lambda _: [_templated(intake, parsed)], [request.content], len)
    return tokens


def check_room(prompt: int, most: int, limit: int, what: str) -> None:
    if prompt + most > limit:
        # Clients look for these words to shorten a prompt and send it again.
        raise FieldError(
            f"This model's maximum context length is {limit} tokens. However, you requested {prompt + most} tokens "
            f"({prompt} in the {what}, {most} in the completion). Please reduce the length of the {what} or "
            "completion.", what, "too_long",
        )  # fmt: skip


def _templated(intake: Intake, parsed: wire.ChatRequest) -> list[int]:
    try:
        intake.refuse_huge(Item(messages=tuple(parsed.messages)))
        return intake.templated(parsed.messages, parsed.add_generation_prompt, parsed.variables)
    except Refused as error:
        raise FieldError(str(error), "messages", error.type) from None


def _checked(intake: Intake, tokens: list[int]) -> list[int] | ItemError:
    try:
        return intake.tokens(tokens)
    except Refused as error:
        return ItemError(error.type, str(error))
