"""The base class of drivers: selects what one question expands in the next round, until its search is over."""

from __future__ import annotations

import time
from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

from plaudit.config.search import BudgetTable, SearchRuleTable
from plaudit.search.questions.answers import AGGREGATES, Answer, decided
from plaudit.search.questions.reading import AnswerReading
from plaudit.search.tree.costs import Costs
from plaudit.search.tree.tree import Node, Tree


@dataclass(frozen=True, slots=True)
class Expand:
    """`count` children for a node, which must not be a twin."""

    node: int
    count: int


class Driver(ABC):
    """needs_clusters  whether `choose` needs the nodes' clusters
    clock           seconds; simulations use another one
    """

    needs_clusters = False
    clock: Callable[[], float] = staticmethod(time.monotonic)

    def __init__(self, tree: Tree, table: SearchRuleTable, budget: BudgetTable, reading: AnswerReading) -> None:
        self.tree = tree
        self.table = table
        self.budget = budget
        self.reading = reading
        self.costs = Costs()
        self.stopped: str | None = None
        self._began: float | None = None

    def expansions(self) -> list[Expand]:
        """The next round; empty when the search is over, with the reason in `stopped`."""
        live = self.live()
        if live:
            self.costs.saw(self.tree.kv_tokens(live))
        now = self.clock()
        self._began = now if self._began is None else self._began
        self.costs.seconds = now - self._began
        self.stopped = self._over()
        chosen = [] if self.stopped else self.choose(live)
        if not chosen:
            self.stopped = self.stopped or "done"
        return chosen

    @abstractmethod
    def live(self) -> list[int]:
        """The nodes that may be expanded: their KV cache must be kept."""

    @abstractmethod
    def choose(self, live: Sequence[int]) -> list[Expand]: ...

    @abstractmethod
    def left(self) -> int:
        """The number of answers still possible."""

    def take(self, nodes: Sequence[Node]) -> None:  # noqa: B027 (most drivers keep no state)
        """Receives the scored children of a round."""

    def value(self, node: Node) -> float:
        if self.table.aggregate == "last" and node.score is not None:
            return float(node.score)
        return float(AGGREGATES[self.table.aggregate](self.tree.scores(node.id)))

    def finished(self) -> list[int]:
        """The nodes with answers, one entry for every vote."""
        return [node.id for node in self.tree.having("finished")]

    def answers(self) -> list[Answer]:
        answers = []
        for id in self.finished():
            text = self.reading.answer(self.tree.response(id))
            if text is not None:
                answers.append(Answer(text, self.value(self.tree.nodes[id]), id))
        return answers

    def _over(self) -> str | None:
        budget, costs = self.budget, self.costs
        for name in ("generated", "kv_tokens", "calls", "seconds"):
            limit = getattr(budget, name)
            if limit is not None and getattr(costs, name) >= limit:
                return f"budget: {name}"
        sure = float(budget.lead)
        if sure and decided(self.answers(), self.table.vote, self.left(), self.reading.alike, sure):
            return "lead"
        return None


def twins_together(tree: Tree, counts: Sequence[tuple[int, int]]) -> list[Expand]:
    """Expansions of nodes, with those of twins merged into the first: so their children are sampled together and
    differ."""
    joined: dict[int, Expand] = {}
    for id, count in counts:
        if count:
            first = tree.nodes[id].twin
            before = joined.get(first, Expand(first, 0))
            joined[first] = replace(before, count=before.count + count)
    return list(joined.values())
