"""Diverse verifier tree search: the width is split over independent subtrees.

The first steps are assigned to `subtrees` groups in order, and the best of each group starts a subtree (as in the code
of ETS). From then on the best leaf of every subtree gets the subtree's whole width: its share minus its finished
leaves. With `lookahead` the runner scores a leaf after a few more greedy steps.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

from plaudit.search.tree.apportion import check_finite, even
from plaudit.search.tree.frontier import Choice, Frontier, Leaf


def dvts(frontier: Frontier, subtrees: int | None = None) -> Choice:
    leaves = frontier.leaves
    check_finite([leaf.score for leaf in leaves])
    if frontier.depth == 0:
        return Choice([frontier.width])
    counts = [0] * len(leaves)
    if frontier.depth == 1:
        groups = min(subtrees or math.ceil(math.sqrt(frontier.whole)), len(leaves), frontier.width)
        begin = 0
        for size, share in zip(even(groups, len(leaves)), even(groups, frontier.width), strict=True):
            counts[_best(leaves, range(begin, begin + size))] = share
            begin += size
        return Choice(counts)
    # Every open leaf was counted in its subtree's width: their number is what remains of it.
    members: dict[int, list[int]] = {}
    for i, leaf in enumerate(leaves):
        members.setdefault(leaf.branches[1], []).append(i)
    for group in members.values():
        counts[_best(leaves, group)] = len(group)
    return Choice(counts)


def _best(leaves: Sequence[Leaf], group: Sequence[int]) -> int:
    return max(group, key=lambda i: (leaves[i].score, -i))
