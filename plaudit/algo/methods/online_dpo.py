"""Online DPO: the best of the policy's own responses to a prompt is preferred to the worst.

Guo et al. (Direct Language Model Alignment from Online AI Feedback, 2024). The loss is that of `preference/dpo.py`,
Rafailov et al. (2023), eq. 7; its β is `kl.coef`. Deviations:
1. Of more than two responses the best and the worst are the pair; the paper and TRL draw two.
2. Equal rewards give no pair, and the loss is the mean over the pairs there are. TRL prefers the first of equals.
3. Log-probs are those at the sampling temperature, as for every method here; TRL takes them at 1.
4. The loss is given per token, equal over a pair, so that the aggregation ("sequence") is the same step as for others.

Shapes: T tokens of N samples, two by two the P pairs.
"""

from __future__ import annotations

from collections.abc import Sequence

from plaudit.algo.lazy import Tensor, torch
from plaudit.algo.method import Advantages, Clip, Drawn, Estimator, Loss, Method, PolicyTerms, Rewarded
from plaudit.algo.methods.ppo import ratio_of
from plaudit.algo.tokens.ragged import repeat, sample_sum, spread


def best_and_worst(totals_N: Tensor, groups: Sequence[int]) -> Tensor:
    """(N,): 1 for the best of each group, -1 for its worst, the first of equals; 0 for the others, and for all of a
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


def _best_and_worst(batch: Rewarded) -> Advantages:
    return Advantages(
        spread(best_and_worst(sample_sum(batch.rewards, batch.lengths), batch.groups), batch.mask, batch.lengths)
    )


def _loss(drawn: Drawn, clip: Clip) -> PolicyTerms:
    """-log σ(β (log-ratio of the best - that of the worst)), of samples that are pairs with advantages 1 and -1."""
    assert drawn.reference is not None
    lead_P = sample_sum(drawn.advantages * (drawn.logp - drawn.reference), drawn.lengths).view(-1, 2).sum(-1)
    loss_P = -torch.nn.functional.logsigmoid(drawn.kl_coef * lead_P)
    nowhere = torch.zeros_like(drawn.mask)
    loss_T = repeat(loss_P.repeat_interleave(2), drawn.lengths)
    return PolicyTerms(loss_T, ratio_of(drawn.logp, drawn.old).detach(), nowhere, nowhere, nowhere)


METHOD = Method(
    advantage=Estimator("best-worst", _best_and_worst, grouped=True),
    loss=Loss("dpo", _loss, pairs=True),
    preset={"aggregate": "sequence", "kl": {"coef": 0.1, "where": "pairs"}},
)
