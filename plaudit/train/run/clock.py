"""Where a step's time goes, and who is told when its phases begin and end."""

from __future__ import annotations

import time
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Protocol


class Watcher(Protocol):
    """Told of every phase. What it does then is no part of the phase's time."""

    def begin(self, phase: str) -> None: ...

    def end(self, phase: str, seconds: float) -> None:
        """Not called for a phase that raised."""


class Clock:
    """Seconds by name, since the last `split`. Phases do not nest, but one may have a `part`. `watchers` are told in
    order of a phase's beginning and in reverse order of its end."""

    def __init__(self) -> None:
        self.watchers: list[Watcher] = []
        self._seconds: dict[str, float] = {}
        self._phase: str | None = None
        self._apart = 0.0  # of this phase
        self._begin = time.monotonic()

    @contextmanager
    def __call__(self, name: str) -> Iterator[None]:
        for watcher in self.watchers:
            watcher.begin(name)
        begin = time.monotonic()
        self._phase, self._apart = name, 0.0
        try:
            yield
        finally:
            seconds = time.monotonic() - begin
            self._phase = None
            self.count(name, seconds - self._apart)
        for watcher in reversed(self.watchers):
            watcher.end(name, seconds)

    @contextmanager
    def part(self, name: str, of: str) -> Iterator[None]:
        """What is within the phase `of` and has its time apart, as `name`; in another phase it is that one's time."""
        if self._phase != of:
            yield
            return
        begin = time.monotonic()
        try:
            yield
        finally:
            seconds = time.monotonic() - begin
            self._apart += seconds
            self.count(name, seconds)

    def count(self, name: str, seconds: float) -> None:
        self._seconds[name] = self._seconds.get(name, 0.0) + seconds

    def leave_out(self, seconds: float) -> None:
        """Time that has just passed outside all phases, and is not the step's."""
        self._begin += seconds

    def split(self) -> dict[str, float]:
        """As metrics, with the whole as time/step; and start again."""
        now = time.monotonic()
        figures = {f"time/{name}": seconds for name, seconds in self._seconds.items()}
        figures["time/step"] = now - self._begin
        self._seconds, self._begin = {}, now
        return figures
