"""Shows the figures as a table, and as JSON."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import asdict
from typing import Any

from rich.console import Console
from rich.markup import escape
from rich.table import Table

from plaudit.judge_check.check import CheckResult
from plaudit.judge_check.figures import Figures
from plaudit.judge_check.statistics import Share


def as_json(result: CheckResult) -> dict[str, Any]:
    return {**asdict(result.figures), "failed": dict(result.failed)}


def show(result: CheckResult, console: Console) -> None:
    figures = result.figures
    times = f", {figures.repeats} requests per question" if figures.repeats > 1 else ""
    table = Table(title=f"{figures.rows} rows{times}", title_justify="left", box=None, pad_edge=False)
    for name in ("measure", "value", "95 % interval", "what it is"):
        table.add_column(name, justify="left" if name in ("measure", "what it is") else "right")
    for cells in _cells(figures):
        table.add_row(*cells)
    console.print(table)
    if result.failed:
        types = ", ".join(f"{count} {name}" for name, count in result.failed.most_common())
        console.print(
            f"\n{result.failed.total()} rows without a verdict are left out: {types} ({escape(result.example)})"
        )
    for warning in figures.warnings:
        console.print(f"\n[bold yellow]{warning.name}[/]: {escape(warning.message)}", highlight=False)
    for note in figures.notes:
        console.print(f"\nnote: {escape(note)}", highlight=False)
    if not figures.warnings:
        console.print("\nno warnings")


def _cells(figures: Figures) -> Iterator[tuple[str, str, str, str]]:
    yield "accuracy", *_percent(figures.accuracy), "verdicts that equal the label; a tie does not"
    if figures.kappa is not None:
        agreement = figures.kappa
        yield (
            "Cohen's κ",
            f"{agreement.value:.2f}",
            f"{agreement.low:.2f} to {agreement.high:.2f}",
            "agreement beyond chance",
        )
    if figures.auc is not None:
        yield "AUC", f"{figures.auc:.2f}", "", "a good response scores above a bad one"
    if figures.ties is not None:
        yield "ties", *_percent(figures.ties), "both sides equally good"
    if figures.flips is not None:
        yield "flips", *_percent(figures.flips), "verdicts that change when the sides are swapped"
    if figures.first_preferred is not None:
        firsts, judged = figures.first_preferred
        yield "for the first side", f"{firsts} of {judged}", "", "pairs decided by position, whatever the text"
    if figures.longer_wins is not None:
        yield "longer side wins", *_percent(figures.longer_wins), "of the wrong verdicts"
    for name, rate in (("longer", figures.wrong_if_longer), ("shorter", figures.wrong_if_shorter)):
        if rate is not None:
            yield f"wrong, rejected {name}", *_percent(rate), f"of the pairs whose rejected response is the {name}"
    if figures.length is not None:
        yield "score and length", f"{figures.length.value:+.2f}", "", "rank correlation beyond the label"
    if figures.consistency is not None:
        yield "self-consistency", *_percent(figures.consistency), "two answers to one question agree"


def _percent(measured: Share | None) -> tuple[str, str]:
    if measured is None:
        return "—", ""
    return f"{measured.value:.1%}", f"{measured.low:.1%} to {measured.high:.1%}"
