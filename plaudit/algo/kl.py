"""KL divergence between the policy and its reference.

Estimators: Schulman (Approximating KL Divergence, 2020). With d = log π - log π_ref of a token sampled from π:
    k1 = d                 unbiased, may be negative
    k2 = d² / 2            biased, never negative
    k3 = exp(-d) - 1 + d   unbiased, never negative
As a loss on on-policy samples they differ from the estimators of the value: the gradient of
k1 has expectation 0, that of k2 is the gradient of KL(π, π_ref), that of k3 is the gradient of KL(π_ref, π) (Tang and
Munos, 2025). Hence `straight_through` and `ratio`. The controller is that of Ziegler et al. (2019). Deviations:
1. d is clamped to ±20, so that a single token cannot make a batch infinite; beyond that there is no gradient.
2. `ratio` (DeepSeek-V3.2, 2025: the "unbiased KL") applies to any estimator, not only k3.
3. With straight_through and a ratio, the ratio weights the gradient of k2 and has no gradient itself, which would count
   the gradient twice.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from torch import Tensor

Estimator = Literal["k1", "k2", "k3"]

LOG_RATIO_LIMIT = 20.0


def kl_estimate(logp: Tensor, ref: Tensor, estimator: Estimator) -> Tensor:
    """Return the estimate (T,) at each token. logp, ref (T,): log π and log π_ref of tokens sampled from π."""
    difference = (logp - ref).clamp(-LOG_RATIO_LIMIT, LOG_RATIO_LIMIT)
    if estimator == "k1":
        return difference
    if estimator == "k2":
        return 0.5 * difference.square()
    return (-difference).expm1() + difference


def kl_loss(
    logp: Tensor, ref: Tensor, estimator: Estimator, straight_through: bool = False, ratio: Tensor | None = None
) -> Tensor:
    """Return the estimate (T,) as a loss, differentiable in logp.

    straight_through  the value of the estimator with the gradient of k2
    ratio             (T,) π / π_old, with its gradient: samples of π_old then estimate the KL of π without bias
    """
    loss = kl_estimate(logp, ref.detach(), estimator)
    if straight_through:
        k2 = kl_estimate(logp, ref.detach(), "k2")
        loss = loss.detach() + (k2 - k2.detach())
        ratio = None if ratio is None else ratio.detach()
    return loss if ratio is None else ratio * loss


@dataclass(slots=True)
class AdaptiveKl:
    """The KL coefficient: fixed without a target, else raised while the KL is above the target and lowered below it."""

    coef: float
    target: float | None = None
    horizon: int = 10_000

    def update(self, kl: float, samples: int) -> None:
        """Adapt the coefficient. `kl`: mean KL per sample, in the target's unit; `samples`: number of samples
        measured."""
        if self.target is not None:
            error = min(max(kl / self.target - 1, -0.2), 0.2)
            self.coef *= 1 + error * samples / self.horizon

    def state(self) -> dict[str, float]:
        return {"coef": self.coef}

    def load(self, state: dict[str, float]) -> None:
        self.coef = state["coef"]
