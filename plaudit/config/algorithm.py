"""What a policy is trained by: a name that stands for a published method, and every choice behind the name.

A name only fills in what the recipe leaves out, from its file in `plaudit/algo/methods`; the resolved recipe shows all
of it. Imports no torch.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping
from typing import Annotated, Any, Literal, Self

from pydantic import BeforeValidator, Field, PositiveInt, model_validator
from pydantic_core import PydanticKnownError

from plaudit.algo.methods import METHODS, estimators, losses
from plaudit.config.table import NoneByName, NonNegative, Positive, Share, Table


def _one_of(names: Callable[[], Collection[str]]) -> BeforeValidator:
    """A Literal whose values are those of the methods there are."""

    def check(value: object) -> object:
        *others, last = names()
        if value not in (*others, last):
            expected = f"{', '.join(map(repr, others))} or {last!r}"
            raise PydanticKnownError("literal_error", {"expected": expected})
        return value

    return BeforeValidator(check)


class KlTable(Table):
    """Keeping near the reference, which is the policy as it was at first."""

    coef: NonNegative = 0.0
    """0: no reference is held and none is computed."""
    where: Literal["reward", "loss", "pairs"] = "loss"
    """pairs: coef is the β of loss = "dpo", which measures its log-ratios from the reference."""
    estimator: Literal["k1", "k2", "k3"] = "k3"
    straight_through: bool = False
    """loss: the value of the estimator with the gradient of k2, the only right one on the policy's own samples."""
    importance: bool = False
    """loss: weigh it with the ratio to the policy that sampled, which makes k3 unbiased off-policy."""
    target: Positive | None = None
    """Adapt coef towards this KL per response."""
    horizon: PositiveInt = 10_000
    """Samples over which coef adapts."""

    @model_validator(mode="after")
    def _consistent(self) -> Self:
        if self.target is not None and self.coef == 0:
            raise ValueError("kl.target adapts kl.coef by factors, and coef = 0 stays 0: set coef above 0")
        if self.where != "loss" and (self.straight_through or self.importance):
            raise ValueError(
                f'straight_through and importance shape the gradient of a KL loss; kl.where = "{self.where}" has none'
            )
        return self


class ClipTable(Table):
    low: Positive = 0.2
    """The ratio is kept above 1 - low."""
    high: Positive = 0.2
    """And under 1 + high."""
    dual: Annotated[float, Field(gt=1)] | None = None
    """For negative advantages: the ratio counts at most this much."""
    value: Annotated[Positive | None, NoneByName] = 0.2
    """How far a new value may move from the old one; "none": freely."""


class AdvantageTable(Table):
    """gae            a critic's temporal differences
    return         the discounted rewards that follow, without a baseline
    group          the reward less its group's mean
    leave-one-out  the reward less the mean of the others in its group
    branch         in a tree of responses: of each part, what its branch reaches less what its siblings reach
    best-only      the size of the group for its best, 0 for the others and where all are equal
    best-worst     1 for the best of the group, -1 for the worst, 0 for the others and where all are equal
    none           nothing: the reward is measured, and what is learned is the teachers'
    """

    estimator: Annotated[str, _one_of(estimators)] = "group"
    scale: Literal["none", "group", "batch"] = "none"
    """group: divide by the standard deviation of the group's rewards, or of the batch's."""
    whiten: bool = False
    """To mean 0 and standard deviation 1 over all tokens of the batch."""

    @model_validator(mode="after")
    def _consistent(self) -> Self:
        if self.scale != "none" and self.estimator not in ("group", "branch"):
            raise ValueError(f'scale = "{self.scale}" is for estimator = "group" or "branch", not "{self.estimator}"')
        return self


class CorrectionTable(Table):
    """What is done where the engine that sampled and the learner disagree on a log-prob, or the sample is stale."""

    mode: Literal["none", "truncate", "mask"] = "none"
    level: Literal["token", "sequence", "geometric"] = "token"
    cap: Positive = 2.0
    """truncate: weights are at most this. mask: what is above counts nothing."""
    floor: NonNegative = 0.0
    """mask: what is below counts nothing."""

    @model_validator(mode="after")
    def _consistent(self) -> Self:
        if self.floor >= self.cap:
            raise ValueError(f"floor ({self.floor}) must be under cap ({self.cap})")
        for name in ("level", "cap", "floor"):
            # Not whether it was given: a resolved recipe gives them all.
            if self.mode == "none" and (value := getattr(self, name)) != CorrectionTable.model_fields[name].default:
                raise ValueError(
                    f'{name} = {value!r} does nothing with mode = "none": set mode to "truncate" or "mask"'
                )
        return self


class OverlongTable(Table):
    """DAPO's soft punishment of responses that come near the length limit."""

    buffer: PositiveInt
    """Tokens before the limit in which the punishment grows from 0 to factor."""
    factor: Positive = 1.0


class ShapingTable(Table):
    """What is done to a reward before it becomes an advantage, in this order."""

    normalise: bool = False
    """By the running mean and standard deviation of all rewards so far."""
    clip: tuple[float, float] | None = None
    length_penalty: NonNegative = 0.0
    """Taken off per token of the response."""
    overlong: OverlongTable | None = None

    @model_validator(mode="after")
    def _range(self) -> Self:
        if self.clip is not None and self.clip[0] >= self.clip[1]:
            raise ValueError(f"clip = [{self.clip[0]}, {self.clip[1]}] must be [lowest, highest]")
        return self


class DynamicTable(Table):
    """Sample further prompts until a step has its number of groups whose rewards differ."""

    rounds: PositiveInt = 8
    """Give up, and train on what there is, after this many draws of prompts_per_step."""


