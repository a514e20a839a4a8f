"""A finding of a rule: its severity, a sentence with the numbers, and the fix."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Literal

Severity = Literal["bad", "watch", "fine"]
WORST_FIRST: tuple[Severity, ...] = ("bad", "watch", "fine")

# With fewer points a trend cannot be distinguished from chance.
ENOUGH = 12


@dataclass(frozen=True, slots=True)
class Finding:
    rule: str
    severity: Severity
    says: str
    cure: str = ""
    step: int | None = None
    """The step at which it begins: marked in the plot of the reward."""


def percent(share: float) -> str:
    # Small shares, and shares close to 1, are not rounded to 0 or 100.
    digits = 1 if 0 < share < 0.0995 or 0.99 < share < 1 else 0
    return "nan" if math.isnan(share) else f"{100 * share:.{digits}f} %"


def number(value: float) -> str:
    return f"{value:.3g}"


def size(amount: float) -> str:
    """A memory size with three digits and a unit."""
    unit = 0
    while amount >= 1000 and unit < 4:
        amount, unit = amount / 1024, unit + 1
    return f"{amount:.3g} {('B', 'KiB', 'MiB', 'GiB', 'TiB')[unit]}"


def count(many: int, noun: str) -> str:
    return f"{many} {noun}" if many == 1 else f"{many} {noun}s"
