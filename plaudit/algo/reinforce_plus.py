"""REINFORCE++: no critic, and advantages normalised over the whole batch in place of the group.

Hu (REINFORCE++, 2025). The loss is `ppo.clipped`. Deviations:
1. The batch is the whole one, all ranks and micro-batches (`whiten`).
2. The KL penalty is the caller's: in `rewards` for the plain form, as a loss for the baseline form, as in the paper.
"""

from __future__ import annotations

from collections.abc import Sequence

from torch import Tensor

from plaudit.algo.grpo import group_relative
from plaudit.algo.reinforce import returns_to_go, spread
from plaudit.algo.whiten import whiten


def reinforce_plus(rewards: Tensor, mask: Tensor, lengths: Sequence[int], gamma: float = 1.0) -> Tensor:
    """(T,): whitened returns to go. rewards (T,)."""
    return whiten(returns_to_go(rewards, mask, lengths, gamma), mask)


def reinforce_plus_baseline(totals: Tensor, groups: Sequence[int], mask: Tensor, lengths: Sequence[int]) -> Tensor:
    """(T,): rewards less their group's mean, whitened. totals (N,), groups (N,)."""
    return whiten(spread(group_relative(totals, groups, "none"), mask, lengths), mask)
