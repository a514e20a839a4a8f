"""Recommends a method: looks up the cells measured by benchmarks/search_when.py (when.json, docs/search-when.md) for
given steps, accuracy and AUC."""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import cache
from importlib.resources import files
from typing import Any

from plaudit.config.search import GroundTable, SearchRecipe, SearchRuleTable

BEST_OF_N = "best-of-n"


@dataclass(frozen=True, slots=True)
class Advice:
    """cell   of the table, as named by `cell_name`; None outside of the table"""

    method: str
    why: str
    cell: str | None = None


def advise(ground: GroundTable, width: int) -> Advice:
    """The method of the nearest cell; outside of the measured range best-of-n, which is always safe."""
    at = {"steps": ground.steps, "accuracy": ground.accuracy, "auc": ground.auc, "width": float(width)}
    if outside := [f"{name} {at[name]:.3g}" for name in at if not _covered(name, at[name])]:
        return Advice(BEST_OF_N, f"the table has nothing near {' and '.join(outside)}: best-of-n, as without a table")
    cell = min(read_table()["cells"], key=lambda cell: math.dist(_place(cell), _place(at)))
    method, reached = cell["use"], cell["methods"]
    named = cell_name(cell)
    exact = all(math.isclose(at[name], cell[name]) for name in at)
    why = f"{'the' if exact else 'the nearest'} cell of the table ({named}) says {method}"
    if method == BEST_OF_N:
        return Advice(method, f"{why}: no tree was ahead there by more than its 95 % interval", named)
    ahead = reached[method]
    return Advice(method, f"{why}, {ahead['lead']:+.3f} ± {ahead['interval']:.3f} right over best-of-n", named)


def following(recipe: SearchRecipe, method: str) -> SearchRecipe:
    """The recipe with this method. Keys at their default take the values that the table was measured with."""
    usual = SearchRuleTable().model_dump()
    given = {name: value for name, value in recipe.search.model_dump().items() if value != usual[name]}
    tree = {**recipe.model_dump(), "search": {**read_table()["keys"][method], **given, "method": method}}
    tree["search"].pop("ground", None)
    return SearchRecipe.model_validate(tree)


def cell_name(cell: Mapping[str, Any]) -> str:
    return f"{cell['steps']:g} steps, {cell['accuracy']:.0%} right, AUC {cell['auc']:g}, width {cell['width']:g}"


@cache
def read_table() -> dict[str, Any]:
    table: dict[str, Any] = json.loads((files("plaudit.search") / "when.json").read_text())
    return table


# In these coordinates the cells are about 1 apart: what is twice as much matters for steps and widths, and odds for
# shares.
_AXES: Mapping[str, Callable[[float], float]] = {
    "steps": lambda value: math.log(value) / math.log(3),
    "accuracy": lambda value: math.log(value / (1 - value)) / 2.1 if 0 < value < 1 else math.copysign(99, value - 0.5),
    "auc": lambda value: value / 0.1,
    "width": lambda value: math.log(value) / math.log(4),
}


def _place(at: Mapping[str, Any]) -> tuple[float, ...]:
    return tuple(axis(at[name]) for name, axis in _AXES.items())


def _covered(name: str, value: float) -> bool:
    """Whether a value is covered: a cell at the edge extends outwards by half the distance to its neighbour."""
    places = sorted({_AXES[name](cell[name]) for cell in read_table()["cells"]})
    low = places[0] - (places[1] - places[0]) / 2
    high = places[-1] + (places[-1] - places[-2]) / 2
    return low <= _AXES[name](value) <= high
