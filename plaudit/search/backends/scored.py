"""The input and output of a scorer: a path, and the score of its last step or of the whole path."""

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
    """A response so far, whose last step is to be scored.

    read   the tokens read for its previous step (Scored.tokens); empty if unknown
    place  the engine's handle of that position: Scored.place
    """

    prompt: str | tuple[dict[str, Any], ...]
    steps: tuple[str, ...]
    read: tuple[int, ...] = ()
    place: Place | None = None


@dataclass(frozen=True, slots=True)
class Scored:
    """A score (from 0 to 1 for a process model), or an error.

    tokens   the tokens read; empty if a server keeps them
    hidden   the model's hidden state at the end of the step, if requested
    place    the engine's handle of the last position read, in an engine of this process, until it is released
    """

    value: float | None = None
    error: str | None = None
    tokens: tuple[int, ...] = ()
    hidden: np.ndarray | None = None
    place: Place | None = None


class Scorer(Protocol):
    @property
    def whole(self) -> bool:
        """Whether it scores finished responses instead of steps."""

    @property
    def computed(self) -> int:
        """Tokens computed so far; 0 if unknown."""

    def score(self, paths: Sequence[Path], *, hidden: bool = False) -> list[Scored]:
        """The score of each path's last step, or of the whole path. A failure of one path is that path's error."""

    def release(self, places: Sequence[Place]) -> None:
        """Release the paths that end at these positions."""

    def close(self) -> None: ...


def items_of(paths: Sequence[Path]) -> list[Item]:
    return [Item(prompt=path.prompt, response="".join(path.steps)) for path in paths]


def mismatch(seen: int, made: int) -> str:
    return (
        f"step_mismatch: the PRM sees {seen} step(s) but the search generated {made}; set steps.stop to the text that "
        "ends a step in the PRM's format"
    )


def last_scores(paths: Sequence[Path], results: Sequence[Result]) -> list[Scored]:
    """The scores of the last steps, if the model saw as many steps as there are."""
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
