"""Computes the number of replicas from queued tokens; requests differ too much in size to be counted."""

from __future__ import annotations

from dataclasses import dataclass

UP_SECONDS = 3.0  # more replicas must be needed for this long, so that a short burst starts none
DOWN_SECONDS = 60.0  # fewer replicas must suffice for this long, because restarting one is expensive


@dataclass
class Autoscale:
    least: int
    most: int
    tokens: int
    """Queued tokens per replica."""
    _over: float = 0.0
    _under: float = 0.0

    def wanted(self, now: int, waiting: int, seconds: float) -> int:
        """The number of replicas, called every `seconds` with the current number and the queued tokens."""
        fit = max(self.least, min(self.most, -(-waiting // self.tokens)))
        self._over = self._over + seconds if fit > now else 0.0
        self._under = self._under + seconds if fit < now else 0.0
        if self._over >= UP_SECONDS:
            self._over = 0.0
            return fit
        if self._under >= DOWN_SECONDS:
            self._under = 0.0
            return now - 1
        return max(self.least, min(self.most, now))
