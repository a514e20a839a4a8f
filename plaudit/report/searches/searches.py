"""A search from its event log: its figures, and some of its trees."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from plaudit.errors import RunError
from plaudit.events import Event
from plaudit.records import Z_95
from plaudit.report.source import run_events

NOTE = "search"  # the last note of a search


@dataclass(frozen=True, slots=True)
class Searched:
    """figures  the run's summary; trees  questions with all their nodes"""

    name: str
    figures: Mapping[str, Any]
    trees: Sequence[Event]

    @property
    def label(self) -> str:
        return f"{self.figures['method']}, {self.figures['width']}"

    @property
    def margin(self) -> float | None:
        """Half the width of the accuracy's 95 % interval."""
        return Z_95 * float(self.figures["accuracy_se"]) if "accuracy_se" in self.figures else None

    def per_question(self, name: str) -> float:
        return float(self.figures.get(name, 0)) / max(1, int(self.figures["questions"]))


def is_search(run: Path) -> bool:
    return any(_is_note(event) for event in run_events(run))


def read_searches(runs: Sequence[Path]) -> list[Searched]:
    return [searched(run.resolve().name, run_events(run)) for run in runs]


def searched(name: str, events: Sequence[Event]) -> Searched:
    notes = [event for event in events if _is_note(event)]
    if not notes:
        raise RunError(f"{name} is not a search, but other runs are: report them separately")
    trees = {event["index"]: event for event in events if event["kind"] == "sample" and "nodes" in event}
    return Searched(name, notes[-1], list(trees.values()))


def _is_note(event: Event) -> bool:
    return bool(event["kind"] == "note" and event["text"] == NOTE)
