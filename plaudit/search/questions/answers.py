"""Selects one answer from finished paths: scores of a path as one number, and the vote."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Literal

Vote = Literal["weighted", "majority", "best"]
Alike = Callable[[str, str], bool]  # (an answer, a known one)
AGGREGATES: Mapping[str, Callable[[Sequence[float]], float]] = {
    "last": lambda scores: scores[-1],
    "min": min,
    "mean": lambda scores: math.fsum(scores) / len(scores),
    "prod": math.prod,
}


@dataclass(frozen=True, slots=True)
class Answer:
    """The answer of one finished path. `node` is its last node."""

    text: str
    weight: float
    node: int


def tally(answers: Sequence[Answer], vote: Vote, alike: Alike) -> dict[str, float]:
    """Votes by the first answer of each kind, the winner first; ties go to the earlier one."""
    votes: dict[str, float] = {}
    for answer in answers:
        kind = _kind(answer.text, votes, alike)
        if vote == "best":
            votes[kind] = max(votes.get(kind, -math.inf), answer.weight)
        else:
            votes[kind] = votes.get(kind, 0.0) + (answer.weight if vote == "weighted" else 1.0)
    return dict(sorted(votes.items(), key=lambda item: -item[1]))


def as_odds(answers: Sequence[Answer]) -> list[Answer]:
    """Weights from whole-response scores: exp of the difference to the best. Such scores may be negative and have no
    natural zero, so their sum is meaningless; their differences are log-odds, as Bradley-Terry trains them."""
    best = max((answer.weight for answer in answers), default=0.0)
    return [replace(answer, weight=math.exp(answer.weight - best)) for answer in answers]


def winner(answers: Sequence[Answer], vote: Vote, alike: Alike) -> Answer | None:
    """The best answer of the kind with the most votes."""
    if not answers:
        return None
    votes = tally(answers, vote, alike)
    kinds = sorted(votes, key=[answer.text for answer in answers].index)  # in the order of the tally
    first = next(iter(votes))
    return max((a for a in answers if _kind(a.text, kinds, alike) == first), key=lambda a: a.weight)


def decided(answers: Sequence[Answer], vote: Vote, left: int, alike: Alike, sure: float = 1.0) -> bool:
    """Whether `left` further paths, each with a weight of at most 1, cannot change the winner; with `sure` below 1,
    whether the winner stays with at least that probability."""
    votes = list(tally(answers, vote, alike).values())
    if not votes or vote == "best":
        return left == 0
    lead = votes[0] - (votes[1] if len(votes) > 1 else 0.0)
    if lead > left or sure >= 1:
        return lead > left
    typical = math.fsum(votes) / len(answers)  # the expected weight of one more path
    return typical > 0 and _overturned(votes[0] / typical, math.fsum(votes[1:]) / typical, lead / typical, left) <= (
        1 - sure
    )


def _overturned(leading: float, others: float, lead: float, left: int) -> float:
    """The probability that `left` more votes remove the lead, if all votes not for the leader go to the second. The
    leader's share is unknown, with a uniform prior before the votes so far: future votes are Beta-binomial."""
    a, b = 1 + leading, 1 + others
    need = max(0, math.ceil((lead + left) / 2))  # against the leader; a tie may go either way

    def log_beta(x: float, y: float) -> float:
        return math.lgamma(x) + math.lgamma(y) - math.lgamma(x + y)

    return math.fsum(
        math.comb(left, k) * math.exp(log_beta(b + k, a + left - k) - log_beta(b, a)) for k in range(need, left + 1)
    )


def _kind(text: str, kinds: Iterable[str], alike: Alike) -> str:
    return next((kind for kind in kinds if alike(text, kind)), text)
