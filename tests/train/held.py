"""A rule that holds a run: with PLAUDIT_HELD set to a directory, responses are scored once the run in it (`run`) may
make another step. `allowed` there says how many it may make; `waiting` is made when it has made them.

A user's file for `rule = "function"`: it runs in the process of the rule.
"""

from __future__ import annotations

import os
import time
from pathlib import Path
from typing import Any

from plaudit.events import read_events


def score(prompt: Any, response: str, truth: Any) -> float:
    if place := os.environ.get("PLAUDIT_HELD"):
        hold(Path(place))
    return sum(response.encode()) % 7 / 6  # of random weights, too, no two responses have the same for long


def hold(place: Path) -> None:
    while made(place / "run") >= int((place / "allowed").read_text()):
        (place / "waiting").touch()
        time.sleep(0.05)


def made(run: Path) -> int:
    if not (run / "events.jsonl").exists():
        return 0
    return sum(map(is_step, read_events(run)))


def is_step(event: dict[str, Any]) -> bool:
    return event["kind"] == "metric" and "policy/loss" in event["values"]
