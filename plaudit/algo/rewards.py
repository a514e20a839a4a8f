"""Reward shaping before advantages are computed.

Running statistics by Welford (1962), merged as by Chan et al. (1983). Deviations:
1. A reward is normalised by statistics that already include it: update first, then normalise.
2. Clipping (`shaping.clip`) comes after normalising, in units of the deviation.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from plaudit.algo.tokens.ragged import policy_tokens


def at_last_token(per_sample: Tensor, mask: Tensor, lengths: Sequence[int]) -> Tensor:
    """(N,) to (T,): each sample's reward at its last policy token; a sample without one contributes nothing."""
    ends = policy_tokens(mask, lengths).cumsum(0)
    some = ends.diff(prepend=ends.new_zeros(1)) > 0
    placed = torch.zeros(len(mask), dtype=per_sample.dtype, device=mask.device)
    placed[mask.nonzero().squeeze(-1)[ends[some] - 1]] = per_sample[some]
    return placed


def length_penalty(lengths: Sequence[int], per_token: float) -> Tensor:
    """(N,) float32: -per_token for each token."""
    return -per_token * torch.tensor(lengths, dtype=torch.float32)


class RunningNorm:
    """Running mean and standard deviation of all rewards. Evaluation calls only `normalise`, which changes nothing."""

    def __init__(self) -> None:
        self.count = 0
        self.mean = 0.0
        self.squares = 0.0
        """The summed squared distance from the mean."""

    @property
    def std(self) -> float:
        """Unbiased; 1 until two rewards differ, so that the first different one is not divided by almost zero."""
        return (self.squares / (self.count - 1)) ** 0.5 if self.squares > 0 else 1.0

    def update(self, values: Tensor) -> None:
        if len(values) == 0:
            return
        wide = values.detach().double()
        count, mean, total = len(wide), wide.mean(), self.count + len(wide)
        apart = mean.item() - self.mean
        self.squares += (wide - mean).square().sum().item() + apart * apart * self.count * count / total
        self.mean += apart * count / total
        self.count = total

    def normalise(self, values: Tensor) -> Tensor:
        return (values - self.mean) / (self.std + 1e-8)

    def state(self) -> dict[str, float]:
        return {"count": self.count, "mean": self.mean, "squares": self.squares}

    def load(self, state: dict[str, float]) -> None:
        self.count, self.mean, self.squares = int(state["count"]), state["mean"], state["squares"]
