"""Monte-Carlo tree search with PRM values, as in OpenR: every path goes from the root to its end, expanding unexpanded
nodes on the way, and its last value is added to all of its nodes.

A path is followed to its end only once, and a node without open descendants is not visited again.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

from plaudit.config.search import BudgetTable, SearchRuleTable
from plaudit.search.drivers.driver import Driver, Expand
from plaudit.search.questions.reading import AnswerReading
from plaudit.search.rules.puct import Visits, puct
from plaudit.search.tree.tree import ROOT, Node, Tree


class Mcts(Driver):
    def __init__(self, tree: Tree, table: SearchRuleTable, budget: BudgetTable, reading: AnswerReading) -> None:
        super().__init__(tree, table, budget, reading)
        self.paths = max(1, table.width // table.branch)
        self._visits = {ROOT: Visits(1.0)}
        self._children: dict[int, list[int]] = {}
        self._closed: set[int] = set()
        self._at = ROOT
        self._followed = 0

    def live(self) -> list[int]:
        return [n.id for n in self.tree.nodes if n.state in ("open", "expanded") and n.id not in self._closed]

    def left(self) -> int:
        return self.paths - self._followed

    def choose(self, live: Sequence[int]) -> list[Expand]:
        while self._followed < self.paths and ROOT not in self._closed:
            children = self._children.get(self._at)
            if children is None:
                self.tree.nodes[self._at].state = "expanded"
                return [Expand(self._at, self.table.branch)]
            visits = self._visits[self._at]
            open_ones = [child for child in children if child not in self._closed]
            if open_ones:
                self._at = open_ones[puct(visits.count, [self._visits[child] for child in open_ones])]
                if self.tree.nodes[self._at].state in ("open", "expanded"):
                    continue
            self._end_path()
        return []

    def take(self, nodes: Sequence[Node]) -> None:
        for node in nodes:
            if node.twin == node.id:
                prior = math.exp(node.logprob) if node.logprob is not None else 1.0
                self._visits[node.id] = Visits(node.value, max(prior, 1e-9))
                self._children.setdefault(node.parent, []).append(node.id)
            if node.state == "failed":
                self._closed.add(node.id)

    def _end_path(self) -> None:
        """Backs up the value of the path, and closes exhausted nodes."""
        value = self.tree.nodes[self._at].value
        for id in (*self.tree.branches(self._at), self._at):
            self._visits[id].count += 1
            self._visits[id].total += value
        id = self._at
        self._closed.add(id)
        while id != ROOT:
            id = self.tree.nodes[id].parent
            if not all(child in self._closed for child in self._children[id]):
                break
            self._closed.add(id)
        self._followed += 1
        self._at = ROOT
