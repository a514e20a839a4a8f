"""Runs in the terminal: where each came to, and how its loss fell."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise
from pathlib import Path

from rich.console import Console
from rich.table import Table

from plaudit.events import Event
from plaudit.report.source import run_events

# What the figures mean, in the order in which they are shown.
FIGURES = {
    "accuracy/sums/sampled": "answers right, sampled at temperature 1",
    "accuracy/sums/greedy": "answers right, greedy",
    "accuracy/sums-hard/sampled": "long chains right, sampled",
    "accuracy/sums-hard/greedy": "long chains right, greedy",
    "pair_accuracy": "pairs ordered as the truth orders them",
    "step_auc": "right steps scored above wrong ones (AUC)",
    "first_wrong_f1": "first wrong step found (F1)",
    "sums-hard/pair_accuracy": "pairs of long chains ordered as the truth orders them",
    "sums-hard/step_auc": "steps of long chains (AUC)",
    "sums-hard/first_wrong_f1": "first wrong step of long chains (F1)",
    "lead": "mean lead of the better response",
    "score_mean": "mean score",
    "score_std": "spread of scores",
    "heldout_loss": "loss on held-out items",
}
_BLOCKS = "▁▂▃▄▅▆▇█"
_SPARKS = 24


def print_report(runs: Sequence[Path], console: Console | None = None) -> None:
    console = console or Console()
    table = Table(title="on held-out items", title_style="dim", title_justify="left", box=None, pad_edge=False)
    for heading in ("run", "figure"):
        table.add_column(heading)
    table.add_column("value", justify="right")
    for run in runs:
        events = run_events(run)
        curve = [float(e["values"]["loss"]) for e in events if e["kind"] == "metric" and "loss" in e["values"]]
        figures = final_figures(events)
        label = run.resolve().name
        for name in [*FIGURES, *sorted(set(figures) - set(FIGURES))]:
            if name in figures:
                table.add_row(label, FIGURES.get(name, name), f"{figures[name]:.3f}")
                label = ""
        table.add_row(
            label, f"loss over {len(curve)} steps {sparkline(curve)}", f"{_seconds(events):.0f} s", end_section=True
        )
    console.print(table)


def final_figures(events: Sequence[Event]) -> dict[str, float]:
    """The last value of every held-out figure."""
    figures: dict[str, float] = {}
    for event in events:
        if event["kind"] == "metric":
            for name, value in event["values"].items():
                if name.startswith("heldout/"):
                    figures[name.removeprefix("heldout/")] = float(value)
    return figures


def sparkline(values: Sequence[float]) -> str:
    """The curve in a line of blocks, each the mean of its part."""
    if not values:
        return ""
    width = min(_SPARKS, len(values))
    edges = [i * len(values) // width for i in range(width + 1)]
    means = [sum(values[a:b]) / (b - a) for a, b in pairwise(edges)]
    low, high = min(means), max(means)
    scale = (len(_BLOCKS) - 1) / (high - low) if high > low else 0.0
    return "".join(_BLOCKS[round((mean - low) * scale)] for mean in means)


def _seconds(events: Sequence[Event]) -> float:
    return float(events[-1]["wall"]) - float(events[0]["wall"])
