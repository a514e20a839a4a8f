"""The events of a run directory, or a plain word that it is none."""

from __future__ import annotations

from pathlib import Path

from plaudit.errors import RunError
from plaudit.events import Event, read_events


def run_events(run: Path) -> list[Event]:
    if not (run / "events.jsonl").is_file():
        raise RunError(f"{run} is no run directory: it has no events.jsonl; `plaudit train RECIPE` makes one")
    return read_events(run)
