"""Identity preference optimisation: the margin of the chosen response is regressed to 1 / 2β.

Azar et al. (2023), eq. 17, whose τ is β. Deviation: log-ratios are means over a response's tokens, as in TRL and, by
TRL's account, in the authors' own experiments. Sums would require the same margin of long and of short responses.
"""

from __future__ import annotations

from plaudit.algo.lazy import Tensor
from plaudit.algo.preference.method import PreferenceBatch, PreferenceMethod, Settings, ratio_reward


def ipo_loss(batch: PreferenceBatch, settings: Settings) -> Tensor:
    better, worse = batch.better, batch.worse
    assert worse is not None
    lead = better.ratio / better.length - worse.ratio / worse.length
    return (lead - 1 / (2 * settings.beta)).square()


METHOD = PreferenceMethod(ipo_loss, ratio_reward, {"beta": 0.1})
