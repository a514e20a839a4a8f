"""Whitening: mean 0 and standard deviation 1 over the policy tokens of the whole batch.

Ziegler et al. (2019) and their code; Huang et al. (The N Implementation Details of RLHF, 2023). Deviations:
1. Over the whole batch, all ranks and micro-batches, not per micro-batch: the result does not depend on the split.
2. Masked tokens are excluded from mean and variance and are set to 0.
3. The variance is the unbiased one (n - 1), 0 for a single token.

Shapes: T tokens, P of them the policy's own.
"""

from __future__ import annotations

import torch
from torch import Tensor


def whiten(values_T: Tensor, mask_T: Tensor) -> Tensor:
    """Return whitened values (T,). Equal values give exactly 0."""
    if not mask_T.any():
        return torch.zeros_like(values_T)
    # In float64 the mean of equal float32 numbers is that number, to the bit.
    wide_T = values_T.float().double()
    chosen_P = wide_T[mask_T]
    mean = chosen_P.mean()
    variance = (chosen_P - mean).square().sum() / max(len(chosen_P) - 1, 1)
    whitened_T = (wide_T - mean) * torch.rsqrt(variance + 1e-8)
    return torch.where(mask_T, whitened_T, 0.0).to(values_T.dtype)
