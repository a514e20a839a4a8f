"""The costs of searching one question."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field, fields
from typing import Any


@dataclass(slots=True)
class Costs:
    """kv_tokens  summed over rounds: the tokens of distinct prefixes of all open paths, including the prompt, before
               pruning (ETS's measure); finished paths no longer count
    kv_peak    the maximum of one round
    generated  sampled tokens, including those that repeat a sibling's
    calls      sampled steps
    scored     paths sent to the PRM; twins are not sent again
    prm_tokens tokens the PRM computed for them, if it runs in this process
    seconds    from the first round to the last, including work for other questions
    solver, clustering   seconds spent on integer programs and on clustering
    unsolved   integer programs not solved to optimality
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
    """Sums over questions; maxima of peaks."""
    sums: dict[str, float] = {}
    for cost in costs:
        for name, value in cost.items():
            if name == "kv_peak":
                sums[name] = max(sums.get(name, 0), value)
            elif name != "kv":
                sums[name] = sums.get(name, 0) + value
    return sums
