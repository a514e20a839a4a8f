"""RL algorithms: the name of a published method, and each of its settings.

A name only provides defaults for what the recipe omits, from its file in `plaudit/algo/methods`; the resolved recipe
shows all of them. Imports no torch.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping
from typing import Annotated, Any, Literal, Self

from pydantic import BeforeValidator, Field, PositiveInt, model_validator
from pydantic_core import PydanticKnownError

from plaudit.algo.methods import METHODS, estimators, losses
from plaudit.config.table import NoneByName, NonNegative, Positive, Share, Table


def _one_of(names: Callable[[], Collection[str]]) -> BeforeValidator:
    """Validate like a Literal whose values are the registered names."""

    def check(value: object) -> object:
        *others, last = names()
        if value not in (*others, last):
            expected = f"{', '.join(map(repr, others))} or {last!r}"
            raise PydanticKnownError("literal_error", {"expected": expected})
        return value

    return BeforeValidator(check)


class KlTable(Table):
    """KL penalty towards the reference, the initial policy."""

    coef: NonNegative = 0.0
    """0: no reference is loaded or computed."""
    where: Literal["reward", "loss", "pairs"] = "loss"
    """Add the KL to the reward or the loss. pairs: coef is the β of loss = "dpo", whose log-ratios are relative to the
    reference."""
    estimator: Literal["k1", "k2", "k3"] = "k3"
    straight_through: bool = False
    """loss: the estimator's value with k2's gradient, the only unbiased one for on-policy samples."""
    importance: bool = False
    """loss: weight it by the ratio to the sampling policy, which makes k3 unbiased off-policy."""
    target: Positive | None = None
    """Adapt coef towards this KL per response."""
    horizon: PositiveInt = 10_000
    """Samples over which coef adapts."""

    @model_validator(mode="after")
    def _consistent(self) -> Self:
        if self.target is not None and self.coef == 0:
            raise ValueError("kl.target multiplies kl.coef by factors, and coef = 0 stays 0: set coef above 0")
        if self.where != "loss" and (self.straight_through or self.importance):
            raise ValueError(
                f'straight_through and importance need a KL loss, and kl.where = "{self.where}" has none: set where = '
                '"loss"'
            )
        return self


class ClipTable(Table):
    low: Positive = 0.2
    """Lower clip bound of the ratio: 1 - low."""
    high: Positive = 0.2
    """Upper clip bound of the ratio: 1 + high."""
    dual: Annotated[float, Field(gt=1)] | None = None
    """Dual clip: maximum ratio for negative advantages."""
    value: Annotated[Positive | None, NoneByName] = 0.2
    """Value clipping: how far a new value may differ from the old one; "none": no clipping."""


class AdvantageTable(Table):
    """gae            a critic's temporal differences
    return         the discounted return, without a baseline
    group          the reward minus its group's mean
    leave-one-out  the reward minus the mean of the others in its group
    branch         in a tree of responses: for each segment, its branch's mean reward minus that of its siblings
    best-only      the group size for the best of a group, 0 for the others and if all are equal
    best-worst     1 for the best of a group, -1 for the worst, 0 for the others and if all are equal
    none           no advantage: the reward is only logged, and the policy learns from teachers
    """

    estimator: Annotated[str, _one_of(estimators)] = "group"
    scale: Literal["none", "group", "batch"] = "none"
    """group: divide by the standard deviation of the group's rewards, or of the batch's."""
    whiten: bool = False
    """Normalise to mean 0 and standard deviation 1 over all tokens of the batch."""

    @model_validator(mode="after")
    def _consistent(self) -> Self:
        if self.scale != "none" and self.estimator not in ("group", "branch"):
            raise ValueError(f'scale = "{self.scale}" is for estimator = "group" or "branch", not "{self.estimator}"')
        return self


class CorrectionTable(Table):
    """Importance correction for the mismatch between the engine's and the learner's log-probs, or for stale samples."""

    mode: Literal["none", "truncate", "mask"] = "none"
    level: Literal["token", "sequence", "geometric"] = "token"
    cap: Positive = 2.0
    """truncate: upper bound of weights. mask: weights above are set to 0."""
    floor: NonNegative = 0.0
    """mask: weights below are set to 0."""

    @model_validator(mode="after")
    def _consistent(self) -> Self:
        if self.floor >= self.cap:
            raise ValueError(f"floor = {self.floor} must be below cap = {self.cap}")
        for name in ("level", "cap", "floor"):
            # Compare values, not whether keys are set: a resolved recipe sets all of them.
            if self.mode == "none" and (value := getattr(self, name)) != CorrectionTable.model_fields[name].default:
                raise ValueError(
                    f'{name} = {value!r} has no effect with mode = "none": set mode to "truncate" or "mask"'
                )
        return self


class OverlongTable(Table):
    """DAPO's soft overlong penalty for responses close to the length limit."""

    buffer: PositiveInt
    """Tokens before the limit over which the penalty grows from 0 to factor."""
    factor: Positive = 1.0


