"""What is asked of a scorer, and what it says: a path and the score of its last step, or of the whole of it."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Protocol

import numpy as np

from plaudit.records import Item, Score, StepScores

if TYPE_CHECKING:
    from plaudit.core.kv.prefix import Place
    from plaudit.reward.reward import Result


@dataclass(frozen=True, slots=True)
class Path:
    """A response so far, its last step being the one to score.

    read   what was read of it when the step before was the last: Scored.tokens of that; none where that is not known
    place  where that ends in the engine: Scored.place of that
    """

    prompt: str | tuple[dict[str, Any], ...]
    steps: tuple[str, ...]
    read: tuple[int, ...] = ()
    place: Place | None = None


@dataclass(frozen=True, slots=True)
class Scored:
    """A score, of a process model from 0 to 1, or why there is none.

    tokens   what was read; none where a server keeps it
    hidden   the model's state at the end of the step, where it was asked for
    place    where what was read ends, in an engine of this process, until that is released
    """

    value: float | None = None
    error: str | None = None
    tokens: tuple[int, ...] = ()
    hidden: np.ndarray | None = None
    place: Place | None = None


class Scorer(Protocol):
    @property
    def whole(self) -> bool:
        """Whether it scores finished responses and not their steps."""

    @property
    def computed(self) -> int:
        """Tokens computed so far; 0 where that is not known here."""

    def score(self, paths: Sequence[Path], *, hidden: bool = False) -> list[Scored]:
        """The score of each path's last step, or of the whole path. What fails for one is that path's error."""

    def release(self, places: Sequence[Place]) -> None:
        """The paths that end there are given up."""

    def close(self) -> None: ...


def items_of(paths: Sequence[Path]) -> list[Item]:
    return [Item(prompt=path.prompt, response="".join(path.steps)) for path in paths]


def mismatch(seen: int, made: int) -> str:
    return (
        f"step_mismatch: the PRM sees {seen} step(s) where the search made {made}; let steps.stop be the text that "
        "ends a step in the PRM's format"
    )


def last_scores(paths: Sequence[Path], results: Sequence[Result]) -> list[Scored]:
    """Of step scores those of the last steps, where the model saw as many steps as there are."""
    scores = []
    for path, result in zip(paths, results, strict=True):
        steps = len(result.values) if isinstance(result, StepScores) else 1
        fits = result.error is not None or steps == len(path.steps)
        scores.append(whole_score(result) if fits else Scored(error=mismatch(steps, len(path.steps))))
    return scores


def whole_score(result: Result, tokens: tuple[int, ...] = (), hidden: np.ndarray | None = None) -> Scored:
    if result.error is not None:
        return Scored(error=f"{result.error.type}: {result.error.message}")
    return Scored(result.value if isinstance(result, Score) else result.values[-1], None, tokens, hidden)
