"""Concurrent calls of user code, each with a timeout."""

from __future__ import annotations

import queue
import threading
import time
from collections import deque
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass
from functools import partial
from typing import Any

LOOK_SECONDS = 60.0  # how long to wait if no call has a time limit


class Overdue(Exception):
    """The call timed out. Its thread is abandoned, because Python cannot stop threads."""


@dataclass(eq=False)
class Call:
    """done   called by the owner, once: with what the call returned, or raised"""

    function: Callable[[], Any]
    done: Callable[[Any], None]
    until: float = 0.0
    given_up: bool = False


class ParallelCalls:
    """Owned by one thread, to which `post` passes results. The calling threads are daemons: one that never returns does
    not keep the process from exiting, and is replaced."""

    def __init__(self, threads: int, seconds: float, post: Callable[[Callable[[], None]], None]) -> None:
        self.threads = threads
        self.seconds = seconds
        self.post = post
        self._waiting: deque[Call] = deque()
        self._running: dict[Call, None] = {}
        self._started: queue.SimpleQueue[Call | None] = queue.SimpleQueue()
        self._workers = 0  # threads that have not been abandoned

    @property
    def busy(self) -> bool:
        return bool(self._running)

    def start(self, function: Callable[[], Any], done: Callable[[Any], None]) -> None:
        """Start a call as soon as a thread is free. Its timeout counts from then on."""
        self._waiting.append(Call(function, done))
        self._fill()

    def left(self) -> float:
        """Seconds until the next call times out."""
        now = time.monotonic()
        return max(0.0, min((call.until - now for call in self._running), default=LOOK_SECONDS))

    def expire(self) -> None:
        now = time.monotonic()
        for call in [call for call in self._running if call.until <= now]:
            call.given_up = True
            self._workers -= 1
            self._over(call, Overdue(f"no response within {self.seconds:g} s"))

    def close(self) -> None:
        self._started.put(None)

    def _fill(self) -> None:
        while self._waiting and len(self._running) < self.threads:
            call = self._waiting.popleft()
            call.until = time.monotonic() + self.seconds
            self._running[call] = None
            self._started.put(call)
            if self._workers < len(self._running):
                self._workers += 1
                threading.Thread(target=self._work, daemon=True, name="environment").start()

    def _work(self) -> None:
        while (call := self._started.get()) is not None:
            try:
                result = call.function()
            except BaseException as error:  # SystemExit too: nothing else would report it
                result = error
            self.post(partial(self._over, call, result))
            if call.given_up:
                return
        self._started.put(None)  # for the next one

    def _over(self, call: Call, result: Any) -> None:
        if call in self._running:  # else it was abandoned
            del self._running[call]
            self._fill()
            call.done(result)


def close_all(functions: Sequence[Callable[[], Any]], seconds: float) -> None:
    """Call all functions at the same time, after a failure: what they raise is ignored. Returns when all have returned,
    or after so many seconds."""
    threads = [threading.Thread(target=_quietly, args=(each,), daemon=True, name="close") for each in functions]
    for thread in threads:
        thread.start()
    until = time.monotonic() + seconds
    for thread in threads:
        thread.join(max(0.0, until - time.monotonic()))


def _quietly(function: Callable[[], Any]) -> None:
    with suppress(BaseException):
        function()
