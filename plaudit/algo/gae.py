"""Generalised advantage estimation.

Schulman et al. (2016). Deviations:
1. Masked tokens are no steps: value and advantage are carried over them, they neither discount nor add. A reward must
   lie on a policy token to count (`rewards.at_last_token`).
2. What follows the last token is the caller's to say, per sample and by its finish reason, never by its length: 0 where
   the sample ended, the critic's value where it was cut off and the recipe bootstraps.
3. returns = advantages + values, before any whitening.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

from plaudit.algo.lazy import torch
from plaudit.algo.tokens.ragged import discounted, policy_tokens

if TYPE_CHECKING:
    from torch import Tensor


def gae(
    rewards: Tensor, values: Tensor, mask: Tensor, lengths: Sequence[int], bootstrap: Tensor, gamma: float, lam: float
) -> tuple[Tensor, Tensor]:
    """Advantages and returns, (T,) each, 0 at masked tokens, without gradient.

    rewards, values  (T,); values[t] is the critic's before token t
    bootstrap        (N,) the value after the last token
    """
    steps: list[int] = policy_tokens(mask, lengths).tolist()
    reward, value = rewards.detach()[mask], values.detach()[mask]
    ends = torch.tensor(steps, device=values.device).cumsum(0) - 1
    some = torch.tensor([count > 0 for count in steps], dtype=torch.bool, device=values.device)
    following = value.roll(-1)
    following[ends[some]] = bootstrap.detach().to(value)[some]
    advantage = discounted(reward + gamma * following - value, steps, gamma * lam)
    advantages, returns = torch.zeros_like(values), torch.zeros_like(values)
    advantages[mask] = advantage
    returns[mask] = advantage + value
    return advantages, returns
