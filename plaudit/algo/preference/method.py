"""What a method of learning from preferences is: its keys with their defaults, what it needs, and the loss of an item.

Shapes: N items, which are pairs of responses or, for a method with `pairs = False`, labelled responses.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import NamedTuple, Protocol

from plaudit.algo.lazy import Tensor


class Answers(NamedTuple):
    """Responses, one of each item. Only logp has a gradient."""

    logp: Tensor
    """(N,) of the whole response: the sum over its tokens."""
    length: Tensor
    """(N,) its tokens."""
    reference: Tensor
    """(N,) as logp, of the policy at the start. Zeros for a method without `reference`."""

    @property
    def ratio(self) -> Tensor:
        """(N,) log π / π_ref."""
        return self.logp - self.reference

    @property
    def mean(self) -> Tensor:
        """(N,) the mean log-probability of a token."""
        return self.logp / self.length


class Judged(NamedTuple):
    """What a loss is made from."""

    better: Answers
    """The chosen responses of pairs; of labelled items all responses."""
    worse: Answers | None = None
    """The rejected responses; None for labelled items."""
    desirable: Tensor | None = None
    """(N,) bool: the labels."""
    baseline: float = 0.0
    """Labelled items: how far the policy is from its reference, over the whole batch."""
    nll: Tensor | None = None
    """(N,) -log π of the chosen sequences, over the mean number of such tokens of an item of the whole batch: the mean
    over items is the mean over tokens. Given to a method that `imitates`."""


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
    loss: Callable[[Judged, Settings], Tensor]
    """(N,)"""
    reward: Callable[[Answers, Settings], Tensor]
    """(N,) the reward that the policy stands for; what orders two responses."""
    preset: Mapping[str, float | bool]
    """The method's keys and their defaults."""
    reference: bool = True
    """Whether it measures from the policy at the start."""
    pairs: bool = True
    imitates: bool = False
    """Whether the loss has an SFT term."""


def ratio_reward(answers: Answers, settings: Settings) -> Tensor:
    """β log π / π_ref (Rafailov et al. 2023, eq. 5, less what is the same for all responses to a prompt)."""
    return settings.beta * answers.ratio


def mean_reward(answers: Answers, settings: Settings) -> Tensor:
    """β times the mean log-probability of a token, of methods without a reference."""
    return settings.beta * answers.mean
