"""Group sequence policy optimisation: one importance ratio per response.

Zheng et al. (2025). The ratio of a sample is exp(mean log ratio of its policy tokens); the aggregation is "sequence",
the advantage GRPO's. Deviations:
1. The loss is given per token, equal over a sample, so that the aggregation is the same step as for every other method.
2. The mean log ratio is clamped to ±20.

Shapes: T tokens of N samples end to end.
"""

from __future__ import annotations

from collections.abc import Sequence

from plaudit.algo.lazy import Tensor
from plaudit.algo.method import Clip, Loss, LossBatch, Method, PolicyTerms
from plaudit.algo.methods.grpo import GROUP
from plaudit.algo.methods.ppo import LOG_RATIO_LIMIT, clip_ratio
from plaudit.algo.tokens.ragged import repeat, sample_mean


def gspo(
    logp_T: Tensor, old_T: Tensor, advantages_T: Tensor, mask_T: Tensor, lengths: Sequence[int], low: float, high: float
) -> PolicyTerms:
    """Advantages are equal over a sample."""
    return clip_ratio(sequence_ratio(logp_T, old_T, mask_T, lengths), advantages_T, low, high)


def gspo_token(
    logp_T: Tensor, old_T: Tensor, advantages_T: Tensor, mask_T: Tensor, lengths: Sequence[int], low: float, high: float
) -> PolicyTerms:
    """The same ratio, but each token's gradient is its own: advantages may differ within a sample."""
    ratio_T = sequence_ratio(logp_T, old_T, mask_T, lengths).detach()
    return clip_ratio(ratio_T * (logp_T - logp_T.detach()).exp(), advantages_T, low, high)


def sequence_ratio(logp_T: Tensor, old_T: Tensor, mask_T: Tensor, lengths: Sequence[int]) -> Tensor:
    """(T,): exp(mean log ratio of the sample's policy tokens) at each of its tokens."""
    mean_N = sample_mean(logp_T - old_T.detach(), mask_T, lengths)
    return repeat(mean_N.clamp(-LOG_RATIO_LIMIT, LOG_RATIO_LIMIT).exp(), lengths)


def _loss(batch: LossBatch, clip: Clip) -> PolicyTerms:
    return gspo(*batch[:5], clip.low, clip.high)


def _token_loss(batch: LossBatch, clip: Clip) -> PolicyTerms:
    return gspo_token(*batch[:5], clip.low, clip.high)


METHOD = Method(
    advantage=GROUP,
    loss=Loss("gspo", _loss),
    preset={"aggregate": "sequence", "advantage": {"scale": "group"}, "clip": {"low": 3e-4, "high": 4e-4}},
    more_losses=(Loss("gspo-token", _token_loss),),
)
