"""What is to be computed: the works of one request, and each work on its way to a worker."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field

import numpy as np

from plaudit.records import ItemError
from plaudit.reward.work import Work
from plaudit.serve.workers import frames


@dataclass(frozen=True, slots=True)
class GenerateJob:
    """A judge's question, to be continued."""

    tokens: list[int]
    max_tokens: int
    temperature: float


Answer = np.ndarray | str | ItemError


class Ticket:
    """The works of one request, answered in any order."""

    def __init__(self, count: int) -> None:
        self.answers: list[Answer | None] = [None] * count
        self.jobs: list[Job] = []
        self.done: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self._open = count
        if count == 0:
            self.done.set_result(None)

    def expire(self) -> None:
        """Its deadline has passed: whoever awaits `done` gets a TimeoutError."""
        if not self.done.done():
            self.done.set_exception(TimeoutError())

    def answer(self, index: int, answer: Answer) -> None:
        self.answers[index] = answer
        self._open -= 1
        if self._open == 0 and not self.done.done():
            self.done.set_result(None)


@dataclass(eq=False)
class Job:
    """One work for the worker, however many ask for it."""

    id: int
    key: bytes
    work: Work | GenerateJob
    cost: int
    salt: str
    waiters: list[tuple[Ticket, int]] = field(default_factory=list)
    dead: bool = False  # of the queue: nobody waits for it
    deaths: int = 0
    since: float = 0.0


def as_frames(batch: Sequence[Job]) -> Iterator[frames.Frame]:
    works = [(job, job.work) for job in batch if isinstance(job.work, Work)]
    if works:
        yield frames.Works(
            ids=[job.id for job, _ in works],
            lengths=[job.cost for job, _ in works],
            tokens=frames.as_bytes([work.tokens for _, work in works]),
            counts=[len(work.positions) for _, work in works],
            positions=frames.as_bytes([work.positions for _, work in works]),
            columns=[work.columns for _, work in works],
            logprobs=[work.logprobs for _, work in works],
            salts=[job.salt for job, _ in works],
            types=[work.types for _, work in works] if any(work.types for _, work in works) else [],
        )
    for job in batch:
        if isinstance(job.work, GenerateJob):
            tokens = frames.as_bytes([job.work.tokens])
            yield frames.GenerateFrame(job.id, tokens, job.work.max_tokens, job.work.temperature, job.salt)
