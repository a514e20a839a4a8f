"""Where a step's time goes."""

from __future__ import annotations

import time
from collections.abc import Iterator
from contextlib import contextmanager


class Clock:
    """Seconds by name, since the last `split`."""

    def __init__(self) -> None:
        self._seconds: dict[str, float] = {}
        self._begin = time.monotonic()

    @contextmanager
    def __call__(self, name: str) -> Iterator[None]:
        begin = time.monotonic()
        try:
            yield
        finally:
            self._seconds[name] = self._seconds.get(name, 0.0) + time.monotonic() - begin

    def split(self) -> dict[str, float]:
        """As metrics, with the whole as time/step; and start again."""
        now = time.monotonic()
        found = {f"time/{name}": seconds for name, seconds in self._seconds.items()}
        found["time/step"] = now - self._begin
        self._seconds, self._begin = {}, now
        return found
