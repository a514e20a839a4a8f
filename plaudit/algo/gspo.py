"""Group sequence policy optimisation: one ratio for a whole response.

Zheng et al. (2025). The ratio of a sample is exp(mean log ratio of its policy tokens); the aggregation is "sequence",
the advantage GRPO's. Deviations:
1. The loss is given per token, equal over a sample, so that the aggregation is the same step as for every other method.
2. The mean log ratio is kept within ±20.
"""

from __future__ import annotations

from collections.abc import Sequence

from torch import Tensor

from plaudit.algo.ppo import LOG_RATIO_LIMIT, PolicyTerms, clip_ratio
from plaudit.algo.tokens.ragged import repeat, sample_mean


def gspo(
    logp: Tensor, old: Tensor, advantages: Tensor, mask: Tensor, lengths: Sequence[int], low: float, high: float
) -> PolicyTerms:
    """logp, old, advantages, mask: (T,); advantages are equal over a sample."""
    return clip_ratio(sequence_ratio(logp, old, mask, lengths), advantages, low, high)


def gspo_token(
    logp: Tensor, old: Tensor, advantages: Tensor, mask: Tensor, lengths: Sequence[int], low: float, high: float
) -> PolicyTerms:
    """The same ratio, but each token's gradient is its own: advantages may differ within a sample."""
    ratio = sequence_ratio(logp, old, mask, lengths).detach()
    return clip_ratio(ratio * (logp - logp.detach()).exp(), advantages, low, high)


def sequence_ratio(logp: Tensor, old: Tensor, mask: Tensor, lengths: Sequence[int]) -> Tensor:
    """(T,): exp(mean log ratio of the sample's policy tokens) at each of its tokens."""
    mean = sample_mean(logp - old.detach(), mask, lengths)
    return repeat(mean.clamp(-LOG_RATIO_LIMIT, LOG_RATIO_LIMIT).exp(), lengths)
