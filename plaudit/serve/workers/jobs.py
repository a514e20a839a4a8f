"""Units of computation: the works of one request, and each work as a job for a worker."""

from __future__ import annotations

import asyncio
import math
from array import array
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from itertools import chain

import numpy as np

from plaudit.records import ItemError, Likely
from plaudit.reward.work import Work
from plaudit.serve.http.traces import JobTimes
from plaudit.serve.workers import frames


@dataclass(frozen=True, slots=True)
class GenerateJob:
    """A prompt to continue. A listener receives every piece as it arrives."""

    tokens: list[int]
    sampling: frames.Sampling
    listener: Callable[[frames.TextPiece], None] | None = None

    @property
    def cost(self) -> int:
        """The maximum number of tokens."""
        return len(self.tokens) + self.sampling.n * self.sampling.max_tokens


@dataclass(slots=True)
class Continuation:
    """One sample of a prompt, as received so far."""

    tokens: list[int] = field(default_factory=list)
    logprobs: list[float] = field(default_factory=list)
    text: str = ""
    finish: str = ""
    top: list[Likely] = field(default_factory=list)
    prompt: tuple[float, ...] | None = None
    prompt_top: tuple[Likely, ...] | None = None
    prompt_ranks: tuple[int, ...] | None = None
    stop: str = ""

    def add(self, piece: frames.TextPiece) -> frames.TextPiece | None:
        """The new part of a piece; None if it contradicts earlier pieces."""
        known = len(self.tokens) - piece.at
        if self.tokens[piece.at : piece.at + len(piece.tokens)] != piece.tokens[:known]:
            return None
        new = frames.TextPiece(
            piece.id, piece.index, len(self.tokens), piece.tokens[known:], piece.logprobs[known:], len(self.text),
            piece.text[len(self.text) - piece.begin :], "" if self.finish else piece.finish, piece.top[known:],
            stop=piece.stop,
        )  # fmt: skip
        self.top += new.top
        self.prompt, self.prompt_top, self.prompt_ranks = piece.prompt, piece.prompt_top, piece.prompt_ranks
        self.stop = piece.stop or self.stop
        self.tokens += new.tokens
        self.logprobs += new.logprobs
        self.text += new.text
        self.finish = self.finish or new.finish
        return new


Answer = np.ndarray | list[Continuation] | ItemError
CONTRADICTED = ItemError(
    "worker_crash", "the worker crashed while generating this text, and its replacement generated a different one"
)


class Ticket:
    """The works of one request, answered in any order."""

    __slots__ = ("_open", "answers", "deadline", "done", "jobs", "timer")

    def __init__(self, count: int) -> None:
        self.deadline = math.inf  # of the event loop's clock
        self.timer: asyncio.TimerHandle | None = None
        self.answers: list[Answer | None] = [None] * count
        self.jobs: list[Job] = []
        self.done: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self._open = count
        if count == 0:
            self.done.set_result(None)

    def expire(self) -> None:
        """The deadline has expired: awaiting `done` raises TimeoutError."""
        self.timer = None
        if not self.done.done():
            self.done.set_exception(TimeoutError())

    def answer(self, index: int, answer: Answer) -> None:
        self.answers[index] = answer
        self._open -= 1
        if self._open == 0 and not self.done.done():
            self.done.set_result(None)


@dataclass(eq=False, slots=True)
class Job:
    """One work for the worker, shared by all requests for it. `cost`: the tokens to compute, excluding the prefix
    shared with the previous work of the same request."""

    id: int
    key: bytes
    work: Work | GenerateJob
    cost: int
    salt: str
    waiters: list[tuple[Ticket, int]] = field(default_factory=list)
    dead: bool = False  # cancelled in the queue
    deaths: int = 0
    since: float = 0.0
    times: JobTimes | None = None  # if the first request for it is traced
    samples: dict[int, Continuation] = field(default_factory=dict)  # by index, of a prompt being continued

    def add(self, piece: frames.TextPiece) -> Answer | None:
        """The complete answer, if this piece completes it."""
        assert isinstance(self.work, GenerateJob)
        new = self.samples.setdefault(piece.index, Continuation()).add(piece)
        if new is None:
            return CONTRADICTED
        if self.work.listener is not None and (new.tokens or new.text or new.finish):
            self.work.listener(new)
        done = len(self.samples) == self.work.sampling.n and all(each.finish for each in self.samples.values())
        return [self.samples[index] for index in sorted(self.samples)] if done else None


def as_frames(batch: Sequence[Job]) -> Iterator[frames.Frame]:
    works = [(job, job.work) for job in batch if isinstance(job.work, Work)]
    if works:
        yield frames.Works(
            ids=[job.id for job, _ in works],
            lengths=[len(work.tokens) for _, work in works],
            tokens=array("i", chain.from_iterable(work.tokens for _, work in works)).tobytes(),
            counts=[len(work.positions) for _, work in works],
            positions=array("i", chain.from_iterable(work.positions for _, work in works)).tobytes(),
            columns=[work.columns for _, work in works],
            logprobs=[work.logprobs for _, work in works],
            salts=[job.salt for job, _ in works],
            types=[work.types for _, work in works] if any(work.types for _, work in works) else [],
            timed=any(job.times is not None for job, _ in works),
        )
    for job in batch:
        if isinstance(job.work, GenerateJob):
            tokens, stream = frames.as_bytes([job.work.tokens]), job.work.listener is not None
            timed = job.times is not None
            yield frames.GenerateFrame(job.id, tokens, job.work.sampling, job.salt, stream, timed)
