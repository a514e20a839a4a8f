"""The loss of process reward models: cross-entropy of "this step is sound" at the end of each step.

Lightman et al. (2023) for labels 0 and 1; Wang et al. (Math-Shepherd, 2024) for soft labels, which are accepted too.
"""

from __future__ import annotations

from torch import Tensor


def step_cross_entropy(logits: Tensor, targets: Tensor) -> Tensor:
    """The summed loss of N steps. logits (N, 2): wrong, right; targets (N,): the chance of right, in [0, 1]."""
    wrong, right = logits.float().log_softmax(-1).unbind(-1)
    return -(targets * right + (1 - targets) * wrong).sum()
