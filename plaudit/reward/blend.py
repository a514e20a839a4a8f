"""Combines several rewards to one score."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence

from plaudit.config.reward import BlendTable
from plaudit.records import Item, ItemError, Score, StepScores
from plaudit.reward.reward import Result, Reward
from plaudit.reward.version import joined


def combine(table: BlendTable, results: Mapping[str, Result]) -> Score:
    """The combined score of one item. A process model contributes its aggregate. If a member failed, the blend
    fails."""
    values: dict[str, float] = {}
    for name in table.members:
        result = results[name]
        value = result.aggregate if isinstance(result, StepScores) else result.value
        if value is None:
            assert result.error is not None
            message = f"{name} failed ({result.error.type}): {result.error.message}"
            return Score(error=ItemError("member_failed", message))
        values[name] = value
    blended = _blended(table, values)
    if not math.isfinite(blended):
        return Score(error=ItemError("nonfinite_score", "the weighted sum of the members' finite scores is not finite"))
    return Score(
        blended, attributes=values, version=joined((r.version for r in results.values() if r.version), table),
        truncated=any(r.truncated for r in results.values()), tokens=sum(r.tokens for r in results.values()),
    )  # fmt: skip


def _blended(table: BlendTable, values: Mapping[str, float]) -> float:
    weights = table.members
    weighted = [weights[name] * value for name, value in values.items()]
    if table.combine == "min":
        return min(weighted)
    if table.combine == "sum":
        return sum(weighted)
    total = sum(weights.values())
    mean = sum(weighted) / total
    variance = sum(weights[name] * (value - mean) ** 2 for name, value in values.items()) / total
    return mean - table.deviation * math.sqrt(variance)


class BlendReward:
    def __init__(self, table: BlendTable, members: Mapping[str, Reward]) -> None:
        self.table = table
        self.members = members

    def score(self, items: Sequence[Item]) -> list[Result]:
        results = {name: self.members[name].score(items) for name in self.table.members}
        return [combine(self.table, {name: of[i] for name, of in results.items()}) for i in range(len(items))]

    def close(self) -> None:
        for member in self.members.values():
            member.close()
