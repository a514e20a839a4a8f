"""Diverse verifier tree search: the width is split over subtrees that never compete with each other.

The first steps are dealt out to `subtrees` groups in order, and the best of each group begins a subtree (as in the code
of ETS). From then on the best leaf of every subtree gets all of that subtree's width: its share less its leaves that
are over. With `lookahead` the runner scores a leaf by where a few greedy steps more would lead.
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
    # Every leaf that is still open was paid for out of its subtree's width: so many are left of it.
    members: dict[int, list[int]] = {}
    for i, leaf in enumerate(leaves):
        members.setdefault(leaf.branches[1], []).append(i)
    for group in members.values():
        counts[_best(leaves, group)] = len(group)
    return Choice(counts)


def _best(leaves: Sequence[Leaf], group: Sequence[int]) -> int:
    return max(group, key=lambda i: (leaves[i].score, -i))
