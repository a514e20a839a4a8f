"""GRPO without its two biases.

Liu et al. (Understanding R1-Zero-like Training, 2025). What differs from GRPO:
- the advantage is not divided by the group's deviation, which favours prompts that are nearly always or never solved;
- the loss is a sum over tokens divided by a constant (`aggregate.token_weights(..., "constant", limit)`), not a mean
  per response, which makes a long wrong response cheap.
Deviations: none; the constant is the recipe's, by default the token limit, as in the paper's code.
"""

from __future__ import annotations

from collections.abc import Sequence

from torch import Tensor

from plaudit.algo.grpo import group_relative


def centred(totals: Tensor, groups: Sequence[int]) -> Tensor:
    """(N,): the reward less the mean of its group, 0 for a group of one."""
    return group_relative(totals, groups, "none")
