"""Losses of reward models and process reward models.

Pairs: Bradley and Terry (1952), as used for reward models by Ouyang et al. (2022). Steps: Lightman et al. (2023) for
labels 0 and 1, Wang et al. (Math-Shepherd, 2024) for soft ones. Deviations:
1. Pairs may have a margin (Llama 2, Touvron et al. 2023).
2. Scores can be centred at zero with a penalty on (chosen + rejected)² (Eisenstein et al. 2023): the loss itself is
   invariant to a shift.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor


def bradley_terry(chosen: Tensor, rejected: Tensor, margin: Tensor | None = None, centring: float = 0.0) -> Tensor:
    """The summed loss of N pairs. chosen, rejected, margin: (N,)."""
    lead = chosen - rejected
    if margin is not None:
        lead = lead - margin
    loss = -F.logsigmoid(lead).sum()
    if centring:
        loss = loss + centring * (chosen + rejected).square().sum()
    return loss


def attribute_error(scores: Tensor, ratings: Tensor) -> Tensor:
    """Return the summed squared error of N × A ratings; NaN marks a missing rating, which is ignored."""
    rated = ~ratings.isnan()
    return torch.where(rated, scores - torch.where(rated, ratings, 0.0), 0.0).square().sum()


def step_cross_entropy(logits: Tensor, targets: Tensor) -> Tensor:
    """The summed loss of N steps. logits (N, 2): wrong, right; targets (N,): the probability of right, in [0, 1]."""
    wrong, right = logits.float().log_softmax(-1).unbind(-1)
    return -(targets * right + (1 - targets) * wrong).sum()
