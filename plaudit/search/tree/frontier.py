"""The input of a rule: the leaves that may be expanded, without models, tokens or text."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field


@dataclass(frozen=True, slots=True)
class Leaf:
    """score     of the path to it
    branches  ids of its proper ancestors, the root first
    tokens    of its own step
    cluster   similar steps have the same number
    twin      the leaf that it repeats word for word; its own id if none
    times     how often it was expanded; not 0 only for nodes that a search returns to
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
    """width     children that may still be created: the search's width minus its finished leaves
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
    solver    the solver's status, for a rule with an integer program
    """

    counts: Sequence[int]
    solver: Mapping[str, float | str] = field(default_factory=dict)
