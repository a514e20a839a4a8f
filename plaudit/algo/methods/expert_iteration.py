"""Expert iteration: the policy imitates the best response to each prompt, then samples again.

Anthony et al. (Thinking Fast and Slow, 2017); for language models Zelikman et al. (STaR, 2022), Gulcehre et al. (ReST,
2023). The search is the recipe's sampling: independent responses, or a tree of them (`sampling.branch`).
Deviations:
1. An iteration is one step: the targets are always the newest policy's. The papers collect many prompts first.
2. A group whose rewards are all equal has no gradient: if all fail there is nothing to imitate.
3. Imitation is the policy gradient with the advantage 1, times the group's size, so that the mean over responses
   ("sequence") is the mean log-likelihood of the best ones.

Shapes: T tokens of N samples.
"""

from __future__ import annotations

from collections.abc import Sequence

from plaudit.algo.lazy import Tensor, torch
from plaudit.algo.method import Advantages, Estimator, Method, RewardBatch
from plaudit.algo.methods.reinforce import PLAIN
from plaudit.algo.tokens.ragged import sample_sum, spread


def best_alone(totals_N: Tensor, groups: Sequence[int]) -> Tensor:
    """Return (N,): the group size for the best of each group (ties: the first); 0 for the others, and for all of a
    group whose rewards are equal."""
    rewards: list[float] = totals_N.tolist()
    members: dict[int, list[int]] = {}
    for index, group in enumerate(groups):
        members.setdefault(group, []).append(index)
    weights_N = torch.zeros_like(totals_N)
    for indices in members.values():
        best, worst = max(indices, key=rewards.__getitem__), min(indices, key=rewards.__getitem__)
        if rewards[best] > rewards[worst]:
            weights_N[best] = float(len(indices))
    return weights_N


def _best(batch: RewardBatch) -> Advantages:
    weights_N = best_alone(sample_sum(batch.rewards, batch.lengths), batch.groups)
    return Advantages(spread(weights_N, batch.mask, batch.lengths))


METHOD = Method(
    advantage=Estimator("best-only", _best, grouped=True), loss=PLAIN, preset={"aggregate": "sequence"},
)  # fmt: skip
