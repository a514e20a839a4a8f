"""What a method of RL is: what its name fills in, how rewards become advantages, and the loss of a token.

Shapes: T tokens of N samples, end to end, nothing padded; sample i is the next lengths[i] tokens.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal, NamedTuple, Protocol

from plaudit.algo.lazy import Tensor

Scale = Literal["group", "batch", "none"]


class Rewarded(NamedTuple):
    """What advantages are made from."""

    rewards: Tensor
    """(T,), the KL taken off where it is in the reward."""
    mask: Tensor
    """(T,) bool: the policy's own tokens."""
    lengths: Sequence[int]
    groups: Sequence[int]
    """(N,): samples of one prompt have one number."""
    gamma: float
    lam: float
    scale: Scale
    values: Tensor | None = None
    """(T,) the critic's, before each token."""
    bootstrap: Tensor | None = None
    """(N,) the value after the last token."""
    branches: Sequence[Sequence[Sequence[int]]] = ()
    """(N,) of samples that are a tree: [node, end] of each part, where nodes are numbered in their group, and samples
    that share a part have its number."""


class Advantages(NamedTuple):
    advantages: Tensor
    """(T,), 0 at masked tokens."""
    returns: Tensor | None = None
    """(T,) what a critic should have said."""


class Drawn(NamedTuple):
    """What a policy loss is made from; only logp has a gradient. All finite, at masked tokens too: 0 · NaN is NaN."""

    logp: Tensor
    """(T,) of the policy as it is now."""
    old: Tensor
    """(T,) of the policy before the first update."""
    advantages: Tensor
    mask: Tensor
    lengths: Sequence[int]
    reference: Tensor | None = None
    """(T,) of the policy as it was at first, where `kl.coef` is not 0."""
    kl_coef: float = 0.0


class Clip(Protocol):
    """How far the ratio may be from 1."""

    @property
    def low(self) -> float: ...
    @property
    def high(self) -> float: ...
    @property
    def dual(self) -> float | None: ...


class PolicyTerms(NamedTuple):
    """What a policy loss gives, per token (T,). The flags say where the bound is in force."""

    loss: Tensor
    """To be summed with the weights of `aggregate.token_weights`; masked tokens have weight 0 there."""
    ratio: Tensor
    """π / π_old, detached."""
    clipped_low: Tensor
    clipped_high: Tensor
    clipped_dual: Tensor


@dataclass(frozen=True)
class Estimator:
    name: str
    """`advantage.estimator` in a recipe."""
    compute: Callable[[Rewarded], Advantages]
    grouped: bool = False
    """A response is compared with the others to its prompt."""
    critic: bool = False
    """It reads `values` and `bootstrap`."""


@dataclass(frozen=True)
class Loss:
    name: str
    """`loss` in a recipe."""
    compute: Callable[[Drawn, Clip], PolicyTerms]
    pairs: bool = False
    """It is given samples two by two, the best and the worst of a group, and no others."""


@dataclass(frozen=True)
class Method:
    advantage: Estimator
    loss: Loss
    preset: Mapping[str, Any] = field(default_factory=dict)
    """Keys of a recipe's [algorithm] that differ from their defaults."""
    more_losses: tuple[Loss, ...] = ()
    """Variants that no name stands for; a recipe may ask for them."""

    def settings(self) -> dict[str, Any]:
        """All that the name stands for, as a recipe would say it."""
        advantage = {"estimator": self.advantage.name, **self.preset.get("advantage", {})}
        return {"loss": self.loss.name, **self.preset, "advantage": advantage}
