"""Best-first over a persistent pool: the width goes to the best nodes of the whole tree, whatever their depth.

The other rules see the leaves of the last level. Here all nodes stay candidates: leaves that were passed over, and
nodes that have children already, which may get others. Where all that a step led to scores badly the search goes back
to the last step that was good; its KV is still there. A return costs: from a node's score `return_cost` is taken for
each level that it lies behind the deepest one, since the way from there has to be written again, and for each time that
it was gone on from, since what came of it was not good enough. The width is then split as REBASE splits it.

A node whose score falls below 0 that way is behind every new one, since process models score from 0 to 1: it is given
up. So with a cost above 1 nothing is returned to, and this is REBASE.
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
    """The scores of the nodes less what it costs to return to them."""
    return [
        leaf.score - return_cost * (frontier.depth - len(leaf.branches) + leaf.times) for leaf in frontier.leaves
    ]  # fmt: skip
