"""Typed recipes and other configuration. Imports no torch. Names are imported on first use, so that commands which
need no recipe, such as `plaudit recipes`, start without pydantic."""

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from plaudit.config.algorithm import RlAlgorithm
    from plaudit.config.recipe import Recipe, load_recipe, parse_recipe
    from plaudit.config.rl import RlRecipe
    from plaudit.config.supervised import (
        BaseRecipe,
        BradleyTerry,
        DataTable,
        NewModel,
        PreferenceAlgorithm,
        PreferenceRecipe,
        PrmRecipe,
        Regression,
        RewardRecipe,
        SftRecipe,
        SumsTable,
        SupervisedTrain,
        TrainTable,
    )
    from plaudit.config.table import Table, differences, to_toml

__all__ = [
    "BaseRecipe",
    "BradleyTerry",
    "DataTable",
    "NewModel",
    "PreferenceAlgorithm",
    "PreferenceRecipe",
    "PrmRecipe",
    "Recipe",
    "Regression",
    "RewardRecipe",
    "RlAlgorithm",
    "RlRecipe",
    "SftRecipe",
    "SumsTable",
    "SupervisedTrain",
    "Table",
    "TrainTable",
    "differences",
    "load_recipe",
    "parse_recipe",
    "to_toml",
]

_MODULES = {
    "algorithm": ("RlAlgorithm",),
    "recipe": ("Recipe", "load_recipe", "parse_recipe"),
    "rl": ("RlRecipe",),
    "table": ("Table", "differences", "to_toml"),
}
_MODULE_OF = {name: module for module, names in _MODULES.items() for name in names}


def __getattr__(name: str) -> Any:
    if name not in __all__:
        raise AttributeError(f"module 'plaudit.config' has no attribute {name!r}")
    return getattr(import_module(f"plaudit.config.{_MODULE_OF.get(name, 'supervised')}"), name)
