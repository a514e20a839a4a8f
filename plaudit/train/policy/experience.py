"""Training input of a step: scored samples as flat arrays over their response tokens, concatenated without padding."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from itertools import chain
from operator import attrgetter

import numpy as np
import torch
from torch import Tensor

from plaudit.algo.methods.online_dpo import best_and_worst
from plaudit.core.model.packing import send
from plaudit.records import Sample

FIELDS = (
    "mask", "behaviour", "advantages", "old", "reference", "values", "returns", "token_rewards", "kept", "taught",
    "likely", "likely_logp",
)  # fmt: skip


@dataclass(frozen=True)
class Experience:
    """N samples with T response tokens. Fields that a recipe does not use are None."""

    samples: tuple[Sample, ...]
    mask: Tensor
    """(T,) bool: the tokens to train on."""
    behaviour: Tensor
    """(T,) log-probs of the engine, under the whole softmax at the sampling temperature."""
    advantages: Tensor
    old: Tensor | None = None
    """(T,) log-probs before the first update; None: taken from the first forward pass."""
    reference: Tensor | None = None
    values: Tensor | None = None
    """(T,) the critic's values, before the first update."""
    returns: Tensor | None = None
    """(T,) value targets for the critic."""
    token_rewards: Tensor | None = None
    """(T,) with the KL, where it is in the reward."""
    kept: Tensor | None = None
    """(T,) bool: the tokens kept by a masking correction. The others are in no denominator."""
    taught: Tensor | None = None
    """(T, M) log-probs of M teachers that score the sampled tokens."""
    likely: Tensor | None = None
    """(T, K) the likeliest tokens of the teachers with `top_k`, concatenated."""
    likely_logp: Tensor | None = None
    """(T, K) these teachers' log-probs of them."""
    old_is_engines: bool = False
    """Whether `old` is `behaviour`, so that it does not measure the mismatch between learner and engine."""
    unmoved: bool = False
    """Whether there was no update since sampling, so that a forward pass gives the learner's log-probs at that time."""

    @property
    def lengths(self) -> list[int]:
        return [len(sample.token_ids) for sample in self.samples]

    def rows(self, first: int, last: int) -> slice:
        """The tokens of the samples `first` to `last`."""
        ends = np.cumsum(self.lengths)
        return slice(int(ends[first]) - self.lengths[first], int(ends[last]))

    def select(self, indices: Sequence[int]) -> Experience:
        """Select samples, in the given order."""
        if list(indices) == list(range(len(self.samples))):
            return self
        ends = np.cumsum(self.lengths)
        rows = torch.from_numpy(
            np.concatenate([np.arange(ends[i] - len(self.samples[i].token_ids), ends[i]) for i in indices])
        )
        chosen = {name: values[rows] for name, values in self._arrays()}
        return replace(self, samples=tuple(self.samples[i] for i in indices), **chosen)  # type: ignore[arg-type]

    def on(self, device: torch.device) -> Experience:
        """Copy the arrays to a device, asynchronously."""
        moved = {name: send(values.numpy(), device) for name, values in self._arrays()}
        return replace(self, **moved)  # type: ignore[arg-type]

    def _arrays(self) -> list[tuple[str, Tensor]]:
        return [(name, values) for name in FIELDS if (values := getattr(self, name)) is not None]


def own_tokens(samples: Sequence[Sample]) -> Tensor:
    """Return a mask (T,) of the policy's own tokens."""
    return torch.from_numpy(np.fromiter(chain.from_iterable(sample.mask for sample in samples), bool))


def flat(samples: Sequence[Sample], field: str) -> Tensor:
    return torch.from_numpy(np.fromiter(chain.from_iterable(map(attrgetter(field), samples)), np.float32))


def pairs(samples: Sequence[Sample], rewards: Tensor) -> tuple[tuple[Sample, ...], Tensor]:
    """Return the best and the worst of each group, adjacent. rewards (N,), without those of turns."""
    totals = rewards + torch.tensor([sum(sample.token_rewards or ()) for sample in samples])
    chosen = best_and_worst(totals, [sample.group for sample in samples]).nonzero().flatten().tolist()
    chosen.sort(key=lambda index: samples[index].group)
    return tuple(samples[i] for i in chosen), rewards[chosen]


def minibatches(count: int, parts: int, seed: int | str, together: int = 1) -> list[list[int]]:
    """Shuffle all samples into minibatches of equal size (the last ones may be smaller by one). Each `together`
    consecutive samples stay together."""
    units = count // together
    order = np.random.default_rng([*str(seed).encode()]).permutation(units) if parts > 1 else np.arange(units)
    within = np.arange(together)
    return [(part[:, None] * together + within).ravel().tolist() for part in np.array_split(order, min(parts, units))]
