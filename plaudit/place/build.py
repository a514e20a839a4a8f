"""The placement that a recipe names."""

from __future__ import annotations

from plaudit.place.asynchronous import Asynchronous
from plaudit.place.colocated import Colocated
from plaudit.place.disaggregated import Disaggregated
from plaudit.place.hybrid import Hybrid, HybridProcesses
from plaudit.place.placement import Placement, Stage
from plaudit.place.swapped import Swapped


def new_placement(stage: Stage) -> Placement:
    match stage.recipe.placement.name:
        case "colocated":
            return Colocated(stage)
        case "swapped":
            return Swapped(stage)
        case "hybrid":
            return HybridProcesses(stage) if stage.recipe.rollout_processes else Hybrid(stage)
        case "disaggregated":
            return Disaggregated(stage)
        case "async":
            return Asynchronous(stage)
