"""The interface of a preference method: its settings with defaults, its requirements, and the loss per item.

Shapes: N items, which are pairs of responses or, for a method with `pairs = False`, labelled responses.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import NamedTuple, Protocol

from plaudit.algo.lazy import Tensor


class Responses(NamedTuple):
    """Log-probs of one response per item. Only logp has a gradient."""

    logp: Tensor
    """(N,) of the whole response: the sum over its tokens."""
    length: Tensor
    """(N,) number of tokens."""
    reference: Tensor
    """(N,) as logp, under the initial policy. Zeros for a method without `reference`."""

    @property
    def ratio(self) -> Tensor:
        """(N,) log π / π_ref."""
        return self.logp - self.reference

    @property
    def mean(self) -> Tensor:
        """(N,) the mean log-probability of a token."""
        return self.logp / self.length


class PreferenceBatch(NamedTuple):
    """Input of a preference loss."""

    better: Responses
    """The chosen responses of pairs; of labelled items all responses."""
    worse: Responses | None = None
    """The rejected responses; None for labelled items."""
    desirable: Tensor | None = None
    """(N,) bool: the labels."""
    baseline: float = 0.0
    """Labelled items: estimate of the KL to the reference, over the whole batch."""
    nll: Tensor | None = None
    """(N,) -log π of the chosen sequences, over the mean number of such tokens of an item of the whole batch: the mean
    over items is the mean over tokens. Set if the method has an SFT term."""


class Settings(Protocol):
    """A recipe's [algorithm]. A method reads the keys of its preset and no others."""

    @property
    def beta(self) -> float: ...
    @property
    def gamma(self) -> float | None: ...
    @property
    def desirable(self) -> float | None: ...
    @property
    def undesirable(self) -> float | None: ...


@dataclass(frozen=True)
class PreferenceMethod:
    loss: Callable[[PreferenceBatch, Settings], Tensor]
    """(N,)"""
    reward: Callable[[Responses, Settings], Tensor]
    """(N,) the implicit reward of the policy, which ranks responses."""
    preset: Mapping[str, float | bool]
    """The method's keys and their defaults."""
    reference: bool = True
    """Whether it uses log-probs of the initial policy as reference."""
    pairs: bool = True
    has_sft_term: bool = False
    """Whether the loss has an SFT term."""


def ratio_reward(responses: Responses, settings: Settings) -> Tensor:
    """β log π / π_ref (Rafailov et al. 2023, eq. 5, without the term that is the same for all responses to a
    prompt)."""
    return settings.beta * responses.ratio


def mean_reward(responses: Responses, settings: Settings) -> Tensor:
    """β times the mean log-probability per token, for methods without a reference."""
    return settings.beta * responses.mean
