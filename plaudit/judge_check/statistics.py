"""Shares with their intervals, Cohen's kappa, and the tests that decide on a warning."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Hashable, Sequence
from dataclasses import dataclass

from scipy import stats

from plaudit.records import Z_95


@dataclass(frozen=True, slots=True)
class Share:
    """A share of `count` independent things with Wilson's 95 % interval."""

    value: float
    low: float
    high: float
    count: int


@dataclass(frozen=True, slots=True)
class Correlation:
    """Spearman's, with the chance of one as large where there is none."""

    value: float
    p: float
    count: int


def share(values: Sequence[float]) -> Share | None:
    """The mean of values from 0 to 1. Where they are not all 0 or 1 the interval is wider than need be."""
    count = len(values)
    if not count:
        return None
    mean = math.fsum(values) / count
    z2 = Z_95 * Z_95
    middle = (mean + z2 / (2 * count)) / (1 + z2 / count)
    half = Z_95 / (1 + z2 / count) * math.sqrt(mean * (1 - mean) / count + z2 / (4 * count * count))
    return Share(mean, max(0.0, middle - half), min(1.0, middle + half), count)


def kappa(labels: Sequence[Hashable], verdicts: Sequence[Hashable], independent: int) -> Share | None:
    """Cohen's (1960): agreement beyond what the shares of both give by chance. The interval is that of the agreement
    over so many independent things, with the chance as it is. None where chance agreement is complete."""
    count = len(labels)
    if not count:
        return None
    agreement = sum(a == b for a, b in zip(labels, verdicts, strict=True)) / count
    by_label, by_verdict = Counter(labels), Counter(verdicts)
    chance = sum(by_label[each] * by_verdict[each] for each in by_label) / count**2
    if chance >= 1:
        return None
    spread = share([agreement] * independent)
    assert spread is not None, "there are labels"
    value, low, high = ((each - chance) / (1 - chance) for each in (agreement, spread.low, spread.high))
    return Share(value, low, high, independent)


def correlation(xs: Sequence[float], ys: Sequence[float]) -> Correlation | None:
    """None where one of them does not vary, or there are fewer than four."""
    if len(xs) < 4 or len(set(xs)) < 2 or len(set(ys)) < 2:
        return None
    test = stats.spearmanr(xs, ys)
    return Correlation(float(test.statistic), float(test.pvalue), len(xs))


def sign_test(ups: int, downs: int) -> float:
    """The chance of a split as uneven where both are equally likely."""
    return float(stats.binomtest(ups, ups + downs).pvalue) if ups + downs else 1.0


def difference_test(first: Sequence[bool], second: Sequence[bool]) -> float:
    """Fisher's exact test: the chance of shares as different where there is one share."""
    table = [[sum(each), len(each) - sum(each)] for each in (first, second)]
    return float(stats.fisher_exact(table).pvalue)


def area_under_curve(good: Sequence[float], bad: Sequence[float]) -> float | None:
    """The chance that a good one scores above a bad one; ties count half."""
    if not good or not bad:
        return None
    return float(stats.mannwhitneyu(good, bad).statistic) / (len(good) * len(bad))
