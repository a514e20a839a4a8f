"""The interface of an RL method: its default settings, its advantage estimator and its per-token loss.

Shapes: T tokens of N samples, concatenated without padding; sample i is the next lengths[i] tokens.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal, NamedTuple, Protocol

from plaudit.algo.lazy import Tensor

Scale = Literal["group", "batch", "none"]


class RewardBatch(NamedTuple):
    """Input of an advantage estimator."""

    rewards: Tensor
    """(T,), minus the KL if it is in the reward."""
    mask: Tensor
    """(T,) bool: the policy's own tokens."""
    lengths: Sequence[int]
    groups: Sequence[int]
    """(N,): samples of the same prompt have the same number."""
    gamma: float
    lam: float
    scale: Scale
    values: Tensor | None = None
    """(T,) the critic's values before each token."""
    bootstrap: Tensor | None = None
    """(N,) the value after the last token."""
    branches: Sequence[Sequence[Sequence[int]]] = ()
    """(N,) for samples that form a tree: [node, end] of each segment; nodes are numbered within their group, and
    samples that share a segment have the same node."""


class Advantages(NamedTuple):
    advantages: Tensor
    """(T,), 0 at masked tokens."""
    returns: Tensor | None = None
    """(T,) value targets for the critic."""


class LossBatch(NamedTuple):
    """Input of a policy loss; only logp has a gradient. All finite, at masked tokens too, because 0 · NaN is NaN."""

    logp: Tensor
    """(T,) of the current policy."""
    old: Tensor
    """(T,) of the policy before the first update."""
    advantages: Tensor
    mask: Tensor
    lengths: Sequence[int]
    reference: Tensor | None = None
    """(T,) of the reference policy, if `kl.coef` is not 0."""
    kl_coef: float = 0.0


class Clip(Protocol):
    """Clip bounds of the ratio."""

    @property
    def low(self) -> float: ...
    @property
    def high(self) -> float: ...
    @property
    def dual(self) -> float | None: ...


class PolicyTerms(NamedTuple):
    """Output of a policy loss, per token (T,). The flags mark tokens at which the bound is active."""

    loss: Tensor
    """Summed with the weights of `aggregate.token_weights`, which are 0 at masked tokens."""
    ratio: Tensor
    """π / π_old, detached."""
    clipped_low: Tensor
    clipped_high: Tensor
    clipped_dual: Tensor


@dataclass(frozen=True)
class Estimator:
    name: str
    """`advantage.estimator` in a recipe."""
    compute: Callable[[RewardBatch], Advantages]
    grouped: bool = False
    """Whether a response is compared with the others to its prompt."""
    critic: bool = False
    """Whether it uses `values` and `bootstrap`."""


@dataclass(frozen=True)
class Loss:
    name: str
    """`loss` in a recipe."""
    compute: Callable[[LossBatch, Clip], PolicyTerms]
    pairs: bool = False
    """Whether it takes samples in pairs, the best and the worst of a group, and no others."""


@dataclass(frozen=True)
class Method:
    advantage: Estimator
    loss: Loss
    preset: Mapping[str, Any] = field(default_factory=dict)
    """Keys of a recipe's [algorithm] that differ from their defaults."""
    more_losses: tuple[Loss, ...] = ()
    """Additional variants, which a recipe may select by name."""

    def settings(self) -> dict[str, Any]:
        """Return all settings of the method, as in a recipe."""
        advantage = {"estimator": self.advantage.name, **self.preset.get("advantage", {})}
        return {"loss": self.loss.name, **self.preset, "advantage": advantage}
