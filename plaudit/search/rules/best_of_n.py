"""Best of n: n independent paths; nothing is pruned."""

from __future__ import annotations

from plaudit.search.tree.frontier import Choice, Frontier


def best_of_n(frontier: Frontier) -> Choice:
    if frontier.depth == 0:
        return Choice([frontier.width])
    return Choice([1] * len(frontier.leaves))
