"""Group relative policy optimisation: a sample's reward against the others of its prompt.

Shao et al. (DeepSeekMath, 2024). The loss is PPO's (`ppo.clipped`), the aggregation "sequence", the KL a k3 loss.
Deviations:
1. The standard deviation is the unbiased one (n - 1), and eps = 1e-4 is added to it, as in TRL. The paper fixes
   neither; other systems add 1e-9 to 1e-5, which matters only for groups whose rewards hardly differ.
2. A group whose rewards are equal gets exactly 0, in any precision, and so does a group of one, which says nothing
   about which response is better.
3. scale = "batch" divides by the deviation of the rewards of the whole batch (Liu et al., Tricks or Traps, 2025),
   "none" not at all (Dr. GRPO, REINFORCE++ with a baseline).
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

from plaudit.algo.lazy import torch
from plaudit.algo.method import Advantages, Estimator, Method, Rewarded, Scale
from plaudit.algo.methods.ppo import CLIP
from plaudit.algo.tokens.ragged import group_index, sample_sum, spread

if TYPE_CHECKING:
    from torch import Tensor


def group_relative(totals: Tensor, groups: Sequence[int], scale: Scale, eps: float = 1e-4) -> Tensor:
    """(N,) float32: (reward - mean of its group) / (deviation + eps). totals (N,) rewards, groups (N,) prompt ids."""
    index, sizes = group_index(groups, totals.device)
    # In float64 the mean of equal float32 numbers is that number, to the bit.
    wide = totals.detach().float().double()
    centred = wide - _sums(wide, index, sizes)[index] / sizes[index]
    if scale == "group":
        deviation = (_sums(centred.square(), index, sizes) / (sizes - 1).clamp(min=1)).sqrt()[index]
        centred = centred / (deviation + eps)
    elif scale == "batch" and len(wide) > 1:
        centred = centred / (wide.std() + eps)
    return centred.float()


def _sums(values: Tensor, index: Tensor, sizes: Tensor) -> Tensor:
    """(N,) to (G,)."""
    return torch.zeros(len(sizes), dtype=values.dtype, device=values.device).index_add(0, index, values)


def _group(batch: Rewarded) -> Advantages:
    relative = group_relative(sample_sum(batch.rewards, batch.lengths), batch.groups, batch.scale)
    return Advantages(spread(relative, batch.mask, batch.lengths))


GROUP = Estimator("group", _group, grouped=True)
METHOD = Method(
    advantage=GROUP,
    loss=CLIP,
    preset={
        "aggregate": "sequence",
        "advantage": {"scale": "group"},
        "kl": {"coef": 0.04, "where": "loss", "estimator": "k3"},
    },
)
