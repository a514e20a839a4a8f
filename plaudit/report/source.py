"""Reads the events of a run directory; a clear error if it is not one."""

from __future__ import annotations

from pathlib import Path

from plaudit.errors import RunError
from plaudit.events import Event, read_events


def event_log(run: Path) -> Path:
    path = run / "events.jsonl"
    if not path.is_file():
        raise RunError(f"{run} is not a run directory: it has no events.jsonl; `plaudit train RECIPE` creates one")
    return path


def run_events(run: Path) -> list[Event]:
    event_log(run)
    return read_events(run)
