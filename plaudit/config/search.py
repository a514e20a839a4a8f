"""The recipe of `plaudit search`, and the [search] table of a serve.toml. Imports no torch."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Annotated, Any, Literal, Self

from pydantic import Field, PositiveInt, TypeAdapter, field_validator, model_validator

from plaudit.config.prompting import AskingTable
from plaudit.config.shipped.catalog import find_recipe
from plaudit.config.table import NonNegative, Positive, Table, apply, check, read_toml
from plaudit.config.world import World
from plaudit.errors import ConfigError

Method = Literal["best-of-n", "beam", "dvts", "rebase", "ets", "best-first", "mcts", "particles"]


class PolicyTable(Table):
    path: str
    """A model or run directory, or an embedded model. With a server: a directory with its tokenizer."""
    dtype: Literal["float32", "bfloat16", "float16"] = "float32"
    device: str = "auto"


class QuestionsTable(AskingTable):
    """Questions of a built-in world or a gym, with right answers, or of a .jsonl or .parquet file of {"prompt"} or
    {"messages"}. A world's questions are disjoint from those that RL with the same seed trains on; a gym generates them
    from a different seed."""

    world: World | None = None
    path: str | None = None
    truth: str = "answer"
    """path: the key of the right answer; it is optional."""
    limit: PositiveInt | None = None

    @model_validator(mode="after")
    def _one_source(self) -> Self:
        sources = [name for name in ("world", "gym", "path") if getattr(self, name) is not None]
        if len(sources) != 1:
            raise ValueError(f'give one of data.world (such as "sums-hard"), data.gym and data.path; got {sources}')
        if self.path is None and self.limit is None:
            raise ValueError(f"a {sources[0]} is unlimited: set the number of questions with data.limit or --questions")
        return self


class PrmTable(Table):
    """The process reward model (PRM): a model of this process, or on a server."""

    path: str | None = None
    """Model directory. With a protocol other than plaudit's: the directory with its configuration and tokenizer, which
    build the input; weights are not needed."""
    url: str | tuple[str, ...] | None = None
    protocol: Literal["plaudit", "vllm", "sglang", "openai"] = "plaudit"
    """url: the server's protocol. plaudit: `plaudit serve`. vllm: /pooling, or /classify for an outcome model. sglang:
    /v1/score with the format's tokens, or /classify. openai: log-probs of /v1/completions."""
    model: str | None = None
    """url: the model's name on the server. Default: the first one."""
    key_env: str | None = None
    """url: the environment variable that holds the API key."""
    timeout: Positive = 120.0
    """url: timeout in seconds for the scores of a level, or with another protocol for one request, retries included."""
    concurrency: PositiveInt = 64
    """Requests in flight, with a protocol other than plaudit's."""
    format: str | Mapping[str, Any] | None = None
    """path: the process model format, if the model's directory does not set it."""
    dtype: Literal["float32", "bfloat16", "float16"] = "float32"
    device: str = "auto"
    kv_bytes: PositiveInt | Annotated[float, Field(gt=0, lt=1)] | None = None

    @model_validator(mode="after")
    def _one_source(self) -> Self:
        if self.protocol == "plaudit" and (self.path is None) == (self.url is None):
            raise ValueError("give either path or url, and not both")
        if self.protocol != "plaudit" and not isinstance(self.url, str):
            raise ValueError(f'protocol = "{self.protocol}" needs the url of one server')
        if self.protocol != "plaudit" and self.path is None and self.reads_tokens:
            raise ValueError(f'protocol = "{self.protocol}" needs path, a directory with the model\'s tokenizer')
        return self

    @property
    def reads_tokens(self) -> bool:
        return True


class OrmTable(PrmTable):
    """The outcome reward model (ORM), which scores finished responses."""

    pairs: bool = False
    """vllm: send question and response as two texts to /score, as for a reranker; needs no path."""

    @model_validator(mode="after")
    def _protocol_fits(self) -> Self:
        if self.protocol == "openai":
            raise ValueError(
                'protocol = "openai" returns log-probs, and an outcome model has a score head: set "vllm" or "sglang"'
            )
        if self.pairs and self.protocol != "vllm":
            raise ValueError(f'pairs needs protocol = "vllm", and protocol = "{self.protocol}": remove pairs')
        return self

    @property
    def reads_tokens(self) -> bool:
        return not self.pairs


