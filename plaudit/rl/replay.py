"""`--replay`: train again on a run's dumped samples, and compare every metric with its log."""

from __future__ import annotations

from collections.abc import Mapping
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from plaudit.config import RlRecipe
from plaudit.config.recipe import parse_recipe
from plaudit.config.table import read_toml
from plaudit.errors import RunError
from plaudit.events import read_events
from plaudit.metrics import of_machine
from plaudit.rl.follower import Viewer
from plaudit.rl.loop import RlTraining
from plaudit.train.rollouts.dump import Dump, DumpEnded
from plaudit.train.run.checkpoint import sha256
from plaudit.train.run.run import Run


@dataclass(frozen=True, slots=True)
class Verdict:
    equal: bool
    text: str


def replay(directory: Path, out: Path, viewer: Viewer) -> Verdict:
    """Repeat the run's training in `out` up to the end of its dump, and compare."""
    tree = read_toml(directory / "recipe.toml", "recipe of a run")
    recipe = parse_recipe(tree, str(directory / "recipe.toml"))
    if not isinstance(recipe, RlRecipe):
        raise RunError(f"{directory} is a run of task = {recipe.task!r}; --replay is for rl")
    if recipe.resources.ranks > 1:
        raise RunError(
            f"{directory} is a run over {recipe.resources.ranks} ranks, whose summation order differs: --replay "
            "compares bits and needs a run on one rank; --train-only trains on its dump"
        )
    dump = Dump.find(directory)
    again = recipe.model_copy(update={"train": recipe.train.model_copy(update={"dump": False})})
    with Run(out, again, fresh=True) as run:
        training = RlTraining(again, run, viewer, dump)
        with suppress(DumpEnded):  # the run was stopped there
            training.fit()
    return compare(directory, out)


def compare(run: Path, again: Path) -> Verdict:
    """Compare every metric of the steps that both runs have, and the final weights."""
    there, here = metrics_by_step(run), metrics_by_step(again)
    last = min(max(there, default=0), max(here, default=0))
    if last == 0:
        raise RunError(f"{run} and {again} have no step in common: there is nothing to compare")
    count, different = 0, []
    for step in range(last + 1):
        old, new = there.get(step, {}), here.get(step, {})
        for name in {**old, **new}:
            count += 1
            if old.get(name) != new.get(name):
                different.append(f"step {step}: {name} was {old.get(name)!r} and is now {new.get(name)!r}")
    weights = [_weights(run), _weights(again)]
    if weights[0] != weights[1] and all(weights):
        different.append("the final weights differ")
    if different:
        more = f"; {len(different)} of {count} numbers differ" if len(different) > 1 else ""
        return Verdict(False, f"{different[0]}{more}")
    also = " and the final weights" if all(weights) else ""
    return Verdict(True, f"equal to the bit: {count} numbers of {last} steps{also}")


def metrics_by_step(run: Path) -> dict[int, dict[str, Any]]:
    by_step: dict[int, dict[str, Any]] = {}
    for event in read_events(run):
        if event["kind"] == "metric":
            values: Mapping[str, Any] = event["values"]
            kept = {name: value for name, value in values.items() if not of_machine(name)}
            by_step.setdefault(event.get("step", 0), {}).update(kept)
    return by_step


def _weights(run: Path) -> list[tuple[str, str]]:
    return [(path.name, sha256(path)) for path in sorted((run / "final").glob("*.safetensors"))]
