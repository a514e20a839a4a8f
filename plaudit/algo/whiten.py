"""Whitening: mean 0 and standard deviation 1 over the policy tokens of the whole batch.

Ziegler et al. (2019) and their code; Huang et al. (The N Implementation Details of RLHF, 2023). Deviations:
1. Over the whole batch, all ranks and micro-batches, not over each part: the result does not depend on the split.
2. Masked tokens have no part in mean and variance and come out as 0.
3. The variance is the unbiased one (n - 1), 0 for a single token.
"""

from __future__ import annotations

import torch
from torch import Tensor


def whiten(values: Tensor, mask: Tensor) -> Tensor:
    """(T,). Equal values come out as exactly 0."""
    if not mask.any():
        return torch.zeros_like(values)
    # In float64 the mean of equal float32 numbers is that number, to the bit.
    wide = values.float().double()
    chosen = wide[mask]
    mean = chosen.mean()
    variance = (chosen - mean).square().sum() / max(len(chosen) - 1, 1)
    whitened = (wide - mean) * torch.rsqrt(variance + 1e-8)
    return torch.where(mask, whitened, 0.0).to(values.dtype)