class ShapingTable(Table):
    """Reward shaping before advantages are computed, in this order."""

    normalise: bool = False
    """Normalise by the running mean and standard deviation of all rewards so far."""
    clip: tuple[float, float] | None = None
    length_penalty: NonNegative = 0.0
    """Subtracted per token of the response."""
    overlong: OverlongTable | None = None

    @model_validator(mode="after")
    def _range(self) -> Self:
        if self.clip is not None and self.clip[0] >= self.clip[1]:
            raise ValueError(f"clip = [{self.clip[0]}, {self.clip[1]}] must be [lowest, highest]")
        return self


class DynamicTable(Table):
    """Dynamic sampling: sample more prompts until a step has enough groups whose rewards differ."""

    rounds: PositiveInt = 8
    """Maximum rounds of prompts_per_step prompts; afterwards train on the groups collected."""


class TeacherTable(Table):
    """A teacher that scores the policy's samples, for on-policy distillation."""

    path: str | None = None
    """A model directory, loaded in this process with the policy's dtype and device."""
    url: str | None = None
    """Instead: a server of its log-probs, `plaudit serve` or SGLang."""
    model: str | None = None
    """url: the model's name on the server. Default: the first causal LM."""
    key_env: str | None = None
    """url: the environment variable that holds the server's key."""
    patience: Positive = 600.0
    """url: seconds to wait for a response, or for an unreachable server, before the run ends."""
    weight: Positive = 1.0
    """Weight of the KL to this teacher; the reward's advantage has weight 1."""
    top_k: Annotated[int, Field(ge=0)] = 0
    """0: estimate the KL from the sampled token. Above 0: compute it over this many of the teacher's likeliest tokens,
    with all others merged into one."""

    @model_validator(mode="after")
    def _one_source(self) -> Self:
        if (self.path is None) == (self.url is None):
            raise ValueError("give a teacher either path, a model directory, or url, a server of log-probs")
        if self.url is None:
            for name in ("model", "key_env"):
                if (value := getattr(self, name)) is not None:
                    raise ValueError(f"{name} = {value!r} is for a teacher with url: remove it, or set url")
        elif self.top_k:
            raise ValueError(
                f"top_k = {self.top_k} needs the teacher's likeliest tokens, and {self.url} returns only the sampled "
                "token's log-prob: remove top_k, or set path"
            )
        return self


