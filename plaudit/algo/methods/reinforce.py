"""REINFORCE.

Williams (1992). Deviations:
1. The loss uses the ratio to the sampling policy: on-policy the gradient is the paper's, A ∇log π, and stale samples
   are importance-weighted.
2. Masked tokens are not steps: they neither discount nor have a return.
"""

from __future__ import annotations

from collections.abc import Sequence

from plaudit.algo.lazy import Tensor, torch
from plaudit.algo.method import Advantages, Clip, Estimator, Loss, LossBatch, Method, PolicyTerms, RewardBatch
from plaudit.algo.methods.ppo import ratio_of
from plaudit.algo.tokens import ragged


def returns_to_go(rewards: Tensor, mask: Tensor, lengths: Sequence[int], gamma: float) -> Tensor:
    """(T,): the discounted rewards from each policy token on, 0 at masked tokens, whose rewards do not count."""
    steps: list[int] = ragged.policy_tokens(mask, lengths).tolist()
    returns = torch.zeros_like(rewards)
    returns[mask] = ragged.discounted(rewards[mask], steps, gamma)
    return returns


def plain(logp: Tensor, old: Tensor, advantages: Tensor) -> PolicyTerms:
    """The policy gradient without any clip. logp, old, advantages: (T,)."""
    ratio = ratio_of(logp, old)
    nowhere = torch.zeros_like(ratio, dtype=torch.bool)
    return PolicyTerms(-advantages.detach() * ratio, ratio.detach(), nowhere, nowhere, nowhere)


def _returns(batch: RewardBatch) -> Advantages:
    return Advantages(returns_to_go(batch.rewards, batch.mask, batch.lengths, batch.gamma))


def _loss(batch: LossBatch, clip: Clip) -> PolicyTerms:
    return plain(batch.logp, batch.old, batch.advantages)


RETURN = Estimator("return", _returns)
PLAIN = Loss("plain", _loss)
# A response is one action: its log-probs are summed.
METHOD = Method(advantage=RETURN, loss=PLAIN, preset={"aggregate": "constant", "constant": 1.0})
