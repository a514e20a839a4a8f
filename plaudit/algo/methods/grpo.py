"""Group relative policy optimisation: a sample's reward relative to the others of its prompt.

Shao et al. (DeepSeekMath, 2024). The loss is PPO's (`ppo.clipped`), the aggregation "sequence", the KL a k3 loss.
Deviations:
1. The standard deviation is the unbiased one (n - 1), and eps = 1e-4 is added to it, as in TRL. The paper specifies
   neither; other systems add 1e-9 to 1e-5, which matters only for groups whose rewards hardly differ.
2. A group whose rewards are equal gets exactly 0, in any precision, and so does a group of one, which has nothing to
   compare.
3. scale = "batch" divides by the deviation of the rewards of the whole batch (Liu et al., Tricks or Traps, 2025),
   "none" not at all (Dr. GRPO, REINFORCE++ with a baseline).

Shapes: N samples of G groups.
"""

from __future__ import annotations

from collections.abc import Sequence

from plaudit.algo.lazy import Tensor, torch
from plaudit.algo.method import Advantages, Estimator, Method, RewardBatch, Scale
from plaudit.algo.methods.ppo import CLIP
from plaudit.algo.tokens.ragged import group_index, sample_sum, spread


def group_relative(totals_N: Tensor, groups: Sequence[int], scale: Scale, eps: float = 1e-4) -> Tensor:
    """(N,) float32: (reward - mean of its group) / (deviation + eps). groups: the samples' prompts, by number."""
    index_N, sizes_G = group_index(groups, totals_N.device)
    # In float64 the mean of equal float32 numbers is that number, to the bit.
    wide_N = totals_N.detach().float().double()
    centred_N = wide_N - _sums(wide_N, index_N, sizes_G)[index_N] / sizes_G[index_N]
    if scale == "group":
        deviation_N = (_sums(centred_N.square(), index_N, sizes_G) / (sizes_G - 1).clamp(min=1)).sqrt()[index_N]
        centred_N = centred_N / (deviation_N + eps)
    elif scale == "batch" and len(wide_N) > 1:
        centred_N = centred_N / (wide_N.std() + eps)
    return centred_N.float()


def _sums(values_N: Tensor, index_N: Tensor, sizes_G: Tensor) -> Tensor:
    """(N,) to (G,)."""
    return torch.zeros(len(sizes_G), dtype=values_N.dtype, device=values_N.device).index_add(0, index_N, values_N)


def _group(batch: RewardBatch) -> Advantages:
    relative_N = group_relative(sample_sum(batch.rewards, batch.lengths), batch.groups, batch.scale)
    return Advantages(spread(relative_N, batch.mask, batch.lengths))


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
