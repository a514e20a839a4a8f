"""Generalised advantage estimation.

Schulman et al. (2016). Deviations:
1. Masked tokens are not steps: value and advantage pass over them without discount. A reward must be on a policy token
   to count (`rewards.at_last_token`).
2. The caller gives the value after the last token of each sample, by its finish reason, never by its length: 0 if the
   sample ended, the critic's value if it was truncated and the recipe bootstraps (its reward then is 0).
3. returns = advantages + values, before any whitening.

Shapes: T tokens of N samples end to end, P of them the policy's own.
"""

from __future__ import annotations

from collections.abc import Sequence

from plaudit.algo.lazy import Tensor, torch
from plaudit.algo.tokens.ragged import discounted, policy_tokens


def gae(
    rewards_T: Tensor, values_T: Tensor, mask_T: Tensor, lengths: Sequence[int], bootstrap_N: Tensor, gamma: float,
    lam: float,
) -> tuple[Tensor, Tensor]:  # fmt: skip
    """Return advantages and returns, (T,) each, 0 at masked tokens, without gradient.

    values_T[t]  the critic's before token t
    bootstrap_N  the value after the last token
    """
    steps: list[int] = policy_tokens(mask_T, lengths).tolist()
    reward_P, value_P = rewards_T.detach()[mask_T], values_T.detach()[mask_T]
    ends_N = torch.tensor(steps, device=values_T.device).cumsum(0) - 1
    some_N = torch.tensor([count > 0 for count in steps], dtype=torch.bool, device=values_T.device)
    following_P = value_P.roll(-1)
    following_P[ends_N[some_N]] = bootstrap_N.detach().to(value_P)[some_N]
    advantage_P = discounted(reward_P + gamma * following_P - value_P, steps, gamma * lam)
    advantages_T, returns_T = torch.zeros_like(values_T), torch.zeros_like(values_T)
    advantages_T[mask_T] = advantage_P
    returns_T[mask_T] = advantage_P + value_P
    return advantages_T, returns_T
