"""Particle filtering (arXiv 2502.01618, its_hub): after every step all particles are resampled by the odds of their
scores; finished ones stay included with their last weight.

Weights come from the whole path's score at this step, not from products over steps. Resampling is multinomial.
"""

from __future__ import annotations

import bisect
import random
from collections.abc import Sequence
from itertools import accumulate

from plaudit.search.tree.apportion import check_finite

_EDGE = 1e-7  # scores are clipped to this distance from 0 and 1, whose odds are 0 and infinite


def odds(score: float) -> float:
    inside = min(max(score, _EDGE), 1 - _EDGE)
    return inside / (1 - inside)


def resample(scores: Sequence[float], count: int, rng: random.Random) -> list[int]:
    """The index of the particle that each of `count` new ones continues."""
    check_finite(scores)
    ends = list(accumulate(map(odds, scores)))
    return [min(bisect.bisect_right(ends, rng.random() * ends[-1]), len(scores) - 1) for _ in range(count)]
