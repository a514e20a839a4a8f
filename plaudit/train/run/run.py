"""A run directory: one writer at a time, its recipe, events, checkpoints and summary.

runs/<name>/  recipe.toml  events.jsonl  checkpoints/  rollouts/ (with train.dump)  preferences/ (what they are
              computed from)  final/ (the trained model)  summary.json  manifest.json (what was
              delivered)  lock
"""

from __future__ import annotations

import json
import os
import shutil
import tomllib
from collections.abc import Sequence
from pathlib import Path
from types import TracebackType
from typing import Any, Self

from plaudit.config import BaseRecipe, differences, parse_recipe, to_toml
from plaudit.errors import RunError
from plaudit.events import CHANGED, RESUME, VERIFIED, EventLog, read_lines
from plaudit.output import write_atomically
from plaudit.train.run.checkpoint import Checkpoints
from plaudit.train.run.run_lock import locked

FIGURES = ("summary.json", "manifest.json", VERIFIED)
# Keys that affect where a run executes, its duration and its logging, but no trained weights.
MAY_CHANGE_ON_RESUME = (
    "train.steps", "train.eval_every", "train.eval_samples", "train.checkpoint", "train.dump", "train.show",
    "train.non_finite", "train.micro_batch_tokens", "train.threads", "train.offload_optimizer", "data.eval_items",
    "model.device", "model.recompute", "resources", "engine", "placement.channel", "placement.deadline",
    "placement.concurrency", "reward.url", "reward.key_env", "reward.patience", "reward.on_error", "reward.max_errors",
    "truth", "critic.url", "critic.key_env", "critic.patience", "environment.timeout", "environment.threads",
)  # fmt: skip
# Keys that change measured metrics but no trained weights: may be changed, and the change is logged.
MEASURES = ("sampling.eval",)
SAME_NUMBERS = {"colocated", "swapped", "hybrid", "disaggregated"}  # placements with bit-identical results
# Keys that a checkpoint depends on. All others may be changed with --set, which the run logs.
FIXED = ("task", "model.path", "model.new", "model.lora", "model.dtype", "critic.path", "critic.shared")
# Keys whose defaults depend on another key.
IMPLIED = {
    "placement.name": "algorithm.correction", "placement.staleness": "algorithm.correction",
    "algorithm.name": "algorithm",
}  # fmt: skip


class Run:
    """A run directory, locked within `with`."""

    def __init__(
        self, directory: Path, recipe: BaseRecipe, *, resume: bool = False, fresh: bool = False,
        chosen: Sequence[str] = (),
    ) -> None:  # fmt: skip
        """`chosen`: keys that the user set for this start, which a resumed run may change."""
        self.directory = directory
        self.chosen = chosen
        self.changed: dict[str, tuple[Any, Any]] = {}
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

    def resumed(self, step: int) -> None:
        """Log that the run resumes at `step`, and the settings that changed."""
        self.events.note(RESUME, step=step)
        for key, (old, new) in self.changed.items() if step else ():
            self.events.note(CHANGED, step=step, key=key, old=old, new=new)

    def summarise(self, figures: dict[str, Any]) -> None:
        write_atomically(self.directory / "summary.json", json.dumps(figures, indent=2) + "\n")

    def _prepare(self) -> None:
        stored = self.directory / "recipe.toml"
        if self.fresh or not self._begun():
            for name in ("checkpoints", "final", "rollouts", "preferences"):
                shutil.rmtree(self.directory / name, ignore_errors=True)
            for path in (stored, *(self.directory / name for name in FIGURES), *self.directory.glob("events*.jsonl")):
                path.unlink(missing_ok=True)
        if not stored.exists():
            write_atomically(stored, to_toml(self.recipe))
            return
        if not self.resume:
            raise RunError(
                f"{self.directory} already contains a run: --resume continues it, --fresh starts over, --out sets "
                "another directory"
            )
        before = parse_recipe(tomllib.loads(stored.read_text()), str(stored))
        self.changed = differences(before, self.recipe, MAY_CHANGE_ON_RESUME)
        if SAME_NUMBERS.issuperset(self.changed.get("placement.name", ())):
            self.changed.pop("placement.name", None)
        for key, (old, new) in self.changed.items():
            self._check_change(key, old, new)
        write_atomically(stored, to_toml(self.recipe))

    def _check_change(self, key: str, old: Any, new: Any) -> None:
        what = f"cannot resume {self.directory}: it was started with {key} = {old!r}, and the recipe has {new!r}"
        if any(_within(key, fixed) for fixed in FIXED):
            raise RunError(
                f"{what}, which does not fit its checkpoints; --fresh starts over, --out sets another directory"
            )
        chosen = [*MEASURES, *self.chosen, *(IMPLIED[name] for name in self.chosen if name in IMPLIED)]
        if not any(_within(key, name) or _within(name, key) for name in chosen):
            raise RunError(f"{what}; add --set {key}=… to the command to continue with the new value, which is logged")

    def _begun(self) -> bool:
        """Whether a step was completed. A run that failed before, on its data for instance, has nothing to keep."""
        if self.checkpoints.directory.exists() or self.final.exists():
            return True
        logs = self.directory.glob("events*.jsonl")
        return any(event["kind"] == "metric" for log in logs for event in read_lines(log))


def _within(key: str, table: str) -> bool:
    return key == table or key.startswith(f"{table}.")
