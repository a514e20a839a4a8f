"""Distribution of response lengths: a lognormal with the given mean, truncated at the maximum length."""

from __future__ import annotations

import math
from dataclasses import dataclass
from functools import lru_cache
from statistics import NormalDist

from plaudit.errors import ConfigError

_NORMAL = NormalDist()


@dataclass(frozen=True, slots=True)
class Lengths:
    mean: float
    longest: float
    spread: float
    """Standard deviation over mean, before truncation."""

    def __post_init__(self) -> None:
        if not 1 <= self.mean <= self.longest:
            raise ConfigError(
                f"mean response {self.mean:g} and longest {self.longest:g}: expected 1 ≤ mean ≤ longest; "
                "give --max-response the limit of the run"
            )

    def quantiles(self, count: int, of: float) -> list[float]:
        """`count` ascending lengths that represent `of` sampled ones; the last is the expected maximum."""
        return list(_quantiles(self, max(1, count), max(1.0, of)))


@lru_cache(maxsize=4096)
def _quantiles(lengths: Lengths, count: int, of: float) -> tuple[float, ...]:
    sigma = math.sqrt(math.log(1 + lengths.spread**2))
    middle = _location(lengths, sigma)
    ranks = [(i + 0.5) / count for i in range(count)]
    # The midpoint of the last interval underestimates the maximum: the longest of n samples is near rank n/(n+1).
    ranks[-1] = max(ranks[-1], of / (of + 1))
    return tuple(max(1.0, min(lengths.longest, math.exp(middle + sigma * _NORMAL.inv_cdf(rank)))) for rank in ranks)


@lru_cache(maxsize=4096)
def _location(lengths: Lengths, sigma: float) -> float:
    """Location of the lognormal whose truncated mean is the given one, by bisection: E[min(X, c)] increases with it."""
    cut = math.log(lengths.longest)
    low, high = math.log(lengths.mean) - 10, cut + 8 * sigma + 1
    for _ in range(80):
        middle = (low + high) / 2
        inside = math.exp(middle + sigma**2 / 2) * _NORMAL.cdf((cut - middle - sigma**2) / sigma)
        mean = inside + lengths.longest * (1 - _NORMAL.cdf((cut - middle) / sigma))
        low, high = (middle, high) if mean < lengths.mean else (low, middle)
    return (low + high) / 2
