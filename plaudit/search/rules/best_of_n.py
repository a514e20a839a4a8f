"""Best of n: n paths, each on its own; nothing is pruned."""

from __future__ import annotations

from plaudit.search.tree.frontier import Choice, Frontier


def best_of_n(frontier: Frontier) -> Choice:
    if frontier.depth == 0:
        return Choice([frontier.width])
    return Choice([1] * len(frontier.leaves))
