"""Builds a recipe's placement and the host of its rollout processes."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from plaudit.config import RlRecipe
from plaudit.place.asynchronous import Asynchronous
from plaudit.place.colocated import Colocated
from plaudit.place.disaggregated import Disaggregated
from plaudit.place.hybrid import Hybrid, HybridProcesses
from plaudit.place.machines.pool import RolloutMachines
from plaudit.place.parts import ColocatedParts, HybridParts
from plaudit.place.placement import Placement, PlacementContext
from plaudit.place.ray.rollouts import RayRollouts
from plaudit.place.swapped import Swapped, SwappedParts
from plaudit.place.workers.remote_engine import Host, OwnProcess
from plaudit.train.run.ranks import Ranks


def new_placement(stage: PlacementContext) -> Placement:
    match stage.recipe.placement.name:
        case "colocated":
            return ColocatedParts(stage) if stage.recipe.engine_parts else Colocated(stage)
        case "swapped":
            return SwappedParts(stage) if stage.recipe.engine_parts else Swapped(stage)
        case "hybrid":
            if stage.recipe.engine_parts:
                return HybridParts(stage)
            return HybridProcesses(stage) if stage.recipe.rollout_processes else Hybrid(stage)
        case "disaggregated":
            return Disaggregated(stage)
        case "async":
            return Asynchronous(stage)


@contextmanager
def hosting(recipe: RlRecipe, directory: Path, ranks: Ranks) -> Iterator[Host]:
    """The host that starts the rollout processes of the run in `directory`."""
    if recipe.resources.rollout.nodes and ranks.main:
        with RolloutMachines(recipe, directory) as machines:
            yield machines
        return
    # External engine servers that are started here run on the trainer's machine.
    on_ray = recipe.resources.ray is not None and recipe.rollout_processes and recipe.engine.name == "core"
    yield RayRollouts(recipe) if on_ray else OwnProcess
