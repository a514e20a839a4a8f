"""Best-first search over a persistent pool: the width goes to the best nodes of the whole tree, at any depth.

The other rules see only the leaves of the last level. Here all nodes stay candidates: skipped leaves, and nodes that
already have children and may get more. If all continuations of a step score badly the search returns to the last good
step; its KV cache is still available. A return has a cost: from a node's score `return_cost` is subtracted for each
level it is behind the deepest one, since the steps from there must be generated again, and for each time it was
expanded, since the results were not good enough. The width is then split as in REBASE.

A node whose score falls below 0 is behind every new one, since process models score from 0 to 1: it is dropped. So with
a cost above 1 the search never returns, and this is REBASE.
"""

from __future__ import annotations

from plaudit.search.tree.apportion import rebase as counts_by_score
from plaudit.search.tree.frontier import Choice, Frontier


def best_first(frontier: Frontier, temperature: float = 0.2, return_cost: float = 0.2) -> Choice:
    scores = after_return(frontier, return_cost)
    able = [i for i, score in enumerate(scores) if score >= 0] or list(range(len(scores)))
    counts = [0] * len(scores)
    for i, count in zip(able, counts_by_score([scores[i] for i in able], frontier.width, temperature), strict=True):
        counts[i] = count
    return Choice(counts)


def after_return(frontier: Frontier, return_cost: float) -> list[float]:
    """The scores of the nodes minus the cost of returning to them."""
    return [
        leaf.score - return_cost * (frontier.depth - len(leaf.branches) + leaf.times) for leaf in frontier.leaves
    ]  # fmt: skip
