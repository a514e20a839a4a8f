"""The recipe of a search, `plaudit search`, and the table [search] of a serve.toml. Imports no torch."""

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
    """A model or run directory, or an embedded name. With a server: where its tokenizer is."""
    dtype: Literal["float32", "bfloat16", "float16"] = "float32"
    device: str = "auto"


class QuestionsTable(AskingTable):
    """Questions of a built-in world or a gym, which know the truth, or of a .jsonl or .parquet file of {"prompt"} or
    {"messages"}. Those of a world are none that RL with the same seed trains on; a gym makes them from another seed."""

    world: World | None = None
    path: str | None = None
    truth: str = "answer"
    """path: the key of the right answer; questions may lack it."""
    limit: PositiveInt | None = None

    @model_validator(mode="after")
    def _one_source(self) -> Self:
        sources = [name for name in ("world", "gym", "path") if getattr(self, name) is not None]
        if len(sources) != 1:
            raise ValueError(f'give one of data.world (such as "sums-hard"), data.gym and data.path; found {sources}')
        if self.path is None and self.limit is None:
            raise ValueError(f"a {sources[0]} has no end: say how many questions with data.limit or --questions")
        return self


class PrmTable(Table):
    """What scores steps: a model of this process, or of a server."""

    path: str | None = None
    """Its directory. With a protocol other than plaudit's: where its configuration and its tokenizer are, by which its
    input is put together; weights need not be there."""
    url: str | tuple[str, ...] | None = None
    protocol: Literal["plaudit", "vllm", "sglang", "openai"] = "plaudit"
    """url: what the server speaks. plaudit: `plaudit serve`. vllm: /pooling, or of an outcome model /classify. sglang:
    /v1/score with the format's tokens, or /classify. openai: log-probs of /v1/completions."""
    model: str | None = None
    """url: the model's name there; the first one without it."""
    key_env: str | None = None
    """url: the environment variable that holds the API key."""
    timeout: Positive = 120.0
    """url: seconds for the scores of a level, or with another protocol for one request, retries included."""
    concurrency: PositiveInt = 64
    """Requests under way at the same time, with a protocol other than plaudit's."""
    format: str | Mapping[str, Any] | None = None
    """path: how steps are written, where the model's directory does not say it."""
    dtype: Literal["float32", "bfloat16", "float16"] = "float32"
    device: str = "auto"
    kv_bytes: PositiveInt | Annotated[float, Field(gt=0, lt=1)] | None = None

    @model_validator(mode="after")
    def _one_place(self) -> Self:
        if self.protocol == "plaudit" and (self.path is None) == (self.url is None):
            raise ValueError("give either path or url, and not both")
        if self.protocol != "plaudit" and not isinstance(self.url, str):
            raise ValueError(f'protocol = "{self.protocol}" needs the url of one server')
        if self.protocol != "plaudit" and self.path is None and self.reads_tokens:
            raise ValueError(f'protocol = "{self.protocol}" needs a path: where the model\'s tokenizer is')
        return self

    @property
    def reads_tokens(self) -> bool:
        return True


class OrmTable(PrmTable):
    """What scores finished responses."""

    pairs: bool = False
    """vllm: question and response go as two texts to /score, as to a reranker, and no path is needed."""

    @model_validator(mode="after")
    def _asked(self) -> Self:
        if self.protocol == "openai":
            raise ValueError('protocol = "openai" gives log-probs, and an outcome model has a head: use vllm or sglang')
        if self.pairs and self.protocol != "vllm":
            raise ValueError(f'pairs is for protocol = "vllm", and this is "{self.protocol}"')
        return self

    @property
    def reads_tokens(self) -> bool:
        return not self.pairs


class GenerationTable(Table):
    """core: the policy runs in this process. openai: any server with /v1/completions, such as vLLM. sglang: its own
    /generate."""

    name: Literal["core", "openai", "sglang"] = "core"
    url: str | None = None
    model: str | None = None
    """openai: the model's name there."""
    key_env: str | None = None
    timeout: Positive = 120.0
    """Seconds for one request, retries included."""
    concurrency: PositiveInt = 64
    """Requests under way at the same time."""
    kv_bytes: PositiveInt | Annotated[float, Field(gt=0, lt=1)] | None = None
    state_every: PositiveInt = 256
    """core, of a model with recurrent layers: tokens between two states that are kept (docs/core.md)."""

    @model_validator(mode="after")
    def _place(self) -> Self:
        if (self.name == "core") != (self.url is None):
            raise ValueError(f'engine.name = "{self.name}" {"takes no" if self.url else "needs a"} url')
        return self


