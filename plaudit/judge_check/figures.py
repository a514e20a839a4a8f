"""Computes figures and warnings from a judge's verdicts. Pure arithmetic on margins and labels.

A warning needs a relevant effect size and a probability below `UNLIKELY` of seeing it without that bias.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from itertools import combinations

from plaudit.judge_check.statistics import (
    Correlation,
    Share,
    area_under_curve,
    correlation,
    difference_test,
    kappa,
    share,
    sign_test,
)

UNLIKELY = 0.001
OFTEN = 0.1  # of the verdicts: ties, or changes with the order or between repetitions
CORRELATED = 0.3
ONE_SIDED = 0.95  # of the pairs: above this the data cannot distinguish a length bias from skill


@dataclass(frozen=True, slots=True)
class JudgedPair:
    """A judge's verdicts on one pair. Margins are above 0 where it prefers the side shown first.

    longer          how many characters the chosen response is longer than the rejected one
    chosen_first    a margin for each time the pair was shown with the chosen response first
    rejected_first  the same with the rejected response first
    """

    longer: int
    chosen_first: tuple[float, ...]
    rejected_first: tuple[float, ...]

    @property
    def showings(self) -> tuple[tuple[float, ...], tuple[float, ...]]:
        return self.chosen_first, self.rejected_first

    @property
    def for_chosen(self) -> list[float]:
        """All margins as if the chosen response were shown first."""
        return [*self.chosen_first, *(-margin for margin in self.rejected_first)]


@dataclass(frozen=True, slots=True)
class JudgedRow:
    """A judge's scores of one labelled response, one for each repetition."""

    length: int
    label: bool
    scores: tuple[float, ...]


@dataclass(frozen=True, slots=True)
class JudgeWarning:
    name: str
    message: str


@dataclass(frozen=True, slots=True)
class Figures:
    """accuracy          share of verdicts that equal the label; a tie does not
    kappa             agreement beyond chance
    auc               labelled rows: the probability that a good response scores above a bad one
    ties              share of verdicts that are ties
    flips             share of verdicts that change with the order of the two sides
    first_preferred   pairs: of those decided by position rather than content, the number for the first; [for it, all]
    longer_wins       share of wrong verdicts in which the longer side wins
    wrong_if_longer   share of wrong verdicts where the rejected response is the longer one
    wrong_if_shorter  ... where it is the shorter one
    length            correlation of the score with the length, beyond the label
    consistency       the probability that a repeated question gets the same verdict
    """

    rows: int
    repeats: int
    accuracy: Share | None
    kappa: Share | None
    auc: float | None = None
    ties: Share | None = None
    flips: Share | None = None
    first_preferred: tuple[int, int] | None = None
    longer_wins: Share | None = None
    wrong_if_longer: Share | None = None
    wrong_if_shorter: Share | None = None
    length: Correlation | None = None
    consistency: Share | None = None
    warnings: list[JudgeWarning] = field(default_factory=list)
    notes: list[str] = field(default_factory=list)


