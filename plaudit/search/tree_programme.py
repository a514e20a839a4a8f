"""The programme without clusters, solved exactly in linear time: the best closed part of a tree, bottom up.

What a branch is worth is the sum of its children that are worth something, less its own cost; what is worth nothing
goes. At least one leaf stays: where nothing under a branch pays, the best of it counts instead of nothing.
"""

from __future__ import annotations

from itertools import pairwise

from plaudit.search.programme import Programme, Solution


def solve_tree(programme: Programme) -> Solution:
    if programme.budget is not None or (programme.clusters and programme.cluster_weight > 0):
        raise ValueError("the tree programme knows neither clusters nor budgets")
    scale = programme.branch_weight / programme.whole_cost
    children: dict[int, list[int]] = {}  # branches by place; leaf i is -1 - i
    tops: dict[int, None] = {}
    for i, above in enumerate(programme.above):
        line = [*above, -1 - i]
        tops.setdefault(line[0])
        for upper, lower in pairwise(line):
            below = children.setdefault(upper, [])
            if lower not in below:
                below.append(lower)

    worth: dict[int, float] = {}
    chosen: dict[int, list[int]] = {}

    def choose(below: list[int]) -> list[int]:
        paying = [child for child in below if worth[child] > 0]
        return paying or [max(below, key=lambda child: worth[child])]

    def settle(at: int) -> None:
        if at < 0:
            worth[at] = programme.values[-1 - at] - scale * programme.leaf_costs[-1 - at]
            return
        chosen[at] = choose(children[at])
        worth[at] = sum(worth[child] for child in chosen[at]) - scale * programme.branch_costs[at]

    for at in _children_first(list(tops), children):
        settle(at)
    kept, stack = [], choose(list(tops))
    while stack:
        at = stack.pop()
        if at < 0:
            kept.append(-1 - at)
        else:
            stack += chosen[at]
    return Solution(tuple(sorted(kept)), "optimal")


def _children_first(tops: list[int], children: dict[int, list[int]]) -> list[int]:
    order, stack = [], tops
    while stack:
        at = stack.pop()
        order.append(at)
        stack = [*stack, *children.get(at, ())]
    return order[::-1]
