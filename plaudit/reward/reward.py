"""The interface of every reward."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

from plaudit.records import Item, Score, StepScores

Result = Score | StepScores


def cuts(groups: Sequence[int], parts: int) -> list[int]:
    """Split points for `parts` of similar size that keep each group whole."""
    count = len(groups)
    places = [0]
    for part in range(1, parts):
        place = max(places[-1], count * part // parts)
        while 0 < place < count and groups[place] == groups[place - 1]:
            place += 1
        places.append(place)
    return [*places, count]


class Reward(Protocol):
    def score(self, items: Sequence[Item]) -> list[Result]:
        """A result for every item, in order. An item that cannot be scored has an error; the others have scores."""

    def close(self) -> None:
        """Close its processes and connections."""
