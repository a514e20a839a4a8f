"""A run directory: one writer at a time, its recipe, events, checkpoints and summary.

runs/<name>/  recipe.toml  events.jsonl  checkpoints/  rollouts/ (with train.dump)  final/ (the trained model)
              summary.json  lock
"""

from __future__ import annotations

import json
import os
import shutil
import tomllib
from pathlib import Path
from types import TracebackType
from typing import Any, Self

from plaudit.config import BaseRecipe, differences, parse_recipe, to_toml
from plaudit.errors import RunError
from plaudit.events import EventLog, read_lines
from plaudit.output import write_atomically
from plaudit.train.run.checkpoint import Checkpoints
from plaudit.train.run.run_lock import locked

# A resumed run may go on for longer, look more often and keep more; all else decides the numbers.
MAY_CHANGE_ON_RESUME = (
    "train.steps",
    "train.eval_every",
    "train.checkpoint",
    "train.dump",
    "data.eval_items",
    "model.device",
    "resources",
    "critic.url",
    "critic.patience",
)


class Run:
    """Holds the directory's lock from `with` to its end."""

    def __init__(self, directory: Path, recipe: BaseRecipe, *, resume: bool = False, fresh: bool = False) -> None:
        self.directory = directory
        self.recipe = recipe
        self.resume = resume
        self.fresh = fresh
        self.checkpoints = Checkpoints(directory / "checkpoints", recipe.train.checkpoint.keep)
        self.final = directory / "final"
        self.events: EventLog

    def __enter__(self) -> Self:
        self._lock = locked(self.directory)
        try:
            self._prepare()
        except BaseException:
            os.close(self._lock)
            raise
        self.events = EventLog(self.directory)
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.events.close()
        os.close(self._lock)

    def summarise(self, figures: dict[str, Any]) -> None:
        write_atomically(self.directory / "summary.json", json.dumps(figures, indent=2) + "\n")

    def _prepare(self) -> None:
        stored = self.directory / "recipe.toml"
        if self.fresh or not self._begun():
            for name in ("checkpoints", "final", "rollouts"):
                shutil.rmtree(self.directory / name, ignore_errors=True)
            for path in (stored, self.directory / "summary.json", *self.directory.glob("events*.jsonl")):
                path.unlink(missing_ok=True)
        if not stored.exists():
            write_atomically(stored, to_toml(self.recipe))
            return
        if not self.resume:
            raise RunError(
                f"{self.directory} already holds a run: --resume goes on with it, --fresh starts it over, "
                "--out names another directory"
            )
        before = parse_recipe(tomllib.loads(stored.read_text()), str(stored))
        for key, (old, new) in differences(before, self.recipe, MAY_CHANGE_ON_RESUME).items():
            raise RunError(
                f"cannot resume {self.directory}: it was begun with {key} = {old!r}, the recipe says {new!r}"
            )
        write_atomically(stored, to_toml(self.recipe))

    def _begun(self) -> bool:
        """Whether a step was made. A run that failed before, on its data for instance, has nothing to lose."""
        if self.checkpoints.directory.exists() or self.final.exists():
            return True
        logs = self.directory.glob("events*.jsonl")
        return any(event["kind"] == "metric" for log in logs for event in read_lines(log))
