"""From finished paths to one answer: scores of a path as one number, and the vote."""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from fractions import Fraction
from typing import Literal

Aggregate = Literal["last", "min", "mean", "prod"]
Vote = Literal["weighted", "majority", "best"]
AGGREGATES: Mapping[str, Callable[[Sequence[float]], float]] = {
    "last": lambda scores: scores[-1],
    "min": min,
    "mean": lambda scores: math.fsum(scores) / len(scores),
    "prod": math.prod,
}
_NUMBER = re.compile(r"[+-]?(\d+(\.\d*)?|\.\d+)(/\d+)?")


@dataclass(frozen=True, slots=True)
class Answer:
    """What one finished path answers. `node` is its last."""

    text: str
    weight: float
    node: int


def same(text: str) -> str:
    """What equal answers have in common: white space aside the text, and of a number its value ("7.0" is "7")."""
    plain = " ".join(text.split()).replace(",", "") if _NUMBER.fullmatch(text.strip().replace(",", "")) else ""
    if plain:
        top, _, bottom = plain.partition("/")
        if not bottom or int(bottom):
            return str(Fraction(top) / Fraction(bottom or 1))
    return " ".join(text.split())


def tally(answers: Sequence[Answer], vote: Vote, key: Callable[[str], str] = same) -> dict[str, float]:
    """Votes by what equal answers have in common, the winner first; ties go to the one that came first."""
    votes: dict[str, float] = {}
    for answer in answers:
        kind = key(answer.text)
        if vote == "best":
            votes[kind] = max(votes.get(kind, -math.inf), answer.weight)
        else:
            votes[kind] = votes.get(kind, 0.0) + (answer.weight if vote == "weighted" else 1.0)
    return dict(sorted(votes.items(), key=lambda item: -item[1]))


def winner(answers: Sequence[Answer], vote: Vote, key: Callable[[str], str] = same) -> Answer | None:
    """The best answer of the kind that has most votes."""
    if not answers:
        return None
    first = next(iter(tally(answers, vote, key)))
    return max((a for a in answers if key(a.text) == first), key=lambda a: a.weight)


def decided(answers: Sequence[Answer], vote: Vote, left: int, key: Callable[[str], str] = same) -> bool:
    """Whether `left` further paths, of a weight of at most 1 each, cannot change who wins."""
    votes = list(tally(answers, vote, key).values())
    if not votes or vote == "best":
        return left == 0
    return votes[0] - (votes[1] if len(votes) > 1 else 0.0) > left
