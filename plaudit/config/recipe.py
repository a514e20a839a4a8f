"""One typed tree for every recipe, read from TOML with `--set a.b=c` overrides applied. Imports no torch.

An error for an unknown key suggests the nearest valid one; an error for a wrong value names the key, the value and what
is expected. The user's settings are never changed: the resolved recipe is the given one plus defaults.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Annotated, Any

from pydantic import Field, TypeAdapter

from plaudit.config.rl import RlRecipe
from plaudit.config.shipped.catalog import find_recipe
from plaudit.config.supervised import BaseRecipe, PreferenceRecipe, PrmRecipe, RewardRecipe, SftRecipe
from plaudit.config.table import apply, check, read_toml
from plaudit.errors import ConfigError

Recipe = SftRecipe | RewardRecipe | PrmRecipe | PreferenceRecipe | RlRecipe
_RECIPE: TypeAdapter[Recipe] = TypeAdapter(Annotated[Recipe, Field(discriminator="task")])
TASKS: dict[str, type[BaseRecipe]] = {
    "sft": SftRecipe, "reward": RewardRecipe, "prm": PrmRecipe, "preference": PreferenceRecipe, "rl": RlRecipe,
}  # fmt: skip
TAGS = {*TASKS, "bradley-terry", "regression"}


def load_recipe(path: Path, overrides: Sequence[str] = ()) -> Recipe:
    """Load and validate the recipe at `path`, or the shipped recipe of that name, with `a.b=c` overrides applied."""
    tree = read_toml(find_recipe(path))
    for override in overrides:
        apply(tree, override)
    return parse_recipe(tree, str(path))


def parse_recipe(tree: Mapping[str, Any], source: str) -> Recipe:
    task = tree.get("task")
    if task not in TASKS:
        if task == "search":
            raise ConfigError(f"{source}: task is 'search'; run it with `plaudit search {source}`")
        problem = "is missing" if task is None else f"is {task!r}"
        raise ConfigError(f"{source}: task {problem}; expected one of {', '.join(TASKS)}")
    recipe: Recipe = check(_RECIPE, tree, source, TASKS[task], TAGS)
    return recipe
