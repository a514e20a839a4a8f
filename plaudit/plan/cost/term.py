"""A number with its derivation: value, unit, formula and inputs."""

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import dataclass

UNITS = ("s", "B", "FLOP", "$", "token", "W", "1")


@dataclass(frozen=True, slots=True)
class Term:
    name: str
    value: float
    unit: str
    formula: str = ""
    inputs: tuple[tuple[str, float], ...] = ()
    parts: tuple[Term, ...] = ()

    def __post_init__(self) -> None:
        if self.unit not in UNITS:
            raise ValueError(f"{self.name} is in {self.unit!r}, which is none of {', '.join(UNITS)}")
        if not self.value >= 0 or math.isinf(self.value):
            raise ValueError(f"{self.name} = {self.value} {self.unit}: expected a finite number, zero or more")


def total(name: str, parts: Iterable[Term], unit: str, formula: str = "sum of the parts") -> Term:
    """Sum terms of one unit. Mixed units (adding bytes to seconds) raise an error."""
    kept = tuple(parts)
    for part in kept:
        if part.unit != unit:
            raise ValueError(f"{name} is in {unit} and its part {part.name} in {part.unit}")
    return Term(name, sum(part.value for part in kept), unit, formula, (), kept)


def times(name: str, count: float, part: Term, what: str) -> Term:
    return Term(name, count * part.value, part.unit, f"{what} × {part.name}", ((what, count),), (part,))
