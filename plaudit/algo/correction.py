"""Importance correction for samples whose log-probs differ between the learner and the engine that sampled them.

Truncated importance sampling: Yao et al. (Your Efficient RL Framework Secretly Brings You Off-Policy RL Training,
2025), after Ionides (2008). Masked: Liu et al. (When Speed Kills Stability, 2025). The weight is π_old / behaviour,
in addition to PPO's ratio π / π_old (the decoupled objective of Hilton et al. 2022); it is 1 where both agree.
Deviations:
1. The log ratio, of a token or of a sample, is clamped to ±20.
2. "truncate" also raises weights to `floor`, which defaults to 0.
3. Weights are not normalised to mean 1.

Shapes: T tokens, P of them the policy's own.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Literal

import torch
from torch import Tensor

from plaudit.algo.methods.ppo import LOG_RATIO_LIMIT
from plaudit.algo.tokens.ragged import repeat, sample_mean, sample_sum

Mode = Literal["truncate", "mask"]
Level = Literal["token", "sequence", "geometric"]


def importance_weights(
    old_T: Tensor, behaviour_T: Tensor, mask_T: Tensor, lengths: Sequence[int], mode: Mode, level: Level, cap: float,
    floor: float = 0.0,
) -> tuple[Tensor, Tensor]:  # fmt: skip
    """Return weights (T,) without gradient, and a mask (T,) of the policy tokens kept; 0 and false at masked tokens.

    old, behaviour  the learner's and the engine's log-probs; at masked tokens they may be anything
    mode            truncate: clamp weights to [floor, cap]; mask: set weights outside of it to 0
    level           token: one per token; sequence: the product over the sample; geometric: the sample's mean
    """
    difference_T = torch.where(mask_T, old_T.detach() - behaviour_T, 0.0)
    if level == "sequence":
        difference_T = repeat(sample_sum(difference_T, lengths), lengths)
    elif level == "geometric":
        difference_T = repeat(sample_mean(difference_T, mask_T, lengths), lengths)
    weights_T = difference_T.clamp(-LOG_RATIO_LIMIT, LOG_RATIO_LIMIT).exp()
    kept_T = mask_T
    if mode == "truncate":
        weights_T = weights_T.clamp(floor, cap)
    else:
        kept_T = mask_T & (weights_T >= floor) & (weights_T <= cap)
    return torch.where(kept_T, weights_T, 0.0), kept_T


def mismatch(old_T: Tensor, behaviour_T: Tensor, mask_T: Tensor) -> dict[str, float]:
    """Return metrics of the difference between learner and engine log-probs over policy tokens.

    abs_mean, abs_max, abs_std  of |log π_old - log behaviour|
    k1, k3                      estimates of KL(behaviour, π_old)
    ess                         effective sample size of the untruncated token weights, as a share of the tokens
    correlation                 Pearson's, of the two probabilities; for constants 1 if they are equal, else 0
    """
    if not mask_T.any():
        return {"abs_mean": 0.0, "abs_max": 0.0, "abs_std": 0.0, "k1": 0.0, "k3": 0.0, "ess": 1.0, "correlation": 1.0}
    ours_P, theirs_P = old_T.detach()[mask_T].double(), behaviour_T.detach()[mask_T].double()
    difference = (ours_P - theirs_P).clamp(-LOG_RATIO_LIMIT, LOG_RATIO_LIMIT)
    size, weights = difference.abs(), difference.exp()
    figures = {
        "abs_mean": size.mean(),
        "abs_max": size.max(),
        "abs_std": size.std(correction=0),
        "k1": -difference.mean(),
        "k3": (difference.expm1() - difference).mean(),
        "ess": weights.sum().square() / (len(weights) * weights.square().sum()),
        "correlation": _pearson(ours_P.exp(), theirs_P.exp()),
    }
    return {name: figure.item() for name, figure in figures.items()}


def _pearson(a: Tensor, b: Tensor) -> Tensor:
    x, y = a - a.mean(), b - b.mean()
    scale = (x.square().sum() * y.square().sum()).sqrt()
    return (x * y).sum() / scale if scale > 0 else torch.tensor(float(torch.equal(a, b)))
