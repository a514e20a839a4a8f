"""Queries a judge on labelled data, every pair in both orders, with repetitions."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TypeVar

from plaudit.errors import ConfigError, DataError
from plaudit.judge_check.figures import Figures, JudgedPair, JudgedRow, pair_figures, row_figures
from plaudit.judge_check.judge import OpenJudge, PairJudge, ScoringJudge, Shown
from plaudit.judge_check.rows import Labelled, Pair, text_length
from plaudit.records import Item, ItemError

Question = TypeVar("Question")
SAMPLED_REPEATS = 3
OnBatch = Callable[[int, int], None]
"""Called with the number of answered questions and the total."""


@dataclass(frozen=True, slots=True)
class CheckResult:
    """failed   rows without a verdict, by the type of error; they are in no figure
    example  the message of the first one
    """

    figures: Figures
    failed: Counter[str]
    example: str = ""


def check_judge(
    opened: OpenJudge, rows: Sequence[Pair] | Sequence[Labelled], *, repeats: int | None = None,
    threshold: float | None = None, batch: int = 256, on_batch: OnBatch = lambda done, of: None,
) -> CheckResult:  # fmt: skip
    """`repeats`: requests per question; None: three if the judge samples, otherwise one."""
    times = repeats or (SAMPLED_REPEATS if opened.sampled else 1)
    pairs = [row for row in rows if isinstance(row, Pair)]
    if pairs:
        return _check_pairs(opened.judge, pairs, times, batch, on_batch)
    labelled = [row for row in rows if isinstance(row, Labelled)]
    limit = opened.threshold if threshold is None else threshold
    if not isinstance(opened.judge, ScoringJudge):
        raise ConfigError("this judge compares two responses; expected rows of {prompt, chosen, rejected}")
    if limit is None:
        raise ConfigError(
            "the score from which a response counts as good is unknown: set --threshold NUMBER, or use pairs "
            "instead of labels"
        )
    return _check_rows(opened.judge, labelled, times, limit, batch, on_batch)


def _check_pairs(
    judge: PairJudge, pairs: Sequence[Pair], times: int, batch: int, on_batch: OnBatch
) -> CheckResult:  # fmt: skip
    orders: list[Shown] = []
    for pair in pairs:
        orders += [(pair.chosen, pair.rejected)] * times + [(pair.rejected, pair.chosen)] * times
    margins = _in_batches(judge.margins, orders, max(1, batch // 2), on_batch)
    usable, failed, example = _answered(margins, 2 * times)
    judged = [
        JudgedPair(
            text_length(pairs[place].chosen) - text_length(pairs[place].rejected),
            tuple(answers[:times]), tuple(answers[times:]),
        )
        for place, answers in usable
    ]  # fmt: skip
    return CheckResult(pair_figures(judged), failed, example)


def _check_rows(
    judge: ScoringJudge, rows: Sequence[Labelled], times: int, threshold: float, batch: int, on_batch: OnBatch
) -> CheckResult:
    items: list[Item] = [row.item for row in rows for _ in range(times)]
    usable, failed, example = _answered(_in_batches(judge.values, items, batch, on_batch), times)
    judged = [
        JudgedRow(text_length(rows[place].item), rows[place].label, tuple(answers)) for place, answers in usable
    ]  # fmt: skip
    return CheckResult(row_figures(judged, threshold), failed, example)


def _in_batches(
    ask: Callable[[Sequence[Question]], Sequence[float | ItemError]], questions: Sequence[Question], size: int,
    on_batch: OnBatch,
) -> list[float | ItemError]:  # fmt: skip
    answers: list[float | ItemError] = []
    for start in range(0, len(questions), size):
        part = questions[start : start + size]
        part_answers = ask(part)
        if len(part_answers) != len(part):
            raise RuntimeError(f"the judge returned {len(part_answers)} answers to {len(part)} questions")
        answers += part_answers
        on_batch(len(answers), len(questions))
    return answers


def _answered(
    answers: Sequence[float | ItemError], each: int
) -> tuple[list[tuple[int, list[float]]], Counter[str], str]:
    """The rows with all answers, by number; for the others the error."""
    usable: list[tuple[int, list[float]]] = []
    failed: Counter[str] = Counter()
    example = ""
    for place, start in enumerate(range(0, len(answers), each)):
        numbers: list[float] = []
        for answer in answers[start : start + each]:
            if isinstance(answer, ItemError):
                failed[answer.type] += 1
                example = example or answer.message
                break
            numbers.append(answer)
        else:
            usable.append((place, numbers))
    if not usable:
        types = ", ".join(f"{count} {name}" for name, count in failed.most_common())
        raise DataError(f"the judge gave no verdict on any of {failed.total()} rows ({types}): {example}")
    return usable, failed, example
