"""When two answers are the same: as text and number, or as mathematics."""

from __future__ import annotations

import re
from fractions import Fraction
from functools import lru_cache
from typing import Literal, Protocol

from plaudit.records import Item, Score

REMEMBERED = 1 << 16
_NUMBER = re.compile(r"[+-]?(\d+(\.\d*)?|\.\d+)(/\d+)?")


class Equivalence(Protocol):
    """undecided   comparisons that failed or took too long; they count as different"""

    undecided: int

    def __call__(self, text: str, reference: str) -> bool:
        """Whether an answer says what a known one, or the truth, says."""

    def close(self) -> None: ...


class SameNumber:
    undecided = 0

    def __call__(self, text: str, reference: str) -> bool:
        return same(text) == same(reference)

    def close(self) -> None:
        pass


class SameMathematics:
    """By math-verify, in a process of its own: an answer may be anything, also what no program finishes."""

    def __init__(self, seconds: float = 5.0) -> None:
        from plaudit.config.reward import RuleTable
        from plaudit.reward.rules.rule import RuleReward

        self.undecided = 0
        self._rule = RuleReward(RuleTable(rule="math", timeout=seconds))
        self._equal = lru_cache(REMEMBERED)(self._ask)

    def __call__(self, text: str, reference: str) -> bool:
        return same(text) == same(reference) or self._equal(text, reference)

    def close(self) -> None:
        self._rule.close()

    def _ask(self, text: str, reference: str) -> bool:
        # In dollars, so that it is read as LaTeX whatever it is.
        (score,) = self._rule.score([Item(prompt="", response=f"${text}$", truth=f"${reference}$")])
        if not isinstance(score, Score) or score.error is not None:
            self.undecided += 1
            return False
        return score.value == 1.0


def open_equivalence(kind: Literal["number", "math"]) -> Equivalence:
    return SameMathematics() if kind == "math" else SameNumber()


@lru_cache(REMEMBERED)
def same(text: str) -> str:
    """What equal answers have in common: white space aside the text, and of a number its value ("7.0" is "7")."""
    plain = " ".join(text.split()).replace(",", "") if _NUMBER.fullmatch(text.strip().replace(",", "")) else ""
    if plain:
        top, _, bottom = plain.partition("/")
        if not bottom or int(bottom):
            return str(Fraction(top) / Fraction(bottom or 1))
    return " ".join(text.split())
