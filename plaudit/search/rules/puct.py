"""Selects the child that a tree search visits next: PUCT with PRM values, as in OpenR.

    Q + P * (ln((N_parent + 19652 + 1) / 19652) + 1.25) * sqrt(N_parent) / (1 + n_child)

Q is the mean of the values backed up through the child, or its own score until it is visited. P is the share of its
probability among its siblings: exp of the mean log-prob of its tokens, or uniform if the server
returns none.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

_BASE, _INITIAL = 19652, 1.25


@dataclass(slots=True)
class Visits:
    """The visit statistics of a node."""

    score: float
    prior: float = 1.0
    count: int = 0
    total: float = 0.0

    @property
    def value(self) -> float:
        return self.total / self.count if self.count else self.score


def puct(parent: int, children: Sequence[Visits]) -> int:
    """The index of the child to visit; the first of equals. `parent` is the number of visits of the parent."""
    priors = sum(child.prior for child in children)
    weight = math.log((parent + _BASE + 1) / _BASE) + _INITIAL

    def worth(child: Visits) -> float:
        return child.value + child.prior / priors * weight * math.sqrt(parent) / (1 + child.count)

    return max(range(len(children)), key=lambda i: (worth(children[i]), -i))
