"""A curve in a line of blocks."""

from __future__ import annotations

import math
from collections.abc import Sequence
from itertools import pairwise

_BLOCKS = "▁▂▃▄▅▆▇█"


def sparkline(values: Sequence[float], most: int = 24) -> str:
    """At most so many blocks, each the mean of its part of the curve."""
    values = [value for value in values if math.isfinite(value)]
    if not values:
        return ""
    width = min(most, len(values))
    edges = [i * len(values) // width for i in range(width + 1)]
    means = [sum(values[a:b]) / (b - a) for a, b in pairwise(edges)]
    low, high = min(means), max(means)
    scale = (len(_BLOCKS) - 1) / (high - low) if high > low else 0.0
    return "".join(_BLOCKS[round((mean - low) * scale)] for mean in means)
