"""GRPO over trees: the responses to a prompt share their first steps, and a step is compared with its siblings.

After TreeRL (Hou et al., 2025) and Tree-GRPO (Ji et al., 2025). V(node) is the mean reward of the responses that go
through a node, V(root) that of the group. A segment of a response has the advantage V(its node) - V(its parent), so
that the advantages on a path sum to r - V(root), GRPO's, and each step is credited with its own effect. Deviations:
1. All segments of a group are divided by the standard deviation of its responses' rewards, as in GRPO, not of their
   siblings': two siblings always differ by the same number of deviations, however little they differ.
2. A segment that k responses share is in the loss k times, as often as the policy would sample it.

A tree that branches at its root alone is a group, and this is GRPO to the bit. Shapes: T tokens of N samples.
"""

from __future__ import annotations

from collections.abc import Sequence

from plaudit.algo.lazy import Tensor, torch
from plaudit.algo.method import Advantages, Estimator, Method, RewardBatch
from plaudit.algo.methods.grpo import METHOD as GRPO
from plaudit.algo.methods.grpo import group_relative
from plaudit.algo.tokens.ragged import repeat, sample_sum


def branch_relative(relative_N: Tensor, groups: Sequence[int], branches: Sequence[Sequence[Sequence[int]]]) -> Tensor:
    """Return each segment's advantage (T,). relative_N: rewards minus their group's mean, in any unit.
    branches: [node, end] of each segment of each sample; the last end is its length."""
    below: dict[tuple[int, int], list[float]] = {}
    for group, relative, parts in zip(groups, relative_N.double().tolist(), branches, strict=True):
        for node, _ in parts:
            below.setdefault((group, node), []).append(relative)
    value = {key: sum(leaves) / len(leaves) for key, leaves in below.items()}
    changes: list[float] = []
    lengths: list[int] = []
    for group, parts in zip(groups, branches, strict=True):
        above, begin = 0.0, 0
        for node, end in parts:
            changes.append(value[group, node] - above)
            lengths.append(end - begin)
            above, begin = value[group, node], end
    return repeat(torch.tensor(changes, dtype=torch.float64, device=relative_N.device).float(), lengths)


def _branch(batch: RewardBatch) -> Advantages:
    relative_N = group_relative(sample_sum(batch.rewards, batch.lengths), batch.groups, batch.scale)
    return Advantages(torch.where(batch.mask, branch_relative(relative_N, batch.groups, batch.branches), 0.0))


METHOD = Method(advantage=Estimator("branch", _branch, grouped=True), loss=GRPO.loss, preset=GRPO.preset)