class GenerationTable(Table):
    """core: the policy runs in this process. openai: any server with /v1/completions, such as vLLM. sglang: SGLang's
    native /generate."""

    name: Literal["core", "openai", "sglang"] = "core"
    url: str | None = None
    model: str | None = None
    """openai: the model's name on the server."""
    key_env: str | None = None
    timeout: Positive = 120.0
    """Timeout in seconds for one request, retries included."""
    concurrency: PositiveInt = 64
    """Requests in flight."""
    kv_bytes: PositiveInt | Annotated[float, Field(gt=0, lt=1)] | None = None
    state_every: PositiveInt = 256
    """core, models with recurrent layers: tokens between two cached states (docs/core.md)."""

    @model_validator(mode="after")
    def _url_fits(self) -> Self:
        if (self.name == "core") != (self.url is None):
            raise ValueError(f'engine.name = "{self.name}" {"does not take" if self.url else "needs"} engine.url')
        return self


class StepsTable(Table):
    """Definition of a step, and how steps are sampled."""

    stop: str = "\n\n"
    """The text that ends a step; it stays part of the step."""
    answer: str = r"\\boxed\{((?:[^{}]|\{(?:[^{}]|\{[^{}]*\})*\})*)\}"
    """A regex; the first group of its last match is the answer. The default handles braces nested two deep."""
    equivalence: Literal["number", "math"] = "number"
    """When answers count as equal: number: by value as written (1/2 is 0.5, {1, 2} is {2, 1}); math: also
    mathematically, by math-verify (extra `verify`)."""
    final: str | None = None
    """A regex: a response that it matches is finished, as one that ends with the EOS token."""
    temperature: NonNegative = 1.0
    top_p: Annotated[float, Field(gt=0, le=1)] = 1.0
    max_step_tokens: PositiveInt = 256
    max_tokens: PositiveInt = 1024
    """Limit for all steps of a path."""

    @field_validator("answer", "final")
    @classmethod
    def _regex(cls, pattern: str | None) -> str | None:
        try:
            re.compile(pattern or "")
        except re.error as error:
            raise ValueError(f"{pattern!r} is not a valid regex: {error}") from None
        return pattern

    @field_validator("answer")
    @classmethod
    def _group(cls, pattern: str) -> str:
        if re.compile(pattern).groups < 1:
            raise ValueError(f"{pattern!r} has no group: put the answer in parentheses")
        return pattern

    @field_validator("stop")
    @classmethod
    def _not_empty(cls, stop: str) -> str:
        if not stop:
            raise ValueError('stop is empty; set it to the text that ends a step, such as "\\n\\n"')
        return stop


class GroundTable(Table):
    """The measurements that decide whether tree search pays off, as a pilot makes them."""

    steps: Positive
    """Average steps of a response."""
    accuracy: Annotated[float, Field(ge=0, le=1)]
    """Fraction of single responses that are correct."""
    auc: Annotated[float, Field(ge=0, le=1)]
    """Probability that the PRM's last score is higher for a correct response than for a wrong one to the same
    question."""


