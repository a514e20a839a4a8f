"""What a rule sees of a search: the leaves that may be expanded, and nothing of models, tokens or text."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field


@dataclass(frozen=True, slots=True)
class Leaf:
    """score     of the path to it
    branches  ids of its proper ancestors, the root first
    tokens    of its own step
    cluster   steps that say nearly the same have the same number
    twin      the leaf it repeats word for word; its own id if none
    times     how often it was gone on from; 0 but for nodes that a search returns to
    """

    id: int
    score: float
    branches: tuple[int, ...]
    tokens: int = 1
    cluster: int = 0
    twin: int = -1
    times: int = 0

    def __post_init__(self) -> None:
        if self.twin < 0:
            object.__setattr__(self, "twin", self.id)


@dataclass(frozen=True, slots=True)
class Frontier:
    """width     children that may still be made: the search's width less its leaves that are over
    whole     the search's width
    tokens    of every branch's step; the root's are the prompt
    """

    depth: int
    width: int
    whole: int
    leaves: Sequence[Leaf]
    tokens: Mapping[int, int] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class Choice:
    """counts    children for each leaf of the frontier, in its order; 0 prunes
    solver    of a rule that solves a programme: how that went
    """

    counts: Sequence[int]
    solver: Mapping[str, float | str] = field(default_factory=dict)
