"""The methods by name, with their driver and rule."""

from __future__ import annotations

from functools import partial

from plaudit.config.search import BudgetTable, SearchRuleTable
from plaudit.search.drivers.driver import Driver
from plaudit.search.drivers.levels import Levels
from plaudit.search.drivers.mcts import Mcts
from plaudit.search.drivers.particle_filter import ParticleFilter
from plaudit.search.drivers.pool import Pool
from plaudit.search.questions.reading import AnswerReading
from plaudit.search.rules import Rule
from plaudit.search.rules.beam import beam
from plaudit.search.rules.best_first import best_first
from plaudit.search.rules.best_of_n import best_of_n
from plaudit.search.rules.dvts import dvts
from plaudit.search.rules.ets import Ets
from plaudit.search.rules.rebase import rebase
from plaudit.search.tree.tree import Tree


def new_driver(tree: Tree, table: SearchRuleTable, budget: BudgetTable, reading: AnswerReading, seed: str) -> Driver:
    """`seed` is that of the question."""
    if table.method == "mcts":
        return Mcts(tree, table, budget, reading)
    if table.method == "particles":
        return ParticleFilter(tree, table, budget, reading, seed)
    if table.method == "best-first":
        return Pool(tree, table, budget, reading, rule_of(table))
    return Levels(tree, table, budget, reading, rule_of(table))


def rule_of(table: SearchRuleTable) -> Rule:
    match table.method:
        case "best-of-n":
            return best_of_n
        case "beam":
            return partial(beam, keep=table.keep, distinct=table.distinct)
        case "dvts":
            return partial(dvts, subtrees=table.keep)
        case "rebase":
            return partial(rebase, temperature=table.temperature)
        case "best-first":
            return partial(best_first, temperature=table.temperature, return_cost=table.return_cost)
        case "ets":
            return Ets(
                table.temperature, table.branch_weight, table.cluster_weight, table.cost, table.kv_budget,
                table.solver_seconds, table.solver_gap,
            )  # fmt: skip
        case _:
            raise ValueError(f"{table.method} is not a level-wise rule")
