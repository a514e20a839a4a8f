"""What every reward can do, whatever is behind it."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

from plaudit.records import Item, Score, StepScores

Result = Score | StepScores


class Reward(Protocol):
    def score(self, items: Sequence[Item]) -> list[Result]:
        """A result for every item, in order. One that cannot be scored has an error, and the others their scores."""

    def close(self) -> None:
        """End the processes and connections it holds."""
