"""Prediction errors against published measurements, by quantity, accelerator, model and placement.

data/residuals.csv has a row per measurement, written by benchmarks/planner_validation.py with constants fitted without
the measurement's group.
"""

from __future__ import annotations

import csv
import math
import statistics
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cache
from pathlib import Path

from plaudit.plan.cost.prediction import Prediction
from plaudit.plan.shape.hardware import Accelerator
from plaudit.plan.shape.model_shape import ModelShape

DATA = Path(__file__).parent / "data" / "residuals.csv"
KINDS = {
    "step": "step time",
    "generation": "generation",
    "training": "training",
    "weights": "weight transfer",
    "memory": "peak memory",
}
FAMILIES = {
    "Ampere": ("A100", "A800"), "Hopper": ("H100", "H200", "H800", "H20"), "Ada": ("L40S", "RTX 4090"),
    "Blackwell": ("B200", "B300", "GB200", "GB300", "RTX PRO 6000"), "CDNA": ("MI3",), "TPU": ("TPU",),
}  # fmt: skip
FEWEST = 5
"""Minimum number of rows of a cell; with fewer, neighbouring cells are included."""
COLUMNS = ("kind", "family", "model", "placement", "error")


def family(chip: Accelerator) -> str:
    """Architecture family of an accelerator; one that is not listed is a family of its own."""
    return next((name for name, begins in FAMILIES.items() if chip.name.startswith(begins)), chip.name)


def model_class(model: ModelShape) -> str:
    return "experts" if model.experts else "dense"


def placement_class(shared: bool) -> str:
    return "together" if shared else "apart"


@dataclass(frozen=True, slots=True)
class Residual:
    """One measurement: planned over measured seconds or bytes, minus one."""

    kind: str
    family: str
    model: str
    placement: str
    """together or apart for a step; otherwise empty."""
    error: float


@dataclass(frozen=True, slots=True)
class ErrorBar:
    kind: str
    median: float
    p90: float
    bias: float
    """Median of the signed errors: below zero the planner is too fast."""
    rows: int
    of: str
    """Description of the measurements."""
    extrapolated: bool
    """Whether none of them is on this accelerator family."""

    def __str__(self) -> str:
        mark = "extrapolated, " if self.extrapolated else ""
        return (f"{KINDS[self.kind]} ±{self.median:.0%}, 90th percentile {self.p90:.0%} "
                f"({mark}{self.rows} rows, {self.of})")  # fmt: skip


@cache
def residuals() -> tuple[Residual, ...]:
    with DATA.open(newline="", encoding="utf-8") as file:
        return tuple(Residual(r["kind"], r["family"], r["model"], r["placement"], float(r["error"]))
                     for r in csv.DictReader(file))  # fmt: skip


def error_bars(prediction: Prediction) -> list[ErrorBar]:
    """Error bars of each quantity, over the measurements most similar to the plan."""
    plan, model = prediction.plan, model_class(prediction.workload.model)
    where = {
        "generation": plan.generation_cluster.accelerator,
        **dict.fromkeys(("training", "memory", "weights", "step"), plan.cluster.accelerator),
    }
    # If generation and training differ in accelerator, a step uses the one without measurements.
    known = {row.family for row in residuals() if row.kind == "step"}
    if family(plan.generation_cluster.accelerator) not in known:
        where["step"] = plan.generation_cluster.accelerator
    placed = {"step": placement_class(plan.shared)}
    return [bar(kind, family(where[kind]), model, placed.get(kind, "")) for kind in KINDS]


@cache
def bar(kind: str, chip: str, model: str, placement: str) -> ErrorBar:
    """Error bar over measurements like the plan in all respects; with fewer than five, over any placement, then any
    model, then any accelerator, which is an extrapolation."""
    rows = [row for row in residuals() if row.kind == kind]
    here = [row for row in rows if row.family == chip]
    alike = [row for row in here if row.model == model]
    same = [row for row in alike if row.placement == placement]
    where = {"together": "on shared devices", "apart": "in pools"}.get(placement, "")
    for nearest, of in ((same, f"{chip}, {model}{', ' if where else ''}{where}"), (alike, f"{chip}, {model}"),
                        (here, f"{chip}, any model")):  # fmt: skip
        if len(nearest) >= FEWEST or (nearest and nearest is here):
            return _bar(kind, nearest, of, False)
    return _bar(kind, rows, "other accelerators", True)


def _bar(kind: str, rows: Sequence[Residual], of: str, extrapolated: bool) -> ErrorBar:
    sizes = sorted(abs(row.error) for row in rows)
    p90 = sizes[math.ceil(0.9 * len(sizes)) - 1]
    bias = statistics.median(row.error for row in rows)
    return ErrorBar(kind, statistics.median(sizes), p90, bias, len(rows), of, extrapolated)
