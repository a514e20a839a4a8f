"""How many replicas a model should have: by the tokens that wait, not by requests, which differ a thousandfold."""

from __future__ import annotations

from dataclasses import dataclass

UP_SECONDS = 3.0  # so long more must be wanted, so that a burst that is soon over starts nothing
DOWN_SECONDS = 60.0  # so long fewer must be enough, for to start again takes longer than to wait


@dataclass
class Autoscale:
    least: int
    most: int
    tokens: int
    """That may wait for each replica."""
    _over: float = 0.0
    _under: float = 0.0

    def wanted(self, now: int, waiting: int, seconds: float) -> int:
        """The number of replicas, asked every so many seconds, with `now` of them and this many tokens waiting."""
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
