"""One metric over the steps of a run, with its statistics."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise
from statistics import fmean, stdev

# "Late" is the last quarter of a run and "early" its first fifth, with enough points to tell trend from noise.
_LATE, _EARLY, _LEAST = 4, 5, 4
_BLOCKS = "▁▂▃▄▅▆▇█"


@dataclass(frozen=True, slots=True)
class Curve:
    steps: tuple[int, ...]
    values: tuple[float, ...]

    def __len__(self) -> int:
        return len(self.steps)

    @property
    def finite(self) -> list[float]:
        return [value for value in self.values if math.isfinite(value)]

    @property
    def first_not_finite(self) -> int | None:
        return next(
            (step for step, value in zip(self.steps, self.values, strict=True) if not math.isfinite(value)), None
        )

    def late(self) -> float:
        return _mean(self.finite[-_part(len(self.finite), _LATE) :])

    def early(self) -> float:
        return _mean(self.finite[: _part(len(self.finite), _EARLY)])

    def middle(self) -> float:
        """The mean of the quarter before the middle, compared with `late` to see the current trend."""
        values = self.finite
        part = _part(len(values), _LATE)
        end = max(part, len(values) // 2)
        return _mean(values[end - part : end])

    def noise(self) -> float:
        """Three standard errors of the difference of two such parts: a smaller change may be chance."""
        values = self.finite
        if len(values) < 2 * _LEAST:
            return math.inf
        # Neighbours differ by noise rather than trend; the variance of their difference is twice that of the noise.
        spread = stdev(b - a for a, b in pairwise(values)) / math.sqrt(2)
        return 3 * spread * math.sqrt(1 / _part(len(values), _LATE) + 1 / _part(len(values), _EARLY))

    def smoothed(self) -> Curve:
        """Each finite value replaced by the mean of its neighbourhood, a fifteenth of the run to each side."""
        kept = [(step, value) for step, value in zip(self.steps, self.values, strict=True) if math.isfinite(value)]
        reach = max(1, len(kept) // 15)
        values = [value for _, value in kept]
        means = [fmean(values[max(0, i - reach) : i + reach + 1]) for i in range(len(kept))]
        return Curve(tuple(step for step, _ in kept), tuple(means))

    def near(self, step: int) -> float:
        """The finite value at the nearest step."""
        kept = [
            (abs(at - step), value) for at, value in zip(self.steps, self.values, strict=True) if math.isfinite(value)
        ]
        return min(kept)[1] if kept else math.nan

    def thinned(self, most: int) -> Curve:
        """At most `most` points: the ends, and the minimum and maximum of each interval, so that no spike is lost."""
        if len(self) <= most:
            return self
        stretches = max(1, most // 4)
        kept: set[int] = set()
        for part in range(stretches):
            begin, end = part * len(self) // stretches, (part + 1) * len(self) // stretches
            places = range(begin, end)
            finite = [i for i in places if math.isfinite(self.values[i])]
            kept |= {begin, end - 1}
            kept |= (
                {min(finite, key=self.values.__getitem__), max(finite, key=self.values.__getitem__)}
                if finite
                else set()
            )
        chosen = sorted(kept)
        return Curve(tuple(self.steps[i] for i in chosen), tuple(self.values[i] for i in chosen))


def _part(count: int, share: int) -> int:
    return min(count, max(_LEAST, count // share))


def _mean(values: Sequence[float]) -> float:
    return fmean(values) if values else math.nan


def sparkline(values: Sequence[float], most: int = 24) -> str:
    """The curve as a line of block characters, each the mean of an interval."""
    values = [value for value in values if math.isfinite(value)]
    if not values:
        return ""
    width = min(most, len(values))
    edges = [i * len(values) // width for i in range(width + 1)]
    means = [sum(values[a:b]) / (b - a) for a, b in pairwise(edges)]
    low, high = min(means), max(means)
    scale = (len(_BLOCKS) - 1) / (high - low) if high > low else 0.0
    return "".join(_BLOCKS[round((mean - low) * scale)] for mean in means)
