"""Direct preference optimisation: -log σ(β (log-ratio of the chosen response - that of the rejected one)).

Rafailov et al. (2023), eq. 7. No deviations.
"""

from __future__ import annotations

from plaudit.algo.lazy import Tensor, torch
from plaudit.algo.preference.method import PreferenceBatch, PreferenceMethod, Settings, ratio_reward


def dpo_loss(batch: PreferenceBatch, settings: Settings) -> Tensor:
    assert batch.worse is not None
    return -torch.nn.functional.logsigmoid(settings.beta * (batch.better.ratio - batch.worse.ratio))


METHOD = PreferenceMethod(dpo_loss, ratio_reward, {"beta": 0.1})
