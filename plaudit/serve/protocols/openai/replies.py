"""Replies of OpenAI's routes, complete or streamed. The computation provides `Continuation`s, and their pieces to a
job's listener.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncGenerator, Callable, Coroutine, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

from plaudit.records import ItemError, Likely
from plaudit.serve.http.message import HttpError, Reply, Request
from plaudit.serve.protocols.openai import wire
from plaudit.serve.protocols.vllm.wire import reply_id
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
    echoes: Sequence[str]
    """The texts of the prompts, which the replies repeat; empty otherwise."""
    compute: Callable[[Sequence[GenerateJob]], Coroutine[Any, Any, Sequence[Answer]]]
    """Returns an answer to each job; cancelled when the client disconnects."""

    @property
    def chat(self) -> bool:
        return isinstance(self.parsed, wire.ChatRequest)

    @property
    def only_prompt(self) -> bool:
        return isinstance(self.parsed, wire.CompletionRequest) and self.parsed.only_prompt

    def job(self, index: int) -> GenerateJob:
        """The job of this choice."""
        return self.jobs[index // self.jobs[0].sampling.n]

    def echo(self, index: int) -> str:
        return self.echoes[index // self.jobs[0].sampling.n] if self.echoes else ""

    @property
    def prompt_tokens(self) -> int:
        return sum(len(job.tokens) for job in self.jobs)


def reply_head(
    request: Request, parsed: wire.ChatRequest | wire.CompletionRequest, *, model: str, version: str
) -> dict[str, Any]:
    chat = isinstance(parsed, wire.ChatRequest)
    return {
        "id": f"{'chatcmpl' if chat else 'cmpl'}-{reply_id(request, parsed.request_id)}",
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
    about = _about_prompt(prepared, 0, samples[0]) if prepared.chat else {}
    counts = wire.usage(prepared.prompt_tokens, generated)
    return Reply.json({**prepared.head, "choices": choices, "usage": counts, **about})


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
        self._last: dict[int, int] = {}  # by choice: its last token

    def of(self, index: int, piece: TextPiece) -> bytes:
        self.generated += len(piece.tokens)
        events, text, ids = b"", piece.text, self.prepared.parsed.return_token_ids
        about: dict[str, Any] = {}
        if index not in self._begun:
            about = {"prompt_token_ids": self.prepared.job(index).tokens} if ids else {}
            text = self.prepared.echo(index) + text
            if self.prepared.chat:
                events += self._event(index, {"delta": {"role": "assistant", "content": ""}}, top=about)
                about = {}
        offset = self._begun.setdefault(index, 0)
        if piece.tokens:
            self._last[index] = piece.tokens[-1]
        logprobs = _logprobs(self.prepared, piece, offset)
        if logprobs is not None:
            self._begun[index] += sum(map(len, _texts(self.prepared, piece.tokens)))
        if text or (piece.tokens and (logprobs is not None or ids)):
            content: dict[str, Any] = {"delta": {"content": text}} if self.prepared.chat else {"text": text}
            named = {"token_ids": piece.tokens} if ids else {}
            events += self._event(index, {**content, "logprobs": logprobs, **named, **about})
        if piece.finish:
            ended = _ended(self.prepared, piece.finish, piece.stop, self._last.get(index))
            events += self._event(index, {"delta": {}} if self.prepared.chat else {"text": ""}, ended)
        return events

    def end(self) -> bytes:
        counts = wire.usage(self.prepared.prompt_tokens, self.generated)
        last = wire.event({**self.head, "choices": [], "usage": counts}) if self.prepared.parsed.with_usage else b""
        return last + wire.DONE

    def _event(
        self, index: int, content: dict[str, Any], ended: Mapping[str, Any] | None = None,
        top: Mapping[str, Any] | None = None,
    ) -> bytes:  # fmt: skip
        """top   fields beside the choices"""
        choice = {"index": index, "logprobs": None, **content, **(ended or {"finish_reason": None})}
        return wire.event({**self.head, **(top or {}), "choices": [choice]})


def _choice(prepared: PreparedRequest, index: int, sample: Continuation) -> dict[str, Any]:
    parsed = prepared.parsed
    text = prepared.echo(index) + ("" if prepared.only_prompt else sample.text)
    message = {"role": "assistant", "content": text, "refusal": None}
    content: dict[str, Any] = {"message": message} if prepared.chat else {"text": text}
    logprobs = _echoed(prepared, index, sample) if prepared.echoes else _logprobs(prepared, sample, 0)
    return {
        "index": index, **content, "logprobs": logprobs,
        **_ended(prepared, sample.finish, sample.stop, sample.tokens[-1] if sample.tokens else None),
        **({"token_ids": sample.tokens} if parsed.return_token_ids else {}),
        **({} if prepared.chat else _about_prompt(prepared, index, sample)),
    }  # fmt: skip


def _ended(prepared: PreparedRequest, finish: str, stop: str, last: int | None) -> dict[str, Any]:
    """The reason of the end, and as in vLLM what the text ended with: a stop string, or a token other than the
    tokenizer's end token."""
    reason: str | int | None = None
    if finish == "stop":
        own_end = last == prepared.tokenizer.eos_token_id and not prepared.parsed.ignore_eos
        reason = stop or (None if own_end else last)
    return {"finish_reason": finish, "stop_reason": reason}