def pair_figures(pairs: Sequence[JudgedPair]) -> Figures:
    labels, verdicts = [], []
    for pair in pairs:
        for label, margins in zip((1, -1), pair.showings, strict=True):
            labels += [label] * len(margins)
            verdicts += [_sign(margin) for margin in margins]
    # For each pair: was it decided by position? Above 0 for the first side, below 0 for the second, 0 if not.
    places = [_sign(sum(_sign(margin) for both in pair.showings for margin in both)) for pair in pairs]
    wrong = [(pair, margin) for pair in pairs for margin in pair.for_chosen if margin < 0 and pair.longer]
    figures = Figures(
        rows=len(pairs), repeats=len(pairs[0].chosen_first) if pairs else 0,
        accuracy=share([_mean(margin > 0 for margin in pair.for_chosen) for pair in pairs]),
        kappa=kappa(labels, verdicts, len(pairs)),
        ties=share([_mean(margin == 0 for margin in pair.for_chosen) for pair in pairs]),
        flips=share([
            _mean(_sign(a) != -_sign(b) for a, b in zip(*pair.showings, strict=True)) for pair in pairs
        ]),
        first_preferred=(places.count(1), places.count(1) + places.count(-1)),
        longer_wins=share([float(pair.longer < 0) for pair, _ in wrong]),
        wrong_if_longer=share([float(_is_wrong(pair)) for pair in pairs if pair.longer < 0]),
        wrong_if_shorter=share([float(_is_wrong(pair)) for pair in pairs if pair.longer > 0]),
        length=correlation([_average(pair.for_chosen) for pair in pairs], [pair.longer for pair in pairs]),
        consistency=_consistency([[list(map(_sign, both)) for both in pair.showings] for pair in pairs]),
    )  # fmt: skip
    figures.warnings.extend(_agreement_warnings(figures))
    figures.warnings.extend(_order_warnings(figures))
    figures.warnings.extend(_length_warnings(figures, pairs))
    figures.warnings.extend(_consistency_warnings(figures))
    figures.notes.extend(_notes(pairs))
    return figures


def row_figures(rows: Sequence[JudgedRow], threshold: float) -> Figures:
    """A response counts as good from the score `threshold`."""
    verdicts = [[score >= threshold for score in row.scores] for row in rows]
    averages = [_average(row.scores) for row in rows]
    figures = Figures(
        rows=len(rows), repeats=len(rows[0].scores) if rows else 0,
        accuracy=share([_mean(v == row.label for v in each) for row, each in zip(rows, verdicts, strict=True)]),
        kappa=kappa(
            [row.label for row in rows for _ in row.scores], [v for each in verdicts for v in each], len(rows)
        ),
        auc=area_under_curve(*(
            [score for row, score in zip(rows, averages, strict=True) if row.label is label] for label in (True, False)
        )),
        length=_within_labels(rows, averages),
        consistency=_consistency([[each] for each in verdicts]),
    )  # fmt: skip
    figures.warnings.extend(_agreement_warnings(figures))
    figures.warnings.extend(_correlation_warnings(figures))
    figures.warnings.extend(_consistency_warnings(figures))
    figures.notes.append("order bias is measured with pairs: rows of {prompt, chosen, rejected}")
    return figures


def _agreement_warnings(figures: Figures) -> Iterator[JudgeWarning]:
    kappa = figures.kappa
    if kappa is None:
        yield JudgeWarning("chance", "every verdict is the same, and so is every label: agreement cannot be measured")
    elif kappa.high < 0:
        yield JudgeWarning(
            "reversed", f"agrees with the labels less than by chance (κ {kappa.value:.2f}): check whether the sides "
            "or the scale are reversed",
        )  # fmt: skip
    elif kappa.low <= 0:
        yield JudgeWarning(
            "chance", f"cannot be distinguished from chance with {figures.rows} rows: κ {kappa.value:.2f}, 95 % "
            "interval "
            f"{kappa.low:.2f} to {kappa.high:.2f}",
        )  # fmt: skip
    if figures.ties is not None and figures.ties.low > OFTEN:
        yield JudgeWarning("ties", f"{figures.ties.value:.0%} of its verdicts are ties: its scale is too coarse")


def _order_warnings(figures: Figures) -> Iterator[JudgeWarning]:
    assert figures.first_preferred is not None, "of pairs"
    assert figures.flips is not None, "of pairs"
    firsts, judged_by_place = figures.first_preferred
    if sign_test(firsts, judged_by_place - firsts) < UNLIKELY:
        side, count = ("first", firsts) if 2 * firsts > judged_by_place else ("second", judged_by_place - firsts)
        yield JudgeWarning(
            "order", f"prefers the {side} side: of {judged_by_place} pairs decided by position, {count}; show "
            "every pair in both orders and use only consistent verdicts",
        )  # fmt: skip
    elif figures.flips.low > OFTEN:
        yield JudgeWarning(
            "flips", f"{figures.flips.value:.0%} of its verdicts change when the two sides are swapped, without a "
            "preference for one of them: it guesses",
        )  # fmt: skip


