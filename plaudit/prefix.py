"""What two sequences of tokens have in common at their beginnings, for the core and for a server that has no torch."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any


def common_prefix(a: Sequence[Any], b: Sequence[Any]) -> int:
    """How many leading tokens two sequences share."""
    limit = min(len(a), len(b))
    if limit and a[0] != b[0]:  # as with most neighbours in a tree
        return 0
    if a[:limit] == b[:limit]:
        return limit
    low, high = 0, limit  # a[:low] equals b[:low], a[:high] does not: slices compare faster than a loop over tokens
    while high - low > 1:
        middle = (low + high) // 2
        if a[low:middle] == b[low:middle]:
            low = middle
        else:
            high = middle
    return low
