"""Replies of OpenAI's routes, complete or streamed. The computation provides `Continuation`s, and their pieces to a
job's listener.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncGenerator, Callable, Coroutine, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

from plaudit.records import ItemError
from plaudit.serve.http.message import HttpError, Reply, Request
from plaudit.serve.protocols.openai import wire
from plaudit.serve.scoring import INPUT_ERRORS
from plaudit.serve.workers.frames import TextPiece
from plaudit.serve.workers.jobs import Answer, Continuation, GenerateJob

GONE = ("model_failed", "model_closed")


@dataclass(slots=True)
class PreparedRequest:
    """A request ready for computation; its choices are numbered prompt by prompt."""

    parsed: wire.ChatRequest | wire.CompletionRequest
    jobs: list[GenerateJob]
    head: dict[str, Any]
    """The fields that every reply and chunk begins with."""
    tokenizer: Any
    compute: Callable[[Sequence[GenerateJob]], Coroutine[Any, Any, Sequence[Answer]]]
    """Returns an answer to each job; cancelled when the client disconnects."""

    @property
    def chat(self) -> bool:
        return isinstance(self.parsed, wire.ChatRequest)

    @property
    def prompt_tokens(self) -> int:
        return sum(len(job.tokens) for job in self.jobs)


def reply_head(request: Request, *, chat: bool, model: str, version: str) -> dict[str, Any]:
    return {
        "id": f"{'chatcmpl' if chat else 'cmpl'}-{request.id}",
        "object": "chat.completion" if chat else "text_completion", "created": int(time.time()), "model": model,
        "system_fingerprint": version,
    }  # fmt: skip


async def reply(request: Request, prepared: PreparedRequest) -> Reply:
    if prepared.parsed.stream:
        parts = _events(request, prepared)
        await anext(parts)
        return Reply(200, b"", b"text/event-stream", [(b"cache-control", b"no-cache")], parts)
    answers = await prepared.compute(prepared.jobs)
    samples = [sample for answer in answers for sample in _samples(answer)]
    generated = sum(len(sample.tokens) for sample in samples)
    request.tokens += generated
    choices = [_choice(prepared, index, sample) for index, sample in enumerate(samples)]
    return Reply.json({**prepared.head, "choices": choices, "usage": wire.usage(prepared.prompt_tokens, generated)})


async def _events(request: Request, prepared: PreparedRequest) -> AsyncGenerator[bytes, None]:
    """Yields the events of a stream, first an empty one when computation has begun: errors before that set the HTTP
    status, later errors become the stream's last event."""
    pieces: asyncio.Queue[tuple[int, TextPiece] | None] = asyncio.Queue()
    count = prepared.jobs[0].sampling.n

    def on_piece(prompt: int, piece: TextPiece) -> None:
        pieces.put_nowait((prompt * count + piece.index, piece))

    jobs = [replace(job, listener=partial(on_piece, place)) for place, job in enumerate(prepared.jobs)]
    chunks = _Chunks(prepared)
    task = asyncio.create_task(prepared.compute(jobs))
    task.add_done_callback(lambda _: pieces.put_nowait(None))
    try:
        piece = await pieces.get()
        if piece is None:  # every text ends with a piece
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
    """Converts pieces to events of a stream."""

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
    """vLLM's format: null for the first token, then the log-probs of each token and the likeliest ones."""
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
    return [prepared.tokenizer.decode([token]) for token in tokens]


def _samples(answer: Answer) -> list[Continuation]:
    if isinstance(answer, ItemError):
        status = 400 if answer.type in INPUT_ERRORS else 503 if answer.type in GONE else 500
        raise HttpError(status, answer.type, answer.message)
    assert isinstance(answer, list)
    return answer


def _check(answers: Sequence[Answer]) -> None:
    for answer in answers:
        _samples(answer)
