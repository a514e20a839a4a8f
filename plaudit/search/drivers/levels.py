"""Searches level by level: a rule distributes the remaining width over the leaves of the last level."""

from __future__ import annotations

from collections.abc import Sequence

from plaudit.config.search import BudgetTable, SearchRuleTable
from plaudit.search.drivers.driver import Driver, Expand, twins_together
from plaudit.search.questions.reading import AnswerReading
from plaudit.search.rules import Rule
from plaudit.search.tree.frontier import Frontier, Leaf
from plaudit.search.tree.tree import ROOT, Tree


class Levels(Driver):
    def __init__(
        self, tree: Tree, table: SearchRuleTable, budget: BudgetTable, reading: AnswerReading, rule: Rule
    ) -> None:  # fmt: skip
        super().__init__(tree, table, budget, reading)
        self.rule = rule
        self.needs_clusters = table.clustered

    def live(self) -> list[int]:
        return [node.id for node in self.tree.having("open")]

    def left(self) -> int:
        over = sum(node.state in ("finished", "cut", "failed") for node in self.tree.nodes)
        return max(0, self.table.width - over)

    def choose(self, live: Sequence[int]) -> list[Expand]:
        width = self.left()
        if width == 0 or not live:
            for node in self.tree.having("open"):  # leaves without remaining width
                node.state = "pruned"
            return []
        frontier = self.frontier(live, width)
        choice = self.rule(frontier)
        if choice.solver:
            self.costs.solver += float(choice.solver["seconds"])
            self.costs.unsolved += choice.solver["status"] != "optimal"
        self.mark(frontier, choice.counts)
        return twins_together(self.tree, list(zip(live, choice.counts, strict=True)))

    def mark(self, frontier: Frontier, counts: Sequence[int]) -> None:
        """Updates the state of leaves after the rule has set their numbers of children."""
        for leaf, count in zip(frontier.leaves, counts, strict=True):
            self.tree.nodes[leaf.id].state = "expanded" if count else "pruned"

    def frontier(self, live: Sequence[int], width: int) -> Frontier:
        nodes = self.tree.nodes
        leaves = []
        for id in live:
            node = nodes[id]
            branches = self.tree.branches(id)
            leaves.append(
                Leaf(id, node.value, branches, len(node.tokens), node.cluster or 0, node.twin)
            )  # fmt: skip
        used = {branch for leaf in leaves for branch in leaf.branches} | {ROOT}
        tokens = {branch: len(nodes[branch].tokens) for branch in used}
        return Frontier(max(nodes[id].depth for id in live), width, self.table.width, leaves, tokens)
