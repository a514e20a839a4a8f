"""One typed tree for every recipe, read from TOML with `--set a.b=c` on top. Imports no torch.

An unknown key is refused with the nearest right one, a wrong value with the key, the value and what was expected.
What the user chose is never edited: the resolved recipe is the given one plus defaults.
"""

from __future__ import annotations

import tomllib
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Annotated, Any, Literal, Self

from pydantic import (
    BaseModel,
    ConfigDict,
    Discriminator,
    Field,
    PositiveInt,
    Tag,
    TypeAdapter,
    ValidationError,
    model_validator,
)
from pydantic_core import ErrorDetails

from plaudit.errors import ConfigError, nearest

NonNegative = Annotated[float, Field(ge=0)]
Positive = Annotated[float, Field(gt=0)]
Share = Annotated[float, Field(ge=0, le=1)]


class Table(BaseModel):
    model_config = ConfigDict(extra="forbid", frozen=True, strict=True)


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


def _reward_algorithm(table: Any) -> str | None:
    """Which reward algorithm a table means: the first one unless it says otherwise."""
    if isinstance(table, Mapping):
        name = table.get("name", "bradley-terry")
        return name if name in ("bradley-terry", "regression") else None
    return getattr(table, "name", None)


class RewardRecipe(BaseRecipe):
    task: Literal["reward"]
    algorithm: Annotated[
        Annotated[BradleyTerry, Tag("bradley-terry")] | Annotated[Regression, Tag("regression")],
        Discriminator(_reward_algorithm),
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
        _apply(tree, override)
    return parse_recipe(tree, str(path))


def read_toml(path: Path) -> dict[str, Any]:
    try:
        return tomllib.loads(path.read_text(encoding="utf-8"))
    except FileNotFoundError:
        known = sorted(str(found) for found in Path("recipes").glob("*.toml"))
        raise ConfigError(f"no recipe at {path}; {nearest(str(path), known)}") from None
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(f"cannot read the recipe {path}: {error}") from None
    except tomllib.TOMLDecodeError as error:
        raise ConfigError(f"{path} is not valid TOML: {error}") from None


def parse_recipe(tree: Mapping[str, Any], source: str) -> SftRecipe | RewardRecipe | PrmRecipe:
    task = tree.get("task")
    if task not in TASKS:
        found = "is missing" if task is None else f"is {task!r}"
        raise ConfigError(f"{source}: task {found}; expected one of {', '.join(TASKS)}")
    try:
        return _RECIPE.validate_python(_tuples(tree))
    except ValidationError as error:
        raise ConfigError(f"{source}: {_explain(error.errors()[0], TASKS[task])}") from None


def _tuples(value: Any) -> Any:
    """TOML has lists where the tree, being frozen, has tuples."""
    if isinstance(value, Mapping):
        return {key: _tuples(item) for key, item in value.items()}
    return tuple(_tuples(item) for item in value) if isinstance(value, list) else value


def _apply(tree: dict[str, Any], override: str) -> None:
    key, equals, text = override.partition("=")
    parts = key.strip().split(".")
    if not equals or not all(parts):
        raise ConfigError(f"--set {override!r} is not of the form table.key=value")
    for depth, part in enumerate(parts[:-1]):
        tree = tree.setdefault(part, {})
        if not isinstance(tree, dict):
            raise ConfigError(f"--set {override!r}: {'.'.join(parts[: depth + 1])} is a value, not a table")
    try:
        tree[parts[-1]] = tomllib.loads(f"value = {text}")["value"]
    except tomllib.TOMLDecodeError:
        tree[parts[-1]] = text.strip()


def _explain(error: ErrorDetails, root: type[BaseModel]) -> str:
    # Discriminated unions put the chosen tag into the location; it is no key of the user's.
    location = [str(part) for part in error["loc"] if part not in TAGS]
    key = ".".join(location)
    if error["type"] == "extra_forbidden":
        keys = _keys_beside(root, location)
        return f"unknown key {key!r}; {nearest(location[-1], keys)}"
    if error["type"] == "missing":
        return f"the key {key!r} is missing"
    tagless = error["type"] == "union_tag_not_found"
    if error["type"] == "model_type" or (tagless and not isinstance(error["input"], Mapping)):
        return f"{key} = {error['input']!r}: expected a table"
    if tagless:
        return f"{key}.name = {error['input'].get('name')!r}: expected 'bradley-terry' or 'regression'"
    if error["type"] == "value_error":
        message = error["msg"].removeprefix("Value error, ")
        return f"[{key}] {message}" if key else message
    return f"{key} = {error['input']!r}: {error['msg'][0].lower()}{error['msg'][1:]}"


def _keys_beside(root: type[BaseModel], location: list[str]) -> Iterator[str]:
    tables: list[type[BaseModel]] = [root]
    for part in location[:-1]:
        fields = [table.model_fields[part].annotation for table in tables if part in table.model_fields]
        tables = [found for annotation in fields for found in _tables_in(annotation)]
    for table in tables:
        yield from table.model_fields


def _tables_in(annotation: Any) -> Iterator[type[BaseModel]]:
    if isinstance(annotation, type) and issubclass(annotation, BaseModel):
        yield annotation
    for argument in getattr(annotation, "__args__", ()):
        yield from _tables_in(argument)


def to_toml(table: BaseModel) -> str:
    """The resolved configuration as TOML that `load_recipe` reads back to the same tree."""
    return "\n".join(_toml_lines(table.model_dump(exclude_none=True), ())) + "\n"


def _toml_lines(tree: Mapping[str, Any], path: tuple[str, ...]) -> Iterator[str]:
    values = {key: value for key, value in tree.items() if not isinstance(value, Mapping)}
    if path and (values or not tree):
        yield ""
        yield f"[{'.'.join(path)}]"
    for key, value in values.items():
        yield f"{key} = {_toml_value(value)}"
    for key, value in tree.items():
        if isinstance(value, Mapping):
            yield from _toml_lines(value, (*path, key))


def _toml_value(value: Any) -> str:
    if isinstance(value, bool):
        return str(value).lower()
    if isinstance(value, str):
        escaped = value.replace("\\", "\\\\").replace('"', '\\"')
        return '"' + "".join(c if c.isprintable() else f"\\U{ord(c):08x}" for c in escaped) + '"'
    if isinstance(value, list | tuple):
        return f"[{', '.join(_toml_value(item) for item in value)}]"
    return repr(value)


def differences(old: BaseModel, new: BaseModel, ignore: Sequence[str] = ()) -> dict[str, tuple[Any, Any]]:
    """Keys whose values differ, as {"a.b": (old, new)}."""
    before, after = dict(_flat(old.model_dump())), dict(_flat(new.model_dump()))
    return {
        key: (before.get(key), after.get(key))
        for key in sorted({*before, *after})
        if before.get(key) != after.get(key) and not any(key == i or key.startswith(i + ".") for i in ignore)
    }


def _flat(tree: Mapping[str, Any], prefix: str = "") -> Iterator[tuple[str, Any]]:
    for key, value in tree.items():
        if isinstance(value, Mapping):
            yield from _flat(value, f"{prefix}{key}.")
        else:
            yield f"{prefix}{key}", value
