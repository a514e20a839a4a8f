"""Online DPO: the best of the policy's own responses to a prompt is preferred to the worst.

Guo et al. (Direct Language Model Alignment from Online AI Feedback, 2024). The loss is that of `preference/dpo.py`,
Rafailov et al. (2023), eq. 7; its β is `kl.coef`. Deviations:
1. Of more than two responses the best and the worst are the pair; the paper and TRL draw two.
2. Equal rewards give no pair, and the loss is the mean over the existing pairs. TRL prefers the first of equals.
3. Log-probs are those at the sampling temperature, as for every method here; TRL takes them at 1.
4. The loss is given per token, equal over a pair, so that the aggregation ("sequence") is the same step as for others.

Shapes: T tokens of N samples; consecutive samples form the P pairs.
"""

from __future__ import annotations

from collections.abc import Sequence

from plaudit.algo.lazy import Tensor, torch
from plaudit.algo.method import Advantages, Clip, Estimator, Loss, LossBatch, Method, PolicyTerms, RewardBatch
from plaudit.algo.methods.ppo import ratio_of
from plaudit.algo.tokens.ragged import repeat, sample_sum, spread


def best_and_worst(totals_N: Tensor, groups: Sequence[int]) -> Tensor:
    """Return (N,): 1 for the best of each group, -1 for its worst (ties: the first); 0 for the others, and for all of a
    group whose rewards are equal."""
    rewards: list[float] = totals_N.tolist()
    members: dict[int, list[int]] = {}
    for index, group in enumerate(groups):
        members.setdefault(group, []).append(index)
    signs_N = torch.zeros_like(totals_N)
    for indices in members.values():
        best, worst = max(indices, key=rewards.__getitem__), min(indices, key=rewards.__getitem__)
        if rewards[best] > rewards[worst]:
            signs_N[best], signs_N[worst] = 1.0, -1.0
    return signs_N


def _best_and_worst(batch: RewardBatch) -> Advantages:
    return Advantages(
        spread(best_and_worst(sample_sum(batch.rewards, batch.lengths), batch.groups), batch.mask, batch.lengths)
    )


def _loss(batch: LossBatch, clip: Clip) -> PolicyTerms:
    """Return -log σ(β (log-ratio of the best - that of the worst)) for pairs of samples with advantages 1 and -1."""
    assert batch.reference is not None
    lead_P = sample_sum(batch.advantages * (batch.logp - batch.reference), batch.lengths).view(-1, 2).sum(-1)
    loss_P = -torch.nn.functional.logsigmoid(batch.kl_coef * lead_P)
    nowhere = torch.zeros_like(batch.mask)
    loss_T = repeat(loss_P.repeat_interleave(2), batch.lengths)
    return PolicyTerms(loss_T, ratio_of(batch.logp, batch.old).detach(), nowhere, nowhere, nowhere)


METHOD = Method(
    advantage=Estimator("best-worst", _best_and_worst, grouped=True),
    loss=Loss("dpo", _loss, pairs=True),
    preset={"aggregate": "sequence", "kl": {"coef": 0.1, "where": "pairs"}},
)
