"""Loss aggregation: the weight of each token. The loss is the sum of weight × per-token loss.

Three ways, as compared by Yu et al. (DAPO, 2025) and Liu et al. (Dr. GRPO, 2025):
    token     1 / all policy tokens of the batch                              DAPO
    sequence  a mean over each sample's policy tokens, then over samples      Shao et al. (GRPO, 2024)
    constant  1 / (samples · constant): a sum over tokens, scaled             Dr. GRPO; constant = 1 is the plain sum
Deviations:
1. Weights are computed over the whole batch, all ranks and micro-batches. Each micro-batch uses its slice, so that the
   gradients add up to the batch's gradient for any split.
2. A sample without policy tokens is not counted in any denominator: it has no gradient and must not dilute the others.
   Samples with advantage 0 are counted: they were sampled from the policy, and excluding them would make the step
   larger the less there is to learn.
3. A batch without any policy token has weights 0, not 0 / 0.

Shapes: T tokens of N samples end to end.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Literal

from torch import Tensor

from plaudit.algo.tokens.ragged import policy_tokens, repeat

Aggregation = Literal["token", "sequence", "constant"]


def token_weights(mask_T: Tensor, lengths: Sequence[int], how: Aggregation, constant: float | None = None) -> Tensor:
    """Return token weights (T,) float32, 0 outside the mask. Mask and lengths are those of the whole batch."""
    tokens_N = policy_tokens(mask_T, lengths)
    samples = (tokens_N > 0).sum().clamp(min=1)
    if how == "token":
        return mask_T.float() / tokens_N.sum().clamp(min=1)
    if how == "sequence":
        return mask_T.float() / repeat(tokens_N.clamp(min=1) * samples, lengths)
    if constant is None or constant <= 0:
        raise ValueError(f'aggregate = "constant" divides by constant = {constant}: set it above 0')
    return mask_T.float() / (samples * constant)
