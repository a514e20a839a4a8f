"""`plaudit bench memory`: runs a recipe for a few steps in every placement, each in a separate process.

The figures come from each run's event log: the peaks by phase and owner, and the duration of a step.
"""

from __future__ import annotations

import os
import platform
import subprocess
import sys
from collections.abc import Sequence
from dataclasses import asdict, dataclass, field
from datetime import UTC, datetime
from pathlib import Path
from typing import Any, get_args

from plaudit.config import RlRecipe, load_recipe
from plaudit.config.placement import PlacementTable
from plaudit.errors import ConfigError, nearest
from plaudit.events import Event, read_events

PLACEMENTS: tuple[str, ...] = get_args(PlacementTable.model_fields["name"].annotation)


@dataclass(frozen=True, slots=True)
class Placed:
    """The figures of one placement, or an error. Bytes by owner are those at the peak of each phase."""

    placement: str
    directory: str
    error: str | None = None
    peak_bytes: int = 0
    peak_phase: str = ""
    seconds_per_step: float = 0.0
    swap_seconds_per_step: float = 0.0
    """The duration of blocking transfers between host and device."""
    switch_seconds_per_step: float = 0.0
    """The duration of hybrid's two mode changes."""
    publish_seconds_per_step: float = 0.0
    phases: dict[str, dict[str, int]] = field(default_factory=dict)
    planned: dict[str, dict[str, int]] = field(default_factory=dict)
    """The planned memory at the start; empty if the planner has no formulas: currently only colocated has."""

    def summary_line(self) -> str:
        if self.error is not None:
            return f"{self.placement}: {self.error}"
        parts = {
            "moves": self.swap_seconds_per_step, "mode switches": self.switch_seconds_per_step,
            "publishing": self.publish_seconds_per_step,
        }  # fmt: skip
        spent = "".join(f", {seconds:.3g} s of it {name}" for name, seconds in parts.items() if seconds)
        step = f"{self.seconds_per_step:.3g} s a step{spent}"
        return f"{self.placement}: peak {self.peak_bytes / 2**20:,.0f} MiB in {self.peak_phase}; {step}"


@dataclass(frozen=True, slots=True)
class MemoryResult:
    date: str
    machine: str
    python: str
    recipe: str
    steps: int
    placements: list[Placed]

    def as_dict(self) -> dict[str, Any]:
        return asdict(self)


def chosen(names: str) -> list[str]:
    """The placements of a comma-separated list; all if it is empty."""
    placements = [name.strip() for name in names.split(",") if name.strip()] or list(PLACEMENTS)
    for name in placements:
        if name not in PLACEMENTS:
            raise ConfigError(f"unknown placement {name!r}; {nearest(name, PLACEMENTS)}")
    return placements


def bench_memory(
    recipe: Path, placements: Sequence[str], steps: int, sets: Sequence[str], out: Path, timeout: float
) -> MemoryResult:
    """The runs are stored in `out`, with a directory for each placement."""
    tree = _readable(recipe, placements, sets)
    if not isinstance(tree, RlRecipe):
        raise ConfigError(f"{recipe} has task = {tree.task!r}; expected an RL recipe, as only RL runs have placements")
    # As few evaluations and checkpoints as possible: they are not part of a step.
    fixed = [f"train.steps={steps}", "train.eval_every=1000000", "train.checkpoint.every=1000000", "train.show=0"]
    if tree.reward.url is not None:
        fixed.append("reward.patience=30")  # fail at once if a server is down, instead of waiting in every placement
    results = []
    for placement in placements:
        directory = out / placement
        options = [part for each in (*sets, *fixed, f'placement.name="{placement}"') for part in ("--set", each)]
        command = [sys.executable, "-m", "plaudit", "train", str(recipe), *options, "--out", str(directory), "--fresh"]
        error = _run(command, timeout)
        results.append(figures(placement, directory) if error is None else Placed(placement, str(directory), error))
    date = datetime.now(UTC).isoformat(timespec="seconds")
    machine = f"{platform.machine()}, {os.cpu_count()} cores"
    return MemoryResult(date, machine, platform.python_version(), str(recipe), steps, results)


def _readable(recipe: Path, placements: Sequence[str], sets: Sequence[str]) -> Any:
    """The recipe with the first placement that accepts the given keys: some belong to a single placement."""
    for placement in placements[:-1]:
        try:
            return load_recipe(recipe, [*sets, f'placement.name="{placement}"'])
        except ConfigError:
            continue
    return load_recipe(recipe, [*sets, f'placement.name="{placements[-1]}"'])


def _run(command: list[str], timeout: float) -> str | None:
    """None, or the last line of output of a failed run."""
    try:
        done = subprocess.run(command, stdout=subprocess.DEVNULL, stderr=subprocess.PIPE, text=True, timeout=timeout)
    except subprocess.TimeoutExpired:
        return f"not finished after {timeout:g} s: raise --timeout, or lower --steps"
    if done.returncode == 0:
        return None
    lines = done.stderr.strip().splitlines()
    return lines[-1].removeprefix("plaudit: ") if lines else f"ended with code {done.returncode}"


def figures(placement: str, directory: Path) -> Placed:
    events = read_events(directory)
    memory = [event for event in events if event["kind"] == "memory" and event["bytes"]]
    phases: dict[str, dict[str, int]] = {}
    for event in memory:
        if _total(event["bytes"]) > _total(phases.get(event["phase"], {})):
            phases[event["phase"]] = event["bytes"]
    plans = [event["memory"] for event in events if event["kind"] == "plan"]
    fullest = max(phases, key=lambda phase: _total(phases[phase]))
    return Placed(
        placement, str(directory), None, max(_peak(event) for event in memory), fullest,
        _seconds(events, "time/step"), _seconds(events, "time/swap"), _seconds(events, "time/mode_switch"),
        _seconds(events, "time/publish"), phases, plans[-1] if plans else {},
    )  # fmt: skip


def _peak(event: Event) -> int:
    """The device's own counter, if it has one."""
    return int((event.get("taken") or {}).get("peak") or _total(event["bytes"]))


def _total(sizes: dict[str, int]) -> int:
    return sum(sizes.values())


def _seconds(events: Sequence[Event], name: str) -> float:
    """Seconds of a step; the first, which allocates, is left out if there are others."""
    steps = [event["values"] for event in events if event["kind"] == "metric" and "time/step" in event["values"]]
    later = steps[1:] or steps
    return sum(float(values.get(name, 0.0)) for values in later) / len(later)
