"""Calls of somebody else's code, several at a time, each with a time limit."""

from __future__ import annotations

import threading
import time
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass
from itertools import count
from typing import Any

LOOK_SECONDS = 60.0  # how long to wait where no call has a time limit to keep


class Overdue(Exception):
    """The call did not come back in time. Its thread is left behind: Python cannot stop one."""


@dataclass(eq=False)
class Call:
    """done   called by the owner, once: with what the call gave, or raised"""

    function: Callable[[], Any]
    done: Callable[[Any], None]
    until: float = 0.0


class ParallelCalls:
    """One thread owns it, and learns by `post` of what has come back. Threads are daemons, one for each call: one that
    never comes back keeps nobody from leaving, and another takes its place."""

    def __init__(self, threads: int, seconds: float, post: Callable[[Callable[[], None]], None]) -> None:
        self.threads = threads
        self.seconds = seconds
        self.post = post
        self._waiting: deque[Call] = deque()
        self._running: dict[int, Call] = {}
        self._numbers = count()

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
        return max(0.0, min((call.until - now for call in self._running.values()), default=LOOK_SECONDS))

    def expire(self) -> None:
        now = time.monotonic()
        for number in [number for number, call in self._running.items() if call.until <= now]:
            self._over(number, Overdue(f"no answer in {self.seconds:g} s"))

    def _fill(self) -> None:
        while self._waiting and len(self._running) < self.threads:
            number, call = next(self._numbers), self._waiting.popleft()
            call.until = time.monotonic() + self.seconds
            self._running[number] = call
            threading.Thread(target=self._run, args=(number, call), daemon=True, name="environment").start()

    def _run(self, number: int, call: Call) -> None:
        try:
            result = call.function()
        except BaseException as error:  # SystemExit too: nobody else would hear of it
            result = error
        self.post(lambda: self._over(number, result))

    def _over(self, number: int, result: Any) -> None:
        call = self._running.pop(number, None)
        if call is not None:  # else it was given up
            self._fill()
            call.done(result)