class StepsTable(Table):
    """What a step is."""

    stop: str = "\n\n"
    """The text that ends a step; it stays part of the step."""
    answer: str = r"\\boxed\{((?:[^{}]|\{(?:[^{}]|\{[^{}]*\})*\})*)\}"
    """A regex whose first group, in its last match, is the answer. This one takes braces two deep."""
    equivalence: Literal["number", "math"] = "number"
    """Answers are the same: by what they say as written (1/2 is 0.5, {1, 2} is {2, 1}), or as mathematics by
    math-verify too (extra `verify`)."""
    final: str | None = None
    """A regex: a response in which it is found is finished, as one is that the end token ends."""
    temperature: NonNegative = 1.0
    top_p: Annotated[float, Field(gt=0, le=1)] = 1.0
    max_step_tokens: PositiveInt = 256
    max_tokens: PositiveInt = 1024
    """Of all steps of a path."""

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
            raise ValueError(f"{pattern!r} has no group: put what is the answer in parentheses")
        return pattern

    @field_validator("stop")
    @classmethod
    def _not_empty(cls, stop: str) -> str:
        if not stop:
            raise ValueError("stop is empty, and would end every step at once")
        return stop


class GroundTable(Table):
    """What decides whether a tree pays, as a pilot measures it."""

    steps: Positive
    """Of a response, on average."""
    accuracy: Annotated[float, Field(ge=0, le=1)]
    """The share of single responses that are right."""
    auc: Annotated[float, Field(ge=0, le=1)]
    """The chance that the PRM's last score is higher for a right response than for a wrong one to the same question."""


class SearchRuleTable(Table):
    method: Literal[Method, "auto"] = "ets"
    """auto: by the table of docs/search-when.md, for the ground that is given or that a pilot measures."""
    ground: GroundTable | None = None
    """auto: in place of a pilot, where questions have no right answers."""
    pilot: PositiveInt = 32
    """auto: questions with a right answer that are searched by best-of-n first, and by the method that the table then
    names."""
    width: PositiveInt = 16
    """Paths that are searched at once."""
    keep: PositiveInt | None = None
    """beam: leaves kept; dvts: subtrees. Default: the root of the width."""
    distinct: bool = False
    """beam: leaves that repeat each other word for word count as one among those kept."""
    lookahead: Annotated[int, Field(ge=0)] = 0
    """dvts: greedy steps that are tried, scored and thrown away before a leaf is judged."""
    branch: PositiveInt = 4
    """mcts: children of a node. It follows width / branch paths, so that it generates about as much as the others."""
    temperature: Positive = 0.2
    """rebase, ets, best-first: of the softmax over scores."""
    return_cost: NonNegative = 0.2
    """best-first: what a node's score loses for every level that it lies behind the deepest one, and for every time it
    was gone on from. Above 1 nothing is returned to."""
    branch_weight: NonNegative = 1.0
    """ets: what KV costs (the paper's lambda_b)."""
    cluster_weight: NonNegative = 1.5
    """ets: what another kind of step is worth (lambda_d)."""
    cost: Literal["nodes", "tokens"] = "nodes"
    """ets: what a branch costs: 1, or its tokens."""
    kv_budget: PositiveInt | None = None
    """ets: KV tokens that may be kept at a level, in place of a price."""
    solver_seconds: Positive = 5.0
    solver_gap: NonNegative = 0.0
    clusters: Literal["hidden", "text", "encoder", "served"] = "hidden"
    """ets: steps are alike by the PRM's hidden state at their end, word for word, by a sentence encoder (extra
    `search`), or by the embeddings of the server at `encoder`."""
    cluster_distance: Positive = 0.05
    """ets: cosine distance up to which steps are alike."""
    encoder: str | None = None
    """encoder: a sentence encoder's directory, or a package that holds one. served: the server's URL."""
    aggregate: Literal["last", "min", "mean", "prod"] = "last"
    """How the scores of a path's steps become one."""
    vote: Literal["weighted", "majority", "best"] = "weighted"
    max_depth: PositiveInt = 25

    @model_validator(mode="after")
    def _fits(self) -> Self:
        if self.ground is not None and self.method != "auto":
            raise ValueError(f'ground is for method = "auto", and this is {self.method!r}')
        if self.lookahead and self.method != "dvts":
            raise ValueError(f'lookahead is for method = "dvts", and this is {self.method!r}')
        if self.method in ("ets", "auto") and (self.clusters in ("encoder", "served")) != (self.encoder is not None):
            raise ValueError(f"clusters = {self.clusters!r} and encoder = {self.encoder!r}: name both or neither")
        return self

    @property
    def clustered(self) -> bool:
        return self.method == "ets" and self.cluster_weight > 0


class RolloutSearchTable(Table):
    """[search] of an RL recipe: the responses to a prompt are searched for, with a process model that says which steps
    are gone on with. `train.samples_per_prompt` is the width, and `sampling.step` ends a step."""

    prm: PrmTable
    method: Literal["rebase", "beam", "dvts"] = "rebase"
    """As in `plaudit search`."""
    temperature: Positive = 0.2
    """rebase: of the softmax over scores."""
    keep: PositiveInt | None = None
    """beam: leaves kept; dvts: subtrees. Default: the root of the width."""


