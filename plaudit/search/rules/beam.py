"""Beam search: the best leaves share the width evenly.

As in the code of ETS, `keep` is the root of the width where it is not given, rounded up, and falls with the width that
is left. There every kept leaf gets ceil(width / keep) children, which can overshoot; here the counts sum to the width.
"""

from __future__ import annotations

import math

from plaudit.search.tree.apportion import check_finite, even
from plaudit.search.tree.frontier import Choice, Frontier


def beam(frontier: Frontier, keep: int | None = None) -> Choice:
    scores = [leaf.score for leaf in frontier.leaves]
    check_finite(scores)
    kept = min(keep or math.ceil(math.sqrt(frontier.width)), len(scores), frontier.width)
    best = sorted(range(len(scores)), key=lambda i: (-scores[i], i))[:kept]
    counts = [0] * len(scores)
    for i, count in zip(best, even(kept, frontier.width), strict=True):
        counts[i] = count
    return Choice(counts)
