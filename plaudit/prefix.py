"""The common prefix of two token sequences, for the engine and for servers without torch."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import compress, count
from operator import ne
from typing import Any

SHORT = 64  # tokens that are compared one by one faster than by slices


def common_prefix(a: Sequence[Any], b: Sequence[Any]) -> int:
    """How many leading tokens two sequences share."""
    limit = min(len(a), len(b))
    if limit <= SHORT:
        return next(compress(count(), map(ne, a, b)), limit)
    if a[:limit] == b[:limit]:
        return limit
    low, high = 0, limit  # a[:low] equals b[:low], a[:high] does not: slices compare faster than a loop over tokens
    while high - low > SHORT:
        middle = (low + high) // 2
        if a[low:middle] == b[low:middle]:
            low = middle
        else:
            high = middle
    return low + common_prefix(a[low:high], b[low:high])
