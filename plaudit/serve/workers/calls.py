"""Runs blocking calls in threads, in the order of the fair queue: tokenising, rules, external judges."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Sequence
from concurrent.futures import Executor
from dataclasses import dataclass
from functools import partial
from typing import Any, TypeVar

from plaudit.serve.http.message import HttpError
from plaudit.serve.workers.queue import FairQueue

T = TypeVar("T")


@dataclass(eq=False, slots=True)
class _Call:
    run: Callable[[], Any]
    cost: int
    future: asyncio.Future[Any]
    started: bool = False
    dead: bool = False


class FairCalls:
    """At most `slots` calls at a time. A running call cannot be cancelled; a queued call that is cancelled never
    runs."""

    def __init__(self, threads: Executor, slots: int) -> None:
        self._threads = threads
        self._slots = slots
        self._running = 0
        self._queue: FairQueue[_Call] = FairQueue()

    async def run(
        self, calls: Sequence[tuple[Callable[[], T], int]], tenant: str, deadline: float, priority: int = 0
    ) -> list[T]:
        """The results of one request's calls, each with its cost. HttpError 504 after the deadline."""
        loop = asyncio.get_running_loop()
        jobs = [_Call(call, cost, loop.create_future()) for call, cost in calls]
        self._queue.add(tenant, jobs, priority)
        self._pump()
        try:
            async with asyncio.timeout(deadline - time.monotonic()):
                return list(await asyncio.gather(*(job.future for job in jobs)))
        except TimeoutError:
            raise HttpError(504, "deadline", "the deadline expired before all items were answered") from None
        finally:
            for job in jobs:
                if not job.started and not job.dead:
                    self._queue.discard(job)
                    job.future.cancel()

    def _pump(self) -> None:
        while self._running < self._slots and (job := self._queue.take()) is not None:
            job.started = True
            self._running += 1
            work = asyncio.get_running_loop().run_in_executor(self._threads, job.run)
            work.add_done_callback(partial(self._done, job))

    def _done(self, job: _Call, work: asyncio.Future[Any]) -> None:
        self._running -= 1
        if not job.future.done():  # otherwise it was cancelled
            if work.cancelled():
                job.future.cancel()
            elif (error := work.exception()) is not None:
                job.future.set_exception(error)
            else:
                job.future.set_result(work.result())
        elif not work.cancelled():
            work.exception()  # retrieved
        self._pump()
