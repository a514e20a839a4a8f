"""Recipes and other configuration, typed. Imports no torch."""

from plaudit.config.recipe import (
    BaseRecipe,
    BradleyTerry,
    DataTable,
    NewModel,
    PrmRecipe,
    Regression,
    RewardRecipe,
    SftRecipe,
    SumsTable,
    TrainTable,
    load_recipe,
    parse_recipe,
)
from plaudit.config.table import Table, differences, to_toml

__all__ = [
    "BaseRecipe",
    "BradleyTerry",
    "DataTable",
    "NewModel",
    "PrmRecipe",
    "Regression",
    "RewardRecipe",
    "SftRecipe",
    "SumsTable",
    "Table",
    "TrainTable",
    "differences",
    "load_recipe",
    "parse_recipe",
    "to_toml",
]
