"""Servers of the same model: selects the next one, and avoids failing ones for a while."""

from __future__ import annotations

import random
import time
from collections.abc import Sequence
from dataclasses import dataclass

EJECT_AFTER = 3  # consecutive failures
COOL_DOWN = 5.0
LONGEST_REST = 60.0  # limit of the server's Retry-After


@dataclass(slots=True)
class Replica:
    """rest_until  the server's Retry-After: no requests before this time
    out_until   the server is avoided until then: it failed several times in a row, or was silent
    """

    url: str
    outstanding: int = 0
    failures: int = 0
    rest_until: float = 0.0
    out_until: float = 0.0

    @property
    def resting(self) -> bool:
        return self.rest_until > time.monotonic()

    def succeeded(self) -> None:
        self.failures = 0

    def failed(self) -> None:
        self.failures += 1
        if self.failures >= EJECT_AFTER:
            self.out_until = time.monotonic() + COOL_DOWN

    def silent(self) -> None:
        """It does not answer its health check either: it is avoided at once, and for longer."""
        self.failures = EJECT_AFTER
        self.out_until = time.monotonic() + LONGEST_REST

    def rest(self, seconds: float) -> None:
        self.rest_until = time.monotonic() + min(seconds, LONGEST_REST)


class Replicas:
    def __init__(self, urls: Sequence[str]) -> None:
        self.all = [Replica(url) for url in urls]

    def choose(self, beside: Replica | None = None) -> Replica:
        """The one with the fewest requests in progress, if possible not `beside`. After it was avoided, a server gets
        a single trial request; if all are avoided, any is used: the delay between attempts
        is enough."""
        now = time.monotonic()
        others = [r for r in self.all if r is not beside] or self.all
        rested = [r for r in others if not r.resting] or [min(others, key=lambda r: r.rest_until)]
        sound = [r for r in rested if r.failures < EJECT_AFTER or (r.out_until <= now and not r.outstanding)]
        return min(sound or rested, key=lambda r: (r.outstanding, random.random()))

    def rest_left(self) -> float:
        """Seconds until at least one may be used."""
        return max(0.0, min(replica.rest_until for replica in self.all) - time.monotonic())
