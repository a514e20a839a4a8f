"""Recipes and other configuration, typed. Imports no torch."""

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
