"""The placement that a recipe names."""

from __future__ import annotations

from plaudit.place.colocated import Colocated
from plaudit.place.placement import Placement, Stage


def new_placement(stage: Stage) -> Placement:
    return Colocated(stage)
