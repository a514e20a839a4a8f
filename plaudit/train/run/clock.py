"""Per-phase timing of a step, and callbacks at the beginning and end of phases."""

from __future__ import annotations

import time
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Protocol


class Watcher(Protocol):
    """Receives callbacks for every phase. Their time is not counted in the phase."""

    def begin(self, phase: str) -> None: ...

    def end(self, phase: str, seconds: float) -> None:
        """Not called for a phase that raised."""


class Clock:
    """Seconds by phase since the last `split`. Phases do not nest, but one may have a `part`. `watchers` are called in
    order at a phase's beginning and in reverse order at its end."""

    def __init__(self) -> None:
        self.watchers: list[Watcher] = []
        self._seconds: dict[str, float] = {}
        self._phase: str | None = None
        self._separate = 0.0  # of this phase
        self._started = time.monotonic()

    @contextmanager
    def __call__(self, name: str) -> Iterator[None]:
        for watcher in self.watchers:
            watcher.begin(name)
        begin = time.monotonic()
        self._phase, self._separate = name, 0.0
        try:
            yield
        finally:
            seconds = time.monotonic() - begin
            self._phase = None
            self.count(name, seconds - self._separate)
        for watcher in reversed(self.watchers):
            watcher.end(name, seconds)

    @contextmanager
    def part(self, name: str, of: str) -> Iterator[None]:
        """Count time within the phase `of` separately, as `name`; within another phase it is counted there."""
        if self._phase != of:
            yield
            return
        begin = time.monotonic()
        try:
            yield
        finally:
            seconds = time.monotonic() - begin
            self._separate += seconds
            self.count(name, seconds)

    def count(self, name: str, seconds: float) -> None:
        self._seconds[name] = self._seconds.get(name, 0.0) + seconds

    def leave_out(self, seconds: float) -> None:
        """Exclude time that has just passed outside all phases from the step."""
        self._started += seconds

    def split(self) -> dict[str, float]:
        """Return the seconds as metrics, with the total as time/step, and reset."""
        now = time.monotonic()
        figures = {f"time/{name}": seconds for name, seconds in self._seconds.items()}
        figures["time/step"] = now - self._started
        self._seconds, self._started = {}, now
        return figures
