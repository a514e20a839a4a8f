"""`plaudit bench memory`: a recipe for a few steps in every placement, each in a process of its own.

What is read is each run's own event log: the ledger's peaks by phase and owner, and the seconds of a step.
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
    """One placement's figures, or why there are none. Bytes by owner are those of each phase at its fullest."""

    placement: str
    directory: str
    error: str | None = None
    peak_bytes: int = 0
    peak_phase: str = ""
    seconds_per_step: float = 0.0
    swap_seconds_per_step: float = 0.0
    """What moves between host and device took, where they were waited for."""
    switch_seconds_per_step: float = 0.0
    """What hybrid's two changes of mode took."""
    publish_seconds_per_step: float = 0.0
    phases: dict[str, dict[str, int]] = field(default_factory=dict)
    planned: dict[str, dict[str, int]] = field(default_factory=dict)
    """What the run expected when it began; empty where the planner has no formulas: today only colocated has."""

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
    """The placements of a list with commas; all without one."""
    placements = [name.strip() for name in names.split(",") if name.strip()] or list(PLACEMENTS)
    for name in placements:
        if name not in PLACEMENTS:
            raise ConfigError(f"unknown placement {name!r}; {nearest(name, PLACEMENTS)}")
    return placements


def bench_memory(
    recipe: Path, placements: Sequence[str], steps: int, sets: Sequence[str], out: Path, timeout: float
) -> MemoryResult:
    """The runs are in `out`, a directory for each placement."""
    tree = _readable(recipe, placements, sets)
    if not isinstance(tree, RlRecipe):
        raise ConfigError(f"{recipe} has task = {tree.task!r}: only RL runs have placements")
    # As few evaluations and saves as there can be: they are no part of a step.
    fixed = [f"train.steps={steps}", "train.eval_every=1000000", "train.checkpoint.every=1000000", "train.show=0"]
    if tree.reward.url is not None:
        fixed.append("reward.patience=30")  # a server that is away is known at once, not after every placement's wait
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
    """The recipe in the first placement that takes the keys which are set: some are of one placement alone."""
    for placement in placements[:-1]:
        try:
            return load_recipe(recipe, [*sets, f'placement.name="{placement}"'])
        except ConfigError:
            continue
    return load_recipe(recipe, [*sets, f'placement.name="{placements[-1]}"'])


def _run(command: list[str], timeout: float) -> str | None:
    """None, or the last words of a run that failed."""
    try:
        done = subprocess.run(command, stdout=subprocess.DEVNULL, stderr=subprocess.PIPE, text=True, timeout=timeout)
    except subprocess.TimeoutExpired:
        return f"not done after {timeout:g} s: raise --timeout, or ask for fewer --steps"
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
    """What the device says, where it says it."""
    return int((event.get("taken") or {}).get("peak") or _total(event["bytes"]))


def _total(sizes: dict[str, int]) -> int:
    return sum(sizes.values())


def _seconds(events: Sequence[Event], name: str) -> float:
    """Of a step; the first, in which things are made that stay, is left out where there are others."""
    steps = [event["values"] for event in events if event["kind"] == "metric" and "time/step" in event["values"]]
    later = steps[1:] or steps
    return sum(float(values.get(name, 0.0)) for values in later) / len(later)
