"""Odds ratio preference optimisation: SFT on the chosen responses, and the odds of chosen over rejected. No reference.

Hong et al. (2024), eq. 6 and 7, whose λ is β. P(y|x) is the geometric mean of its tokens' probabilities. The SFT term
is over the whole sequence, prompt included, as in TRL; `prompt_loss = false` excludes the prompt.
"""

from __future__ import annotations

import math

from plaudit.algo.lazy import Tensor, torch
from plaudit.algo.preference.method import PreferenceBatch, PreferenceMethod, Settings, mean_reward


def orpo_loss(batch: PreferenceBatch, settings: Settings) -> Tensor:
    assert batch.worse is not None
    assert batch.nll is not None
    odds = log_odds(batch.better.mean) - log_odds(batch.worse.mean)
    return batch.nll - settings.beta * torch.nn.functional.logsigmoid(odds)


def log_odds(logp_N: Tensor) -> Tensor:
    """log p / (1 - p), exact for p near 0 and near 1, where the direct formula loses all digits. Values of -0.0 and
    above, which only tokens of probability 1 have, are clamped just below 0."""
    logp_N = logp_N.clamp(max=-torch.finfo(logp_N.dtype).tiny)
    near_one_N = logp_N > -math.log(2)
    # Each branch gets inputs for which it is finite, otherwise its gradient would be 0 · inf.
    small_N = torch.log(-torch.expm1(torch.where(near_one_N, logp_N, -1.0)))
    large_N = torch.log1p(-torch.exp(torch.where(near_one_N, -1.0, logp_N)))
    return logp_N - torch.where(near_one_N, small_N, large_N)


METHOD = PreferenceMethod(
    orpo_loss, mean_reward, {"beta": 0.1, "prompt_loss": True}, reference=False, has_sft_term=True
)  # fmt: skip
