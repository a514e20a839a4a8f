"""The placement that a recipe names."""

from __future__ import annotations

from plaudit.place.colocated import Colocated
from plaudit.place.placement import Placement, Stage
from plaudit.place.swapped import Swapped


def new_placement(stage: Stage) -> Placement:
    match stage.recipe.placement.name:
        case "colocated":
            return Colocated(stage)
        case "swapped":
            return Swapped(stage)
