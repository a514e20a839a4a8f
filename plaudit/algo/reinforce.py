"""REINFORCE.

Williams (1992). Deviations:
1. The loss goes through the ratio to the policy that sampled: on its own samples the gradient is the paper's, A ∇log π,
   and on stale ones it is weighted as it should be.
2. Masked tokens are no steps: they neither discount nor carry a return.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from plaudit.algo.ppo import PolicyTerms, ratio_of
from plaudit.algo.tokens import ragged


def returns_to_go(rewards: Tensor, mask: Tensor, lengths: Sequence[int], gamma: float) -> Tensor:
    """(T,): the discounted rewards from each policy token on, 0 at masked tokens, whose rewards do not count."""
    steps: list[int] = ragged.policy_tokens(mask, lengths).tolist()
    returns = torch.zeros_like(rewards)
    returns[mask] = ragged.discounted(rewards[mask], steps, gamma)
    return returns


def spread(per_sample: Tensor, mask: Tensor, lengths: Sequence[int]) -> Tensor:
    """(N,) to (T,): each sample's number at its policy tokens, 0 at masked ones."""
    return torch.where(mask, ragged.repeat(per_sample, lengths), 0.0)


def plain(logp: Tensor, old: Tensor, advantages: Tensor) -> PolicyTerms:
    """The policy gradient without any clip. logp, old, advantages: (T,)."""
    ratio = ratio_of(logp, old)
    nowhere = torch.zeros_like(ratio, dtype=torch.bool)
    return PolicyTerms(-advantages.detach() * ratio, ratio.detach(), nowhere, nowhere, nowhere)
