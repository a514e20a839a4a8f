"""One typed tree for every recipe, read from TOML with `--set a.b=c` on top. Imports no torch.

An unknown key is refused with the nearest right one, a wrong value with the key, the value and what was expected.
What the user chose is never edited: the resolved recipe is the given one plus defaults.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Annotated, Any, Literal, Self

from pydantic import Discriminator, Field, PositiveInt, Tag, TypeAdapter, model_validator

from plaudit.config.table import NonNegative, Positive, Share, Table, apply, check, read_toml
from plaudit.errors import ConfigError


class NewModel(Table):
    """A Llama-shaped model trained from nothing."""

    hidden: PositiveInt = 64
    layers: PositiveInt = 2
    heads: PositiveInt = 4
    kv_heads: PositiveInt = 2
    ffn: PositiveInt = 192
    positions: PositiveInt = 256
    tie_embeddings: bool = True

    @model_validator(mode="after")
    def _divides(self) -> Self:
        if self.hidden % self.heads or self.heads % self.kv_heads:
            raise ValueError(
                f"hidden ({self.hidden}) must be a multiple of heads ({self.heads}), "
                f"and heads of kv_heads ({self.kv_heads})"
            )
        return self


class ModelTable(Table):
    path: str | None = None
    """A model directory, a run directory, or the name of an embedded model."""
    new: NewModel | None = None
    dtype: Literal["float32", "bfloat16", "float16"] = "float32"
    device: str = "auto"
    """auto takes the GPU if there is one."""

    @model_validator(mode="after")
    def _one_source(self) -> Self:
        if (self.path is None) == (self.new is None):
            raise ValueError("give either model.path or a [model.new] table, and not both")
        return self


class SumsTable(Table):
    """The sums world: how hard its chains are and how its demonstrations go wrong."""

    operands: tuple[PositiveInt, PositiveInt] = (3, 5)
    """Fewest and most numbers in a chain."""
    digits: PositiveInt = 1
    hard_share: Share = 0.0
    """Part of the training problems that come from the long chains of sums-hard."""
    slip: Share = 0.05
    """Chance that a step's result is off."""
    habit: Share = 0.8
    """Chance that the demonstrator drops the carry where he is used to (adding 7)."""
    ramble: Share = 0.1
    """Chance of a true but needless step before each step."""

    @model_validator(mode="after")
    def _range(self) -> Self:
        low, high = self.operands
        if not 2 <= low <= high:
            raise ValueError(f"operands must be [fewest, most] with 2 <= fewest <= most, got [{low}, {high}]")
        return self


class DataTable(Table):
    world: str | None = None
    path: str | None = None
    """A .jsonl or .parquet file."""
    eval_path: str | None = None
    """Held-out items; without it the last tenth of `path` (at most eval_items) is held out."""
    limit: PositiveInt | None = None
    eval_items: PositiveInt = 500
    sums: SumsTable = SumsTable()

    @model_validator(mode="after")
    def _one_source(self) -> Self:
        if (self.world is None) == (self.path is None):
            raise ValueError('give either data.world (such as "sums") or data.path, and not both')
        return self


class CheckpointTable(Table):
    every: PositiveInt = 200
    keep: PositiveInt = 2


class TrainTable(Table):
    steps: PositiveInt
    batch: PositiveInt
    """Items per step: demonstrations, pairs or judged solutions."""
    micro_batch_tokens: PositiveInt = 8192
    """Most tokens in one forward pass. Moves memory and time, never the gradient."""
    lr: Positive
    schedule: Literal["constant", "linear", "cosine"] = "linear"
    final_lr_share: Share = 0.05
    warmup: Annotated[int, Field(ge=0)] = 20
    weight_decay: NonNegative = 0.0
    betas: tuple[Share, Share] = (0.9, 0.95)
    clip_norm: Positive = 1.0
    threads: PositiveInt | None = None
    """CPU threads; torch's own choice without it. Small models train no faster with more than one."""
    eval_every: PositiveInt = 200
    checkpoint: CheckpointTable = CheckpointTable()


class SftAlgorithm(Table):
    name: Literal["sft"] = "sft"


class BradleyTerry(Table):
    """Pairs: the chosen response should score higher than the rejected one."""

    name: Literal["bradley-terry"] = "bradley-terry"
    use_margins: bool = False
    """Ask for a lead of the item's own `margin`."""
    centring: NonNegative = 0.01
    """Weight of the penalty (chosen + rejected)², which keeps scores around zero."""


class Regression(Table):
    """Rated responses: each attribute's score should equal its rating."""

    name: Literal["regression"] = "regression"
    attributes: tuple[str, ...] = ("score",)


class StepsAlgorithm(Table):
    """Per-step targets, read at the token that ends each step."""

    name: Literal["steps"] = "steps"


class BaseRecipe(Table):
    seed: Annotated[int, Field(ge=0)] = 1
    model: ModelTable
    data: DataTable
    train: TrainTable


class SftRecipe(BaseRecipe):
    task: Literal["sft"]
    algorithm: SftAlgorithm = SftAlgorithm()


def algorithm_by_name(table: Any) -> str | None:
    """Which reward algorithm a table means: the first one unless it says otherwise."""
    if isinstance(table, Mapping):
        return str(table.get("name", "bradley-terry"))
    return getattr(table, "name", None)


class RewardRecipe(BaseRecipe):
    task: Literal["reward"]
    algorithm: Annotated[
        Annotated[BradleyTerry, Tag("bradley-terry")] | Annotated[Regression, Tag("regression")],
        Discriminator(algorithm_by_name),
    ] = BradleyTerry()


class PrmRecipe(BaseRecipe):
    task: Literal["prm"]
    algorithm: StepsAlgorithm = StepsAlgorithm()


Recipe = Annotated[SftRecipe | RewardRecipe | PrmRecipe, Field(discriminator="task")]
_RECIPE: TypeAdapter[SftRecipe | RewardRecipe | PrmRecipe] = TypeAdapter(Recipe)
TASKS: dict[str, type[BaseRecipe]] = {"sft": SftRecipe, "reward": RewardRecipe, "prm": PrmRecipe}
TAGS = {*TASKS, "bradley-terry", "regression"}


def load_recipe(path: Path, overrides: Sequence[str] = ()) -> SftRecipe | RewardRecipe | PrmRecipe:
    """The recipe in `path` with `a.b=c` overrides applied, checked."""
    tree = read_toml(path)
    for override in overrides:
        apply(tree, override)
    return parse_recipe(tree, str(path))


def parse_recipe(tree: Mapping[str, Any], source: str) -> SftRecipe | RewardRecipe | PrmRecipe:
    task = tree.get("task")
    if task not in TASKS:
        found = "is missing" if task is None else f"is {task!r}"
        raise ConfigError(f"{source}: task {found}; expected one of {', '.join(TASKS)}")
    recipe: SftRecipe | RewardRecipe | PrmRecipe = check(_RECIPE, tree, source, TASKS[task], TAGS)
    return recipe