def _about_prompt(prepared: PreparedRequest, index: int, sample: Continuation) -> dict[str, Any]:
    """What was requested of the prompt: a chat's reply has it beside the choices, a completion's in every choice."""
    parsed, tokens = prepared.parsed, prepared.job(index).tokens
    about: dict[str, Any] = (
        {} if parsed.prompt_top is None else {"prompt_logprobs": _prompt_logprobs(prepared, tokens, sample)}
    )
    return {**about, **({"prompt_token_ids": tokens} if parsed.return_token_ids else {})}


def _logprobs(prepared: PreparedRequest, drawn: Continuation | TextPiece, offset: int) -> dict[str, Any] | None:
    top = prepared.parsed.top
    if top is None:
        return None
    texts, names = _texts(prepared, drawn.tokens), _names(prepared, drawn.tokens)
    tops = drawn.top or [()] * len(texts)
    if prepared.chat:
        return wire.chat_logprobs([
            (own, [(_names(prepared, [t])[0], _texts(prepared, [t])[0], p) for t, p in likely])
            for own, likely in zip(zip(names, texts, drawn.logprobs, strict=True), tops, strict=True)
        ])  # fmt: skip
    return wire.completion_logprobs(names, drawn.logprobs, _named_tops(prepared, tops) if top else None, texts, offset)


def _echoed(prepared: PreparedRequest, index: int, sample: Continuation) -> dict[str, Any] | None:
    """The log-probs of a completion that begins with its prompt."""
    top, prompt = prepared.parsed.top, prepared.job(index).tokens
    if top is None:
        return None
    drawn = Continuation() if prepared.only_prompt else sample
    tokens = [*prompt, *drawn.tokens]
    logprobs = [None, *(sample.prompt or ()), *drawn.logprobs]
    tops = [(), *[each[:top] for each in sample.prompt_top or ()], *drawn.top] if top else None
    texts = _texts(prepared, tokens)
    named = None if tops is None else _named_tops(prepared, tops)
    return wire.completion_logprobs(_names(prepared, tokens), logprobs, named, texts, 0)


def _named_tops(prepared: PreparedRequest, tops: Sequence[Likely]) -> list[list[tuple[str, float]]]:
    return [[(_names(prepared, [token])[0], logprob) for token, logprob in likely] for likely in tops]


def _prompt_logprobs(prepared: PreparedRequest, tokens: list[int], sample: Continuation) -> list[Any]:
    """vLLM's format: null for the first token, then the log-probs of each token and the likeliest ones, with ranks."""
    own, ranks = sample.prompt or (), sample.prompt_ranks or ()
    rows: list[Any] = [None]
    tops = sample.prompt_top or [()] * len(own)
    for token, logprob, rank, top in zip(tokens[1:], own, ranks, tops, strict=True):
        entries = {token: (rank, logprob), **{each: (place, value) for place, (each, value) in enumerate(top, 1)}}
        rows.append({
            str(each): {"logprob": value, "rank": place, "decoded_token": _texts(prepared, [each])[0]}
            for each, (place, value) in entries.items()
        })  # fmt: skip
    return rows


def _names(prepared: PreparedRequest, tokens: Sequence[int]) -> list[str]:
    """The tokens as a reply names them: by their texts, or by their ids."""
    if prepared.parsed.return_tokens_as_token_ids:
        return [f"token_id:{token}" for token in tokens]
    return _texts(prepared, tokens)


def _texts(prepared: PreparedRequest, tokens: Sequence[int]) -> list[str]:
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
