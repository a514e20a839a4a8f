"""Simple preference optimisation: mean log-probabilities instead of log-ratios, and a target margin γ. No reference.

Meng et al. (2024), eq. 6. No deviations. In TRL it is CPO with loss_type = "simpo" and cpo_alpha = 0.
"""

from __future__ import annotations

from plaudit.algo.lazy import Tensor, torch
from plaudit.algo.preference.method import PreferenceBatch, PreferenceMethod, Settings, mean_reward


def simpo_loss(batch: PreferenceBatch, settings: Settings) -> Tensor:
    assert batch.worse is not None
    assert settings.gamma is not None
    return -torch.nn.functional.logsigmoid(settings.beta * (batch.better.mean - batch.worse.mean) - settings.gamma)


METHOD = PreferenceMethod(simpo_loss, mean_reward, {"beta": 2.0, "gamma": 1.0}, reference=False)