class TeacherTable(Table):
    """A model that rates what the policy has written, for on-policy distillation."""

    path: str | None = None
    """A model directory, read in this process with the policy's dtype and device."""
    url: str | None = None
    """A server of its log-probs in place of that: `plaudit serve`, or SGLang."""
    model: str | None = None
    """url: the name of the model there; without it the first causal LM."""
    key_env: str | None = None
    """url: the environment variable that holds the server's key."""
    patience: Positive = 600.0
    """url: seconds to wait for an answer, or for a server that is away, before the run ends."""
    weight: Positive = 1.0
    """Of the KL to this teacher; the reward's advantage has weight 1."""
    top_k: Annotated[int, Field(ge=0)] = 0
    """0: the KL is estimated by the sampled token. Above: it is computed over so many tokens, the teacher's likeliest,
    and all others taken as one."""

    @model_validator(mode="after")
    def _one_home(self) -> Self:
        if (self.path is None) == (self.url is None):
            raise ValueError("a teacher has one home: give path, a model directory, or url, a server of log-probs")
        if self.url is None:
            for name in ("model", "key_env"):
                if (value := getattr(self, name)) is not None:
                    raise ValueError(f"{name} = {value!r} is for a teacher behind url: leave it out, or give url")
        elif self.top_k:
            raise ValueError(
                f"top_k = {self.top_k} needs the teacher's likeliest tokens, and {self.url} gives the log-prob of the "
                "sampled one: leave top_k out, or give path"
            )
        return self


class RlAlgorithm(Table):
    name: str
    loss: Annotated[str, _one_of(losses)] = "clip"
    """clip: PPO's. plain: the policy gradient. gspo: clipped by the sequence's ratio. cispo: a clipped weight.
    dpo: that of the best response to a prompt over the worst."""
    aggregate: Literal["token", "sequence", "constant"] = "token"
    """Mean over all tokens; over each response's tokens, then responses; or a sum over `constant` per response."""
    constant: Positive | None = None
    """aggregate = "constant": what a response's sum is divided by. Default: sampling.max_tokens."""
    advantage: AdvantageTable = AdvantageTable()
    gamma: Share = 1.0
    lam: Share = 0.95
    bootstrap: bool = False
    """gae: the critic's value after the cut in place of the reward of a response that was cut off, for rewards that say
    nothing of what was cut. Rewards of single turns still count. Needs gamma below 1."""
    mask_truncated: bool = False
    """Leave responses that were cut off out of the loss."""
    clip: ClipTable = ClipTable()
    kl: KlTable = KlTable()
    entropy: NonNegative = 0.0
    """Weight of the entropy bonus."""
    shaping: ShapingTable = ShapingTable()
    correction: CorrectionTable = CorrectionTable()
    dynamic: Annotated[DynamicTable | None, NoneByName] = None
    """"none": off, also under a name that turns it on."""
    old_logprobs: Literal["learner", "engine"] = "learner"
    """Whose log-probs the ratio starts from."""
    teachers: Mapping[str, TeacherTable] = {}
    """Models that the policy is drawn towards, by a name of your choice: docs/distillation.md."""

    @model_validator(mode="before")
    @classmethod
    def _fill_in(cls, table: Any) -> Any:
        if not isinstance(table, Mapping) or table.get("name") not in METHODS:
            return table
        return over(METHODS[table["name"]].settings(), table)

    @model_validator(mode="after")
    def _named(self) -> Self:
        if self.name not in METHODS:
            raise ValueError(f"name = {self.name!r} is no algorithm; there are {', '.join(METHODS)}")
        return self

    @model_validator(mode="after")
    def _learns(self) -> Self:
        if self.advantage.estimator == "none" and not self.teachers:
            raise ValueError(
                'advantage.estimator = "none" learns from teachers alone, and there are none: give one, such as '
                '[algorithm.teachers.NAME] with path = "runs/sums-grpo/final"'
            )
        return self

    @model_validator(mode="after")
    def _compares(self) -> Self:
        """What a loss of pairs needs, and what it has no place for."""
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
                    f'{key} acts on single responses or tokens, and loss = "{self.loss}" on pairs: leave it out'
                )
        return self

    @model_validator(mode="after")
    def _settles(self) -> Self:
        """A critic that learns from its own value behind n tokens has the target r + gamma^n V."""
        if self.bootstrap and self.gamma == 1:
            raise ValueError(
                "bootstrap = true with gamma = 1: where every response is cut, the critic's target r + V is met by no "
                "V, and values grow without bound. Leave bootstrap out, or set gamma below 1, such as 0.99"
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
        """Whether the best response to a prompt and the worst are learned from, and no others."""
        return losses()[self.loss].pairs

    def by_token(self) -> list[float]:
        """The weights of the teachers that rate the sampled token."""
        return [teacher.weight for teacher in self.teachers.values() if not teacher.top_k]

    def by_top_k(self) -> list[tuple[int, float]]:
        """Of the others, how many tokens each rates, and its weight."""
        return [(teacher.top_k, teacher.weight) for teacher in self.teachers.values() if teacher.top_k]

    @property
    def needs_critic(self) -> bool:
        return estimators()[self.advantage.estimator].critic


def over(base: Mapping[str, Any], above: Mapping[str, Any]) -> dict[str, Any]:
    """`above` laid over `base`, table by table."""
    merged = dict(base)
    for key, value in above.items():
        below = merged.get(key)
        merged[key] = over(below, value) if isinstance(below, Mapping) and isinstance(value, Mapping) else value
    return merged