def _length_warnings(figures: Figures, pairs: Sequence[JudgedPair]) -> Iterator[JudgeWarning]:
    if_longer = [_is_wrong(pair) for pair in pairs if pair.longer < 0]
    if_shorter = [_is_wrong(pair) for pair in pairs if pair.longer > 0]
    if if_longer and if_shorter and difference_test(if_longer, if_shorter) < UNLIKELY:
        longer, shorter = _mean(if_longer), _mean(if_shorter)
        yield JudgeWarning(
            "length", f"prefers the {'longer' if longer > shorter else 'shorter'} side: wrong in {longer:.0%} of the "
            f"pairs whose rejected response is longer, in {shorter:.0%} of those where it is shorter",
        )  # fmt: skip
    else:
        yield from _correlation_warnings(figures)


def _correlation_warnings(figures: Figures) -> Iterator[JudgeWarning]:
    length = figures.length
    if length is not None and abs(length.value) >= CORRELATED and length.p < UNLIKELY:
        yield JudgeWarning(
            "length", f"its score {'rises' if length.value > 0 else 'falls'} with the length beyond what the labels "
            f"explain (rank correlation {length.value:.2f})",
        )  # fmt: skip


def _consistency_warnings(figures: Figures) -> Iterator[JudgeWarning]:
    same = figures.consistency
    if same is not None and same.high < 1 - OFTEN:
        yield JudgeWarning(
            "inconsistent", f"a repeated question gets the same verdict in {same.value:.0%}: lower its temperature, or "
            "use the majority of several answers",
        )  # fmt: skip


def _notes(pairs: Sequence[JudgedPair]) -> Iterator[str]:
    for name, sign in (("longer", 1), ("shorter", -1)):
        part = _mean(_sign(pair.longer) == sign for pair in pairs)
        if part >= ONE_SIDED:
            yield (
                f"the chosen response is the {name} one in {part:.0%} of the pairs: a judge that only looks at length "
                "would seem good on this data"
            )


def _is_wrong(pair: JudgedPair) -> bool:
    """By the majority of its verdicts; exactly half is not wrong, as a coin has no length bias."""
    return sum(map(_sign, pair.for_chosen)) < 0


def _consistency(rows: Sequence[Sequence[Sequence[int]]]) -> Share | None:
    """For each row its questions, for each question its answers: the share of pairs of answers to a question that
    agree."""
    if not rows or len(rows[0][0]) < 2:
        return None
    return share([_mean(a == b for answers in row for a, b in combinations(answers, 2)) for row in rows])


def _within_labels(rows: Sequence[JudgedRow], scores: Sequence[float]) -> Correlation | None:
    """Ranks among rows with the same label, which removes what the label explains."""
    ranked_scores, ranked_lengths = [], []
    for label in (True, False):
        places = [place for place, row in enumerate(rows) if row.label is label]
        ranked_scores += _ranks([scores[place] for place in places])
        ranked_lengths += _ranks([rows[place].length for place in places])
    return correlation(ranked_scores, ranked_lengths)


def _ranks(values: Sequence[float]) -> list[float]:
    """From 0 to 1; equal values share the mean of their ranks."""
    order = sorted(values)
    first = {value: place for place, value in reversed(list(enumerate(order)))}
    last = {value: place for place, value in enumerate(order)}
    return [(first[value] + last[value] + 1) / (2 * len(values)) for value in values]


def _sign(value: float) -> int:
    return (value > 0) - (value < 0)


def _mean(values: Iterable[bool]) -> float:
    several = list(values)
    return sum(several) / len(several)


def _average(values: Sequence[float]) -> float:
    return math.fsum(values) / len(values)
