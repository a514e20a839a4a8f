"""REINFORCE leave-one-out: the baseline of a sample is the mean of the others of its prompt.

Kool et al. (2019); Ahmadian et al. (Back to Basics, 2024). The loss is `reinforce.plain`, a response being one action:
aggregation "constant" with constant 1. Deviations:
1. A group of one gets 0, not its raw reward, because there is nothing to compare.

Shapes: N samples of G groups.
"""

from __future__ import annotations

from collections.abc import Sequence

from plaudit.algo.lazy import Tensor
from plaudit.algo.method import Advantages, Estimator, Method, RewardBatch
from plaudit.algo.methods.grpo import group_relative
from plaudit.algo.methods.reinforce import PLAIN
from plaudit.algo.tokens.ragged import group_index, sample_sum, spread


def leave_one_out(totals_N: Tensor, groups: Sequence[int]) -> Tensor:
    """(N,): reward - mean of the others = n / (n - 1) · (reward - mean of all)."""
    index_N, sizes_G = group_index(groups, totals_N.device)
    return group_relative(totals_N, groups, "none") * (sizes_G / (sizes_G - 1).clamp(min=1))[index_N]


def _leave_one_out(batch: RewardBatch) -> Advantages:
    relative_N = leave_one_out(sample_sum(batch.rewards, batch.lengths), batch.groups)
    return Advantages(spread(relative_N, batch.mask, batch.lengths))


METHOD = Method(
    advantage=Estimator("leave-one-out", _leave_one_out, grouped=True),
    loss=PLAIN,
    preset={
        "aggregate": "constant",
        "constant": 1.0,
        "kl": {"coef": 0.01, "where": "reward", "estimator": "k1"},
    },
)