class BudgetTable(Table):
    """What one question may cost; it ends with the answers it has when one of these is reached."""

    generated: PositiveInt | None = None
    kv_tokens: PositiveInt | None = None
    """Summed over levels, as the summary counts them."""
    calls: PositiveInt | None = None
    seconds: Positive | None = None
    lead: bool | Annotated[float, Field(gt=0, lt=1)] = False
    """true: a question ends once the paths still open cannot overturn the vote. A number such as 0.95: once they will
    not with at least that probability, judged by the votes so far."""


class SearchRecipe(Table):
    task: Literal["search"] = "search"
    seed: Annotated[int, Field(ge=0)] = 1
    concurrent: PositiveInt = 64
    """Questions that are searched together."""
    lanes: PositiveInt | None = None
    """Groups of questions that go on without waiting for each other: while one is generated for, another is scored, or
    its programmes are solved. Decides the time, never the results. Without it every question goes on alone where
    servers do both, and all wait for each other where models of this process do better with large batches."""
    processes: PositiveInt = 1
    """Processes that share out the questions, each with models of its own and its part of `concurrent` and of the KV.
    On a GPU the Python of one process takes longer than a small model. Of several GPUs each process takes the next.
    Decides the time, never the results."""
    threads: PositiveInt | None = None
    """CPU threads of a process; torch's own choice without it."""
    model: PolicyTable
    data: QuestionsTable
    prm: PrmTable | None = None
    orm: OrmTable | None = None
    """What gives finished responses their weight in the vote. Without [prm] it is all there is, and for best-of-n."""
    engine: GenerationTable = GenerationTable()
    steps: StepsTable = StepsTable()
    search: SearchRuleTable = SearchRuleTable()
    budget: BudgetTable = BudgetTable()

    @property
    def groups(self) -> int:
        judges = [table for table in (self.prm, self.orm) if table is not None]
        served = self.engine.name != "core" and all(table.url is not None for table in judges)
        return min(self.concurrent, self.lanes or (self.concurrent if served else 1))

    @model_validator(mode="after")
    def _can_work(self) -> Self:
        if self.prm is None and self.orm is None:
            raise ValueError("give [prm], which scores steps, or [orm], which scores finished responses, or both")
        if self.prm is None and self.search.method != "best-of-n":
            raise ValueError(f"search.method = {self.search.method!r} chooses among steps: it needs a [prm]")
        hidden = self.search.clustered and self.search.clusters == "hidden"
        if hidden and self.prm is not None and self.prm.url is not None:
            raise ValueError(
                'search.clusters = "hidden" reads the PRM\'s own states, and prm.url names a server: set it to "text", '
                '"encoder" or "served", or search.cluster_weight = 0'
            )
        if self.processes > 1 and self.engine.name != "core":
            raise ValueError(
                f"processes = {self.processes} are copies of models of this machine, and engine.url names a server: "
                "leave it out, and set concurrent"
            )
        if self.processes > 1 and self.search.method == "auto" and self.search.ground is None:
            raise ValueError(
                'search.method = "auto" measures by a pilot of one process: leave processes out, give search.ground or '
                "name a method"
            )
        if self.budget.lead and self.search.method == "particles":
            raise ValueError("budget.lead: particles that are finished are drawn again, so that no lead is safe")
        return self


class SearchServiceTable(Table):
    """Defaults of all searches, and their limits. Patterns (`steps.answer`, `steps.final`) and what opens a model or a
    process are the operator's alone: a pattern may take for ever, on a text of somebody's choice."""

    steps: StepsTable = StepsTable()
    """Without `stop`, what ends a step in the process model's format."""
    rule: SearchRuleTable = SearchRuleTable(clusters="text")
    """The keys of a recipe's [search]."""
    max_width: PositiveInt = 64
    max_generated: PositiveInt = 262_144
    """Tokens that one search may write; it ends with the answers it has."""
    concurrent: PositiveInt = 64
    """Searches at the same time; more are told to come again."""

    @model_validator(mode="after")
    def _by_text(self) -> Self:
        if self.rule.method == "auto" and self.rule.ground is None:
            raise ValueError(
                'search.rule.method = "auto" needs search.rule.ground: a server has no answers to measure by'
            )
        if self.rule.encoder is not None:
            raise ValueError("search.rule.encoder: a server's searches have clusters by text; leave it out")
        if self.rule.width > self.max_width:
            raise ValueError(f"search.rule.width is {self.rule.width}, above max_width = {self.max_width}")
        return self


# What `plaudit search` does without a recipe: the embedded world with the models that come with Plaudit.
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
    """The recipe in `path`, or that of the embedded world; flags, given as {"a.b": value}, then overrides on top."""
    tree = {key: dict(v) if isinstance(v, dict) else v for key, v in EMBEDDED.items()} if path is None else {}
    if path is not None:
        tree = read_toml(find_recipe(path))
        if tree.get("task") != "search":
            raise ConfigError(f"{path}: task is {tree.get('task')!r}; `plaudit search` takes recipes of task 'search'")
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