class SearchRuleTable(Table):
    method: Literal[Method, "auto"] = "ets"
    """auto: chosen by the table of docs/search-when.md, from `ground` or a pilot's measurements."""
    ground: GroundTable | None = None
    """auto: measurements to use instead of a pilot, for questions without right answers."""
    pilot: PositiveInt = 32
    """auto: number of questions with a right answer that are searched by best-of-n first, then by the chosen method."""
    width: PositiveInt = 16
    """Parallel paths."""
    keep: PositiveInt | None = None
    """beam: leaves kept; dvts: subtrees. Default: the square root of width."""
    distinct: bool = False
    """beam: identical leaves count as one of those kept."""
    lookahead: Annotated[int, Field(ge=0)] = 0
    """dvts: greedy steps that are generated, scored and discarded to evaluate a leaf."""
    branch: PositiveInt = 4
    """mcts: children of a node. It follows width / branch paths, so that it generates about as much as the others."""
    temperature: Positive = 0.2
    """rebase, ets, best-first: of the softmax over scores."""
    return_cost: NonNegative = 0.2
    """best-first: penalty on a node's score for every level that it is behind the deepest node, and for every time it
    was expanded. Above 1 the search never backtracks."""
    branch_weight: NonNegative = 1.0
    """ets: weight of the KV cost (the paper's lambda_b)."""
    cluster_weight: NonNegative = 1.5
    """ets: weight of semantic coverage, the number of clusters kept (lambda_d)."""
    cost: Literal["nodes", "tokens"] = "nodes"
    """ets: cost of a branch: 1, or its tokens."""
    kv_budget: PositiveInt | None = None
    """ets: maximum KV tokens kept at a level, instead of a KV cost."""
    solver_seconds: Positive = 5.0
    solver_gap: NonNegative = 0.0
    clusters: Literal["hidden", "text", "encoder", "served"] = "hidden"
    """ets: how steps are clustered: by the PRM's hidden state at their end, by identical text, by a sentence encoder
    (extra `search`), or by the embeddings of the server at `encoder`."""
    cluster_distance: Positive = 0.05
    """ets: maximum cosine distance within a cluster."""
    encoder: str | None = None
    """encoder: a sentence encoder's directory, or a package that contains one. served: the server's URL."""
    aggregate: Literal["last", "min", "mean", "prod"] = "last"
    """How the step scores of a path are aggregated."""
    vote: Literal["weighted", "majority", "best"] = "weighted"
    max_depth: PositiveInt = 25

    @model_validator(mode="after")
    def _fits(self) -> Self:
        if self.ground is not None and self.method != "auto":
            raise ValueError(f'ground is for method = "auto", and method = {self.method!r}: remove ground')
        if self.lookahead and self.method != "dvts":
            raise ValueError(f'lookahead is for method = "dvts", and method = {self.method!r}: remove lookahead')
        if self.method in ("ets", "auto") and (self.clusters in ("encoder", "served")) != (self.encoder is not None):
            raise ValueError(
                f'clusters = {self.clusters!r} and encoder = {self.encoder!r}: clusters = "encoder" or "served" needs '
                "encoder, and others do not take it"
            )
        return self

    @property
    def clustered(self) -> bool:
        return self.method == "ets" and self.cluster_weight > 0


class RolloutSearchTable(Table):
    """[search] of an RL recipe: responses are sampled by tree search, with a process model that selects which steps to
    expand. `train.samples_per_prompt` is the width, and `sampling.step` ends a step."""

    prm: PrmTable
    method: Literal["rebase", "beam", "dvts"] = "rebase"
    """As in `plaudit search`."""
    temperature: Positive = 0.2
    """rebase: of the softmax over scores."""
    keep: PositiveInt | None = None
    """beam: leaves kept; dvts: subtrees. Default: the square root of the width."""


class BudgetTable(Table):
    """Limits per question; when one is reached, the search ends with the answers it has."""

    generated: PositiveInt | None = None
    kv_tokens: PositiveInt | None = None
    """KV tokens summed over levels, as in the summary."""
    calls: PositiveInt | None = None
    seconds: Positive | None = None
    lead: bool | Annotated[float, Field(gt=0, lt=1)] = False
    """true: end a question once the remaining paths cannot overturn the vote. A number such as 0.95: once they will not
    overturn it with at least that probability, estimated from the votes so far."""


class SearchRecipe(Table):
    task: Literal["search"] = "search"
    seed: Annotated[int, Field(ge=0)] = 1
    concurrent: PositiveInt = 64
    """Questions searched concurrently."""
    lanes: PositiveInt | None = None
    """Groups of questions that advance independently: while one generates, another is scored or its selection solved.
    Affects time, never the results. Default: one per question if servers both generate and score, else a single group,
    since models of this process are faster with large batches."""
    processes: PositiveInt = 1
    """Processes that the questions are distributed over, each with its own models and its share of `concurrent` and of
    the KV. On a GPU one process's Python overhead exceeds the time of a small model. Processes are assigned to GPUs in
    turn. Affects time, never the results."""
    threads: PositiveInt | None = None
    """CPU threads of a process. Default: torch's."""
    model: PolicyTable
    data: QuestionsTable
    prm: PrmTable | None = None
    orm: OrmTable | None = None
    """Scores finished responses for their weight in the vote. Without [prm] the method must be best-of-n."""
    engine: GenerationTable = GenerationTable()
    steps: StepsTable = StepsTable()
    search: SearchRuleTable = SearchRuleTable()
    budget: BudgetTable = BudgetTable()

    @property
    def groups(self) -> int:
        scorers = [table for table in (self.prm, self.orm) if table is not None]
        served = self.engine.name != "core" and all(table.url is not None for table in scorers)
        return min(self.concurrent, self.lanes or (self.concurrent if served else 1))

    @model_validator(mode="after")
    def _can_work(self) -> Self:
        if self.prm is None and self.orm is None:
            raise ValueError("give [prm], which scores steps, or [orm], which scores finished responses, or both")
        if self.prm is None and self.search.method != "best-of-n":
            raise ValueError(f"search.method = {self.search.method!r} selects steps by score and needs a [prm] table")
        hidden = self.search.clustered and self.search.clusters == "hidden"
        if hidden and self.prm is not None and self.prm.url is not None:
            raise ValueError(
                'search.clusters = "hidden" needs the PRM\'s hidden states, and prm.url is a server: set it to "text", '
                '"encoder" or "served", or search.cluster_weight = 0'
            )
        if self.processes > 1 and self.engine.name != "core":
            raise ValueError(
                f"processes = {self.processes} run copies of local models, and engine.url is a server: remove "
                "processes, and set concurrent"
            )
        if self.processes > 1 and self.search.method == "auto" and self.search.ground is None:
            raise ValueError(
                'search.method = "auto" runs its pilot in one process: remove processes, set search.ground or choose a '
                "method"
            )
        if self.budget.lead and self.search.method == "particles":
            raise ValueError(
                "budget.lead does not work with particles, which resample finished paths so that no lead is final: "
                "remove it"
            )
        return self


