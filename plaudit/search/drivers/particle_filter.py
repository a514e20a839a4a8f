"""Particle filtering: `width` particles, resampled after every step by the odds of their scores."""

from __future__ import annotations

import random
from collections import Counter
from collections.abc import Sequence

from plaudit.config.search import BudgetTable, SearchRuleTable
from plaudit.search.drivers.driver import Driver, Expand, twins_together
from plaudit.search.questions.reading import AnswerReading
from plaudit.search.rules.particles import resample
from plaudit.search.tree.tree import ROOT, Node, Tree


class ParticleFilter(Driver):
    """seed   of the question, for resampling"""

    def __init__(
        self, tree: Tree, table: SearchRuleTable, budget: BudgetTable, reading: AnswerReading, seed: str
    ) -> None:  # fmt: skip
        super().__init__(tree, table, budget, reading)
        self._seed = seed
        self._particles = [ROOT] * table.width

    def live(self) -> list[int]:
        return sorted({id for id in self._particles if self.tree.nodes[id].state == "open"})

    def left(self) -> int:
        return sum(self.tree.nodes[id].state == "open" for id in self._particles)

    def choose(self, live: Sequence[int]) -> list[Expand]:
        nodes = self.tree.nodes
        if not live:
            return []
        if self._particles[0] != ROOT:
            rng = random.Random(f"{self._seed} {self.costs.rounds}")
            able = [id for id in self._particles if nodes[id].state in ("open", "finished")]
            drawn = resample([nodes[id].value for id in able], self.table.width, rng)
            self._particles = [able[i] for i in drawn]
        going = Counter(id for id in self._particles if nodes[id].state == "open")
        self._particles = [id for id in self._particles if nodes[id].state == "finished"]
        for id in live:
            nodes[id].state = "expanded" if going[id] else "pruned"
        return twins_together(self.tree, sorted(going.items()))

    def take(self, nodes: Sequence[Node]) -> None:
        self._particles += [node.id for node in nodes]

    def finished(self) -> list[int]:
        return [id for id in self._particles if self.tree.nodes[id].state == "finished"]