class RlAlgorithm(Table):
    name: str
    loss: Annotated[str, _one_of(losses)] = "clip"
    """clip: PPO's. plain: the policy gradient. gspo: clipped by the sequence ratio. cispo: a clipped weight. dpo: the
    best response to a prompt against the worst."""
    aggregate: Literal["token", "sequence", "constant"] = "token"
    """Mean over all tokens; over each response's tokens, then responses; or a sum over `constant` per response."""
    constant: Positive | None = None
    """aggregate = "constant": divisor of a response's sum. Default: sampling.max_tokens."""
    advantage: AdvantageTable = AdvantageTable()
    gamma: Share = 1.0
    lam: Share = 0.95
    bootstrap: bool = False
    """gae: use the critic's value at the truncation point instead of the reward of a truncated response, for rewards
    that are not meaningful for truncated responses. Rewards of single turns still count. Needs gamma below 1."""
    mask_truncated: bool = False
    """Exclude truncated responses from the loss."""
    clip: ClipTable = ClipTable()
    kl: KlTable = KlTable()
    entropy: NonNegative = 0.0
    """Coefficient of the entropy bonus."""
    shaping: ShapingTable = ShapingTable()
    correction: CorrectionTable = CorrectionTable()
    dynamic: Annotated[DynamicTable | None, NoneByName] = None
    """"none": off, even if the named method turns it on."""
    old_logprobs: Literal["learner", "engine"] = "learner"
    """Source of the old log-probs in the ratio."""
    teachers: Mapping[str, TeacherTable] = {}
    """Teachers to distil from, under names of your choice: docs/distillation.md."""

    @model_validator(mode="before")
    @classmethod
    def _fill_in(cls, table: Any) -> Any:
        if not isinstance(table, Mapping) or table.get("name") not in METHODS:
            return table
        return over(METHODS[table["name"]].settings(), table)

    @model_validator(mode="after")
    def _named(self) -> Self:
        if self.name not in METHODS:
            raise ValueError(f"name = {self.name!r}: unknown algorithm; expected one of {', '.join(METHODS)}")
        return self

    @model_validator(mode="after")
    def _learns(self) -> Self:
        if self.advantage.estimator == "none" and not self.teachers:
            raise ValueError(
                'advantage.estimator = "none" learns from teachers only, and there are none: add one, such as '
                '[algorithm.teachers.NAME] with path = "runs/sums-grpo/final"'
            )
        return self

    @model_validator(mode="after")
    def _compares(self) -> Self:
        """Check the settings that a pairwise loss requires and those it cannot use."""
        if not self.paired:
            if self.kl.where == "pairs":
                raise ValueError(f'kl.where = "pairs" is for loss = "dpo", and loss = "{self.loss}": set it to "loss"')
            return self
        if self.advantage.estimator != "best-worst" or self.advantage.whiten:
            raise ValueError(
                f'loss = "{self.loss}" compares the best response with the worst: set advantage.estimator = '
                '"best-worst" and advantage.whiten = false'
            )
        if self.kl.where != "pairs" or self.kl.coef == 0:
            raise ValueError(
                f'kl.where = "{self.kl.where}", kl.coef = {self.kl.coef:g}: loss = "{self.loss}" needs its β, set '
                'kl.where = "pairs" and kl.coef above 0'
            )
        if self.aggregate != "sequence":
            raise ValueError(f'aggregate = "{self.aggregate}": a pair is one item, set "sequence"')
        for key, given in (
            ("mask_truncated", self.mask_truncated), ("teachers", bool(self.teachers)),
            ("correction.mode", self.correction.mode != "none"),
        ):  # fmt: skip
            if given:
                raise ValueError(
                    f'{key} applies to single responses or tokens, and loss = "{self.loss}" to pairs: remove it'
                )
        return self

    @model_validator(mode="after")
    def _settles(self) -> Self:
        """A bootstrapped critic has the target r + gamma^n V, which has a fixed point only if gamma < 1."""
        if self.bootstrap and self.gamma == 1:
            raise ValueError(
                "bootstrap = true with gamma = 1: if every response is truncated, the critic's target r + V has no "
                "fixed point, and values grow without bound. Remove bootstrap, or set gamma below 1, such as 0.99"
            )
        return self

    def filled_in(self) -> set[str]:
        return super().filled_in() | METHODS[self.name].settings().keys()

    @property
    def grouped(self) -> bool:
        """Whether a response is compared with the others to its prompt."""
        return estimators()[self.advantage.estimator].grouped

    @property
    def paired(self) -> bool:
        """Whether the loss uses only the best and the worst response to a prompt."""
        return losses()[self.loss].pairs

    def by_token(self) -> list[float]:
        """Return the weights of the teachers that score the sampled token."""
        return [teacher.weight for teacher in self.teachers.values() if not teacher.top_k]

    def by_top_k(self) -> list[tuple[int, float]]:
        """Return (top_k, weight) of the teachers that score their top_k tokens."""
        return [(teacher.top_k, teacher.weight) for teacher in self.teachers.values() if teacher.top_k]

    @property
    def needs_critic(self) -> bool:
        return estimators()[self.advantage.estimator].critic


def over(base: Mapping[str, Any], above: Mapping[str, Any]) -> dict[str, Any]:
    """Merge `above` into `base`, table by table; `above` takes precedence."""
    merged = dict(base)
    for key, value in above.items():
        below = merged.get(key)
        merged[key] = over(below, value) if isinstance(below, Mapping) and isinstance(value, Mapping) else value
    return merged
