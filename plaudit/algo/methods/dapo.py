"""DAPO.

Yu et al. (2025). Its clip-higher is `ppo.clipped` with high > low, its token-level loss is the aggregation "token", its
advantage is GRPO's; this file has the overlong penalty and dynamic sampling. Deviations:
1. The penalty at the limit is `factor`; the paper's is 1. Longer responses are not penalised more.
2. Dynamic sampling compares rewards themselves, so it also works for rewards other than 0 and 1.
"""

from __future__ import annotations

from collections.abc import Sequence

from plaudit.algo.lazy import Tensor, torch
from plaudit.algo.method import Method
from plaudit.algo.methods.grpo import GROUP
from plaudit.algo.methods.ppo import CLIP


def overlong_penalty(lengths: Sequence[int], limit: int, buffer: int, factor: float = 1.0) -> Tensor:
    """Return penalties (N,) float32: 0 up to limit - buffer tokens, then linear to -factor at limit tokens."""
    if not 0 < buffer <= limit:
        raise ValueError(f"buffer = {buffer}: expected 1 to the length limit, {limit}")
    into = torch.tensor(lengths, dtype=torch.float32) - (limit - buffer)
    return -factor * (into / buffer).clamp(0, 1)


def informative(totals: Tensor, groups: Sequence[int]) -> set[int]:
    """Return the ids of the groups whose rewards differ: the others have advantage 0 and no gradient."""
    rewards: list[float] = totals.tolist()
    seen: dict[int, float] = {}
    return {group for group, reward in zip(groups, rewards, strict=True) if seen.setdefault(group, reward) != reward}


METHOD = Method(
    advantage=GROUP,
    loss=CLIP,
    preset={"advantage": {"scale": "group"}, "clip": {"low": 0.2, "high": 0.28}, "dynamic": {}},
)
