"""Kahneman-Tversky optimisation: single responses with a label, no pairs.

Ethayarajh et al. (2024), eq. 7 and 8: a desirable response gains with its log-ratio above the baseline z, an
undesirable one with its log-ratio below. z estimates KL(π || π_ref) by responses to other prompts, over the whole
batch, not below 0 and without a gradient. No deviations.
"""

from __future__ import annotations

from plaudit.algo.lazy import Tensor, torch
from plaudit.algo.preference.method import PreferenceBatch, PreferenceMethod, Settings, ratio_reward


def kto_loss(batch: PreferenceBatch, settings: Settings) -> Tensor:
    assert batch.desirable is not None
    assert settings.desirable is not None
    assert settings.undesirable is not None
    lead = batch.better.ratio - batch.baseline
    signed = torch.where(batch.desirable, lead, -lead)
    weight = torch.where(batch.desirable, settings.desirable, settings.undesirable)
    return weight * (1 - torch.sigmoid(settings.beta * signed))


METHOD = PreferenceMethod(kto_loss, ratio_reward, {"beta": 0.1, "desirable": 1.0, "undesirable": 1.0}, pairs=False)
