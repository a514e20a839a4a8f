"""Simple preference optimisation: mean log-probabilities in place of log-ratios, and a lead of γ. No reference.

Meng et al. (2024), eq. 6. No deviations. TRL has it as CPO with loss_type = "simpo" and cpo_alpha = 0.
"""

from __future__ import annotations

from plaudit.algo.lazy import Tensor, torch
from plaudit.algo.preference.method import Judged, PreferenceMethod, Settings, mean_reward


def simpo_loss(judged: Judged, settings: Settings) -> Tensor:
    assert judged.worse is not None
    assert settings.gamma is not None
    return -torch.nn.functional.logsigmoid(settings.beta * (judged.better.mean - judged.worse.mean) - settings.gamma)


METHOD = PreferenceMethod(simpo_loss, mean_reward, {"beta": 2.0, "gamma": 1.0}, reference=False)