class SearchServiceTable(Table):
    """Defaults and limits of a server's searches. Only the operator sets patterns (`steps.answer`, `steps.final`) and
    keys that load a model or start a process: a pattern could run without end on a client's text."""

    steps: StepsTable = StepsTable()
    """`stop` defaults to the step separator of the process model's format."""
    rule: SearchRuleTable = SearchRuleTable(clusters="text")
    """The keys of a recipe's [search]."""
    max_width: PositiveInt = 64
    max_generated: PositiveInt = 262_144
    """Token limit of one search; when it is reached, the search ends with the answers it has."""
    concurrent: PositiveInt = 64
    """Maximum concurrent searches; further ones are rejected with a retry hint."""

    @model_validator(mode="after")
    def _by_text(self) -> Self:
        if self.rule.method == "auto" and self.rule.ground is None:
            raise ValueError(
                'search.rule.method = "auto" needs search.rule.ground: a server has no right answers for a pilot'
            )
        if self.rule.encoder is not None:
            raise ValueError("search.rule.encoder: a server clusters steps by text; remove it")
        if self.rule.width > self.max_width:
            raise ValueError(
                f"search.rule.width = {self.rule.width} is above search.max_width = {self.max_width}: change one of "
                "them"
            )
        return self


# Configuration of `plaudit search` without a recipe: the embedded world with Plaudit's shipped models.
EMBEDDED: dict[str, Any] = {
    "task": "search",
    "threads": 1,
    "model": {"path": "sums-policy"},
    "data": {"world": "sums-hard", "limit": 200},
    "prm": {"path": "sums-steps"},
    "steps": {"stop": ";", "answer": r"#(\d+)$", "max_step_tokens": 24, "max_tokens": 180},
}

_SEARCH: TypeAdapter[SearchRecipe] = TypeAdapter(SearchRecipe)


def load_search(path: Path | None, flags: Mapping[str, Any], overrides: Sequence[str] = ()) -> SearchRecipe:
    """Load the recipe at `path`, or the embedded world's; apply flags, given as {"a.b": value}, then overrides."""
    tree = {key: dict(v) if isinstance(v, dict) else v for key, v in EMBEDDED.items()} if path is None else {}
    if path is not None:
        tree = read_toml(find_recipe(path))
        if tree.get("task") != "search":
            raise ConfigError(f"{path}: task is {tree.get('task')!r}; expected 'search' for `plaudit search`")
    for key, value in flags.items():
        table, _, name = key.partition(".")
        inner = tree.setdefault(table, {})
        if not isinstance(inner, dict):
            raise ConfigError(f"{path}: {table} is a value, not a table")
        if key in ("data.world", "data.path"):
            for source in ("world", "path", "gym"):
                inner.pop(source, None)
        inner[name] = value
    for override in overrides:
        apply(tree, override)
    return parse_search(tree, str(path or "plaudit search"))


def parse_search(tree: Mapping[str, Any], source: str) -> SearchRecipe:
    recipe: SearchRecipe = check(_SEARCH, tree, source, SearchRecipe)
    return recipe
