"""CISPO: the importance weight is clipped, and no token's gradient is dropped.

MiniMax (MiniMax-M1, 2025). The loss of a token is -sg(clip(ratio)) · A · log π. Deviations:
1. The flags mark every clipped weight, whatever the sign of its advantage: the bound applies to both.
2. The lower bound is an argument; the paper has none, which is low = 1.
"""

from __future__ import annotations

from plaudit.algo.lazy import Tensor, torch
from plaudit.algo.method import Clip, Loss, LossBatch, Method, PolicyTerms
from plaudit.algo.methods.grpo import GROUP
from plaudit.algo.methods.ppo import ratio_of


def cispo(logp: Tensor, old: Tensor, advantages: Tensor, low: float, high: float) -> PolicyTerms:
    """logp, old, advantages: (T,). low, high: distances from 1."""
    ratio = ratio_of(logp, old).detach()
    loss = -ratio.clamp(1 - low, 1 + high) * advantages.detach() * logp
    nowhere = torch.zeros_like(ratio, dtype=torch.bool)
    return PolicyTerms(loss, ratio, ratio < 1 - low, ratio > 1 + high, nowhere)


def _loss(batch: LossBatch, clip: Clip) -> PolicyTerms:
    return cispo(batch.logp, batch.old, batch.advantages, clip.low, clip.high)


METHOD = Method(
    advantage=GROUP,
    loss=Loss("cispo", _loss),
    preset={"advantage": {"scale": "group"}, "clip": {"low": 1.0, "high": 4.0}},
)
