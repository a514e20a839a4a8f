"""Beam search: the best leaves share the width equally.

As in the code of ETS, `keep` defaults to the square root of the width, rounded up, and shrinks with the remaining
width. There every kept leaf gets ceil(width / keep) children, which can overshoot; here the counts sum to the width.
With `distinct`, as search-and-learn can filter duplicates, leaves with the same text use only one slot.
"""

from __future__ import annotations

import math

from plaudit.search.tree.apportion import check_finite, even
from plaudit.search.tree.frontier import Choice, Frontier


def beam(frontier: Frontier, keep: int | None = None, distinct: bool = False) -> Choice:
    scores = [leaf.score for leaf in frontier.leaves]
    check_finite(scores)
    able = [i for i, leaf in enumerate(frontier.leaves) if not distinct or leaf.twin == leaf.id]
    kept = min(keep or math.ceil(math.sqrt(frontier.width)), len(able), frontier.width)
    best = sorted(able, key=lambda i: (-scores[i], i))[:kept]
    counts = [0] * len(scores)
    for i, count in zip(best, even(kept, frontier.width), strict=True):
        counts[i] = count
    return Choice(counts)
