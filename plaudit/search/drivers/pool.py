"""Searches a persistent pool: every round selects among all nodes of the tree, until they are too far behind
(`rules.best_first`).

A search samples at most `width` x `max_depth` steps, as many as a level-wise one: without this limit it could return
forever. A node that repeats another one word for word shares its children, and is a leaf only until that one has
children.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import replace

from plaudit.config.search import BudgetTable, SearchRuleTable
from plaudit.search.drivers.levels import Levels
from plaudit.search.questions.reading import AnswerReading
from plaudit.search.rules import Rule
from plaudit.search.rules.best_first import after_return
from plaudit.search.tree.frontier import Frontier
from plaudit.search.tree.tree import Tree


class Pool(Levels):
    def __init__(
        self, tree: Tree, table: SearchRuleTable, budget: BudgetTable, reading: AnswerReading, rule: Rule
    ) -> None:  # fmt: skip
        super().__init__(tree, table, budget, reading, rule)
        self._times: Counter[int] = Counter()
        self._given_up: set[int] = set()

    def live(self) -> list[int]:
        if not self.left():
            return []
        again = (n.id for n in self.tree.having("expanded") if n.twin == n.id and n.id not in self._given_up)
        return sorted([*super().live(), *again])

    def left(self) -> int:
        spent = self.costs.calls >= self.table.width * self.table.max_depth
        return 0 if spent else super().left()

    def frontier(self, live: Sequence[int], width: int) -> Frontier:
        plain = super().frontier(live, width)
        return replace(plain, leaves=[replace(leaf, times=self._times[leaf.id]) for leaf in plain.leaves])

    def mark(self, frontier: Frontier, counts: Sequence[int]) -> None:
        nodes = self.tree.nodes
        going = {leaf.twin for leaf, count in zip(frontier.leaves, counts, strict=True) if count}
        for leaf, score in zip(frontier.leaves, after_return(frontier, self.table.return_cost), strict=True):
            if leaf.twin in going:
                nodes[leaf.id].state = "expanded"
                self._times[leaf.id] += 1
            elif score < 0:
                self._given_up.add(leaf.id)
                if nodes[leaf.id].state == "open":
                    nodes[leaf.id].state = "pruned"
