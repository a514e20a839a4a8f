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

LOOK_SECONDS = 60.0  # how long to wait where no call has a time limit to keep


class Overdue(Exception):
    """The call timed out. Its thread is abandoned, because Python cannot stop threads."""


@dataclass(eq=False)
class Call:
    """done   called by the owner, once: with what the call gave, or raised"""

    function: Callable[[], Any]
    done: Callable[[Any], None]
    until: float = 0.0
    given_up: bool = False


class ParallelCalls:
    """One thread owns it, and learns by `post` of what has come back. The threads that call are daemons: one that never
    comes back keeps nobody from leaving, and another takes its place."""

    def __init__(self, threads: int, seconds: float, post: Callable[[Callable[[], None]], None]) -> None:
        self.threads = threads
        self.seconds = seconds
        self.post = post
        self._waiting: deque[Call] = deque()
        self._running: dict[Call, None] = {}
        self._started: queue.SimpleQueue[Call | None] = queue.SimpleQueue()
        self._workers = 0  # threads that have not been given up

    @property
    def busy(self) -> bool:
        return bool(self._running)

    def start(self, function: Callable[[], Any], done: Callable[[Any], None]) -> None:
        """As soon as a thread is free. Its time counts from then on."""
        self._waiting.append(Call(function, done))
        self._fill()

    def left(self) -> float:
        """Seconds until the next one is late."""
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
            except BaseException as error:  # SystemExit too: nobody else would hear of it
                result = error
            self.post(partial(self._over, call, result))
            if call.given_up:
                return
        self._started.put(None)  # for the next one

    def _over(self, call: Call, result: Any) -> None:
        if call in self._running:  # else it was given up
            del self._running[call]
            self._fill()
            call.done(result)


def close_all(functions: Sequence[Callable[[], Any]], seconds: float) -> None:
    """Call all of them at the same time, for something has failed already: what they raise adds nothing. Returns when
    they are over, or after so many seconds."""
    threads = [threading.Thread(target=_quietly, args=(each,), daemon=True, name="close") for each in functions]
    for thread in threads:
        thread.start()
    until = time.monotonic() + seconds
    for thread in threads:
        thread.join(max(0.0, until - time.monotonic()))


def _quietly(function: Callable[[], Any]) -> None:
    with suppress(BaseException):
        function()
