"""Proximal policy optimisation: the clipped ratio.

Schulman et al. (2017). Deviations:
1. Two bounds, 1 - low and 1 + high (DAPO, Yu et al. 2025); the paper's are low = high.
2. `dual` bounds the loss of negative advantages, at dual · |A| (Ye et al. 2020).
3. The log ratio is clamped to ±20, so that exp stays finite; beyond that there is no gradient.
4. The value loss may be clipped around the values of rollout time, as in the paper's code: half the larger square.
"""

from __future__ import annotations

from plaudit.algo.gae import gae
from plaudit.algo.lazy import Tensor, torch
from plaudit.algo.method import Advantages, Clip, Estimator, Loss, LossBatch, Method, PolicyTerms, RewardBatch

LOG_RATIO_LIMIT = 20.0


def ratio_of(logp: Tensor, old: Tensor) -> Tensor:
    """(T,): π / π_old with its gradient; exactly 1 where the two are equal."""
    return (logp - old.detach()).clamp(-LOG_RATIO_LIMIT, LOG_RATIO_LIMIT).exp()


def clipped(
    logp: Tensor, old: Tensor, advantages: Tensor, low: float, high: float, dual: float | None = None
) -> PolicyTerms:
    """logp, old, advantages: (T,); only logp has a gradient. low, high: distances from 1; dual: above 1.

    All of them finite, at masked tokens too: 0 · NaN is NaN.
    """
    return clip_ratio(ratio_of(logp, old), advantages, low, high, dual)


def clip_ratio(ratio: Tensor, advantages: Tensor, low: float, high: float, dual: float | None = None) -> PolicyTerms:
    """The same from a ratio (T,)."""
    advantages = advantages.detach()
    loss = torch.maximum(-advantages * ratio, -advantages * ratio.clamp(1 - low, 1 + high))
    clipped_dual = torch.zeros_like(ratio, dtype=torch.bool)
    if dual is not None:
        ceiling = -advantages * dual
        clipped_dual = (advantages < 0) & (loss > ceiling)
        loss = torch.where(clipped_dual, ceiling, loss)
    at = ratio.detach()
    return PolicyTerms(loss, at, (advantages < 0) & (at < 1 - low), (advantages > 0) & (at > 1 + high), clipped_dual)


def value_loss(values: Tensor, old_values: Tensor, returns: Tensor, clip: float | None = None) -> Tensor:
    """Return half the squared error (T,); with a clip, the larger of that of the value and of the clipped value."""
    error = (values - returns).square()
    if clip is not None:
        near = old_values + (values - old_values).clamp(-clip, clip)
        error = torch.maximum(error, (near - returns).square())
    return 0.5 * error


def value_clipped(values: Tensor, old_values: Tensor, returns: Tensor, clip: float) -> Tensor:
    """Return a mask (T,) of where the clip of `value_loss` is active, and the value has no gradient."""
    near = old_values + (values - old_values).clamp(-clip, clip)
    return (near - returns).square() > (values - returns).square()


def explained_variance(values: Tensor, returns: Tensor, mask: Tensor) -> float:
    """1 - Var(returns - values) / Var(returns) over policy tokens: 1 perfect, 0 no better than a constant.

    0 if the returns do not vary.
    """
    target, error = returns[mask].double(), (returns - values)[mask].double()
    if len(target) < 2 or (spread := target.var().item()) == 0:
        return 0.0
    return 1 - error.var().item() / spread


def _gae(batch: RewardBatch) -> Advantages:
    assert batch.values is not None
    assert batch.bootstrap is not None
    return Advantages(
        *gae(batch.rewards, batch.values, batch.mask, batch.lengths, batch.bootstrap, batch.gamma, batch.lam)
    )


def _loss(batch: LossBatch, clip: Clip) -> PolicyTerms:
    return clipped(batch.logp, batch.old, batch.advantages, clip.low, clip.high, clip.dual)


GAE = Estimator("gae", _gae, critic=True)
CLIP = Loss("clip", _loss)
METHOD = Method(
    advantage=GAE,
    loss=CLIP,
    preset={"advantage": {"whiten": True}, "kl": {"coef": 0.02, "where": "reward", "estimator": "k1"}},
)
