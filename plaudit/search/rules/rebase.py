"""REBASE (arXiv 2408.00724): the width is split over the leaves by a softmax of their scores; see `apportion`."""

from __future__ import annotations

from plaudit.search.tree.apportion import rebase as counts_by_score
from plaudit.search.tree.frontier import Choice, Frontier


def rebase(frontier: Frontier, temperature: float = 0.2) -> Choice:
    return Choice(counts_by_score([leaf.score for leaf in frontier.leaves], frontier.width, temperature))
