"""What a search of one question cost."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field, fields
from typing import Any


@dataclass(slots=True)
class Costs:
    """kv_tokens  summed over rounds: the tokens of distinct beginnings of all open paths, the prompt included, before
               anything is pruned (ETS's measure); paths that are over no longer count
    kv_peak    the most in one round
    generated  tokens that were drawn, also those that repeat a sibling's
    calls      steps that were drawn
    scored     paths that the PRM was given; twins are not given again
    prm_tokens tokens the PRM computed for them, where it runs here
    seconds    from the first round to the last, other questions' work included
    solver, clustering   seconds spent on programmes and on clusters
    unsolved   programmes whose solution is not proven best
    """

    kv_tokens: int = 0
    kv_peak: int = 0
    generated: int = 0
    calls: int = 0
    rounds: int = 0
    scored: int = 0
    prm_tokens: int = 0
    seconds: float = 0.0
    solver: float = 0.0
    clustering: float = 0.0
    unsolved: int = 0
    kv: list[int] = field(default_factory=list)
    """Per round."""

    def saw(self, kv_tokens: int) -> None:
        self.rounds += 1
        self.kv.append(kv_tokens)
        self.kv_tokens += kv_tokens
        self.kv_peak = max(self.kv_peak, kv_tokens)

    def figures(self) -> dict[str, Any]:
        return {f.name: getattr(self, f.name) for f in fields(self)}


def totals(costs: Iterable[dict[str, Any]]) -> dict[str, float]:
    """Sums over questions; of peaks the greatest."""
    sums: dict[str, float] = {}
    for cost in costs:
        for name, value in cost.items():
            if name == "kv_peak":
                sums[name] = max(sums.get(name, 0), value)
            elif name != "kv":
                sums[name] = sums.get(name, 0) + value
    return sums
