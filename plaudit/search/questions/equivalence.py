"""Decides whether two answers are the same: by their notation, or by mathematical equivalence."""

from __future__ import annotations

from functools import lru_cache
from typing import Literal, Protocol

from plaudit.records import Item, Score
from plaudit.search.questions.answer_form import REMEMBERED, answer_form


class Equivalence(Protocol):
    """undecided   comparisons that failed or timed out; they count as different"""

    undecided: int

    def __call__(self, text: str, reference: str) -> bool:
        """Whether an answer is equivalent to a known one, or to the truth."""

    def close(self) -> None: ...


class SameNumber:
    undecided = 0

    def __call__(self, text: str, reference: str) -> bool:
        return answer_form(text).says(answer_form(reference))

    def close(self) -> None:
        pass


class SameMathematics:
    """Uses math-verify, in a separate process: an answer may be anything, including expressions that never finish."""

    def __init__(self, seconds: float = 5.0) -> None:
        from plaudit.config.reward import RuleTable
        from plaudit.reward.rules.rule import RuleReward

        self.undecided = 0
        self._rule = RuleReward(RuleTable(rule="math", timeout=seconds))
        self._equal = lru_cache(REMEMBERED)(self._ask)

    def __call__(self, text: str, reference: str) -> bool:
        return answer_form(text).says(answer_form(reference)) or self._equal(text, reference)

    def close(self) -> None:
        self._rule.close()

    def _ask(self, text: str, reference: str) -> bool:
        # Wrapped in dollars, so that it is parsed as LaTeX.
        (score,) = self._rule.score([Item(prompt="", response=f"${text}$", truth=f"${reference}$")])
        if not isinstance(score, Score) or score.error is not None:
            self.undecided += 1
            return False
        return score.value == 1.0


def open_equivalence(kind: Literal["number", "math"]) -> Equivalence:
    return SameMathematics() if kind == "math" else SameNumber()
