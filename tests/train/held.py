"""A reward function that pauses a run. With PLAUDIT_HELD set to a directory, responses are scored only while the run
in `run` has made fewer steps than the number in `allowed`; `waiting` is created when it has made them all.

This is a user's file for `rule = "function"`: it runs in the rule's process.
"""

from __future__ import annotations

import os
import time
from pathlib import Path
from typing import Any

from plaudit.events import read_events


def score(prompt: Any, response: str, truth: Any) -> float:
    if directory := os.environ.get("PLAUDIT_HELD"):
        wait_until_allowed(Path(directory))
    return sum(response.encode()) % 7 / 6  # random weights, too, soon get different rewards


def wait_until_allowed(directory: Path) -> None:
    while finished_steps(directory / "run") >= int((directory / "allowed").read_text()):
        (directory / "waiting").touch()
        time.sleep(0.05)


def finished_steps(run: Path) -> int:
    if not (run / "events.jsonl").exists():
        return 0
    return sum(map(is_step, read_events(run)))


def is_step(event: dict[str, Any]) -> bool:
    return event["kind"] == "metric" and "policy/loss" in event["values"]
