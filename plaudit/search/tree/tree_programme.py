"""Solves the integer program by exploiting its tree structure.

Without clusters it is the best closed subtree, computed bottom up in linear time: the value of a branch is the sum of
its children with positive value, minus its own cost; branches without positive value are removed. At least one leaf
stays: if nothing under a branch has positive value, the best child counts instead.

With clusters it is branch and bound over the same recursion. Adding a cluster's bonus to each of its leaves gives a
bound. If the best subtree keeps several leaves of a cluster the bonus was counted too often: then the search branches
over which of them gets it, and no other leaf of the cluster does.
"""

from __future__ import annotations

import math
import time
from collections.abc import Mapping, Sequence
from itertools import pairwise

from plaudit.search.tree.programme import Programme, Solution, solve

EVALUATIONS = 60  # after which HiGHS is used
_EQUAL = 1e-12


class TreeSolver:
    """The tree of a program, prepared once; `best` then needs one pass over it."""

    def __init__(self, programme: Programme) -> None:
        if programme.budget is not None:
            raise ValueError("the tree solver does not support budgets")
        scale = programme.branch_weight / programme.whole_cost
        self.gains = [v - scale * c for v, c in zip(programme.values, programme.leaf_costs, strict=True)]
        self.costs = [scale * cost for cost in programme.branch_costs]
        below: dict[int, dict[int, None]] = {}  # branches by index; leaf i is -1 - i
        tops: dict[int, None] = {}
        for i, above in enumerate(programme.above):
            line = [*above, -1 - i]
            tops.setdefault(line[0])
            for upper, lower in pairwise(line):
                below.setdefault(upper, {}).setdefault(lower)
        self.tops = list(tops)
        self.below = {branch: list(children) for branch, children in below.items()}
        self.upward = _children_first(self.tops, self.below)

    def best(self, bonus: Mapping[int, float]) -> tuple[float, list[int]]:
        """The value of the best subtree and its leaves, if leaf i is worth bonus[i] more."""
        worth = {-1 - i: gain + bonus.get(i, 0.0) for i, gain in enumerate(self.gains)}
        chosen: dict[int, list[int]] = {}
        for branch in self.upward:
            chosen[branch] = _choose(self.below[branch], worth)
            worth[branch] = sum(worth[child] for child in chosen[branch]) - self.costs[branch]
        stack = _choose(self.tops, worth)
        value, kept = sum(worth[top] for top in stack), []
        while stack:
            at = stack.pop()
            if at < 0:
                kept.append(-1 - at)
            else:
                stack += chosen[at]
        return value, sorted(kept)


def solve_tree(programme: Programme) -> Solution:
    """Solves the program without clusters and budget."""
    return Solution(tuple(TreeSolver(programme).best({})[1]), "optimal")


def solve_covering(programme: Programme, time_limit: float = 5.0, gap: float = 0.0) -> Solution:
    """Solves the program with clusters exactly; with HiGHS if branching takes too long."""
    solver = TreeSolver(programme)
    deadline = time.monotonic() + time_limit
    members: dict[int, list[int]] = {}
    for i, cluster in enumerate(programme.clusters):
        members.setdefault(cluster, []).append(i)
    pay = programme.cluster_weight / len(members)
    best_value = -math.inf
    best_kept: tuple[int, ...] = ()
    stack: list[tuple[float, dict[int, float]]] = [(math.inf, dict.fromkeys(range(len(programme.values)), pay))]
    for _ in range(EVALUATIONS):
        if not stack or time.monotonic() > deadline:
            break
        bound, bonus = stack.pop()
        if bound <= best_value + _EQUAL:
            continue
        bound, kept = solver.best(bonus)
        paid = _paid(kept, bonus, programme.clusters)
        value = bound - pay * sum(count - 1 for count in paid.values())
        # A leaf kept without its cluster's bonus still covers the cluster.
        value += pay * len({programme.clusters[i] for i in kept} - paid.keys())
        if value > best_value:
            best_value, best_kept = value, tuple(kept)
        twice = [cluster for cluster, count in paid.items() if count > 1]
        if not twice or bound <= best_value + _EQUAL:
            continue
        cluster = max(twice, key=lambda c: paid[c])
        others = {i: b for i, b in bonus.items() if programme.clusters[i] != cluster}
        # the most likely one is popped first
        for i in sorted(members[cluster], key=lambda i: (i in kept, solver.gains[i])):
            stack.append((bound, {**others, i: pay}))
    stack = [entry for entry in stack if entry[0] > best_value + _EQUAL]
    if not stack:
        return Solution(best_kept, "optimal")
    return solve(programme, max(1e-9, deadline - time.monotonic()), gap)


def _paid(kept: Sequence[int], bonus: Mapping[int, float], clusters: Sequence[int]) -> dict[int, int]:
    """How many kept leaves of each cluster were counted with its bonus."""
    paid: dict[int, int] = {}
    for i in kept:
        if i in bonus:
            paid[clusters[i]] = paid.get(clusters[i], 0) + 1
    return paid


def _choose(below: list[int], worth: Mapping[int, float]) -> list[int]:
    paying = [child for child in below if worth[child] > 0]
    return paying or [max(below, key=lambda child: worth[child])]


def _children_first(tops: list[int], below: Mapping[int, list[int]]) -> list[int]:
    """The branches, each after all below it."""
    order, stack = [], [top for top in tops if top >= 0]
    while stack:
        at = stack.pop()
        order.append(at)
        stack += [child for child in below[at] if child >= 0]
    return order[::-1]
