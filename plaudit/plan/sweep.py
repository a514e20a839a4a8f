"""Scaling sweep: the same run on more nodes and on other accelerators."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from itertools import takewhile

from plaudit.errors import ConfigError, nearest
from plaudit.plan.cost.prediction import Prediction
from plaudit.plan.market import NODES
from plaudit.plan.options import PlanOptions
from plaudit.plan.question import Question
from plaudit.plan.search import SearchResult
from plaudit.plan.shape.hardware import Cluster

SWEEPS = ("nodes",)
MOST_NODES = 8
"""Default if --hardware is not given."""


@dataclass(frozen=True, slots=True)
class Point:
    """The plans of one accelerator at one node count."""

    place: Cluster
    result: SearchResult

    def best(self, ours: bool) -> Prediction | None:
        """The fastest plan of our trainer, or of any software."""
        plans = [p for p in self.result.plans if p.runnable or not ours]
        return min(plans, key=lambda p: p.step.value, default=None)


@dataclass(frozen=True, slots=True)
class Sweep:
    question: Question
    points: tuple[Point, ...]

    def row(self, point: Point, ours: bool) -> Row | None:
        best = point.best(ours)
        return Row(point.place, best, self._gain(best, ours), self.question.price) if best else None

    def _gain(self, best: Prediction, ours: bool) -> float:
        """Speedup per device over the smallest cluster of the same accelerator that fits."""
        chip = best.plan.cluster.accelerator
        alike = [p for p in self.points if p.place.accelerator == chip and p.best(ours)]
        first = alike[0].best(ours)
        assert first is not None
        return first.step.value * alike[0].place.devices / (best.step.value * best.plan.devices)

    def rows(self, ours: bool) -> list[Row]:
        return [row for point in self.points if (row := self.row(point, ours))]

    @property
    def headline(self) -> str:
        """The fastest and the cheapest plan with any software."""
        rows = self.rows(ours=False)
        fastest = min(rows, key=lambda row: row.prediction.step.value)
        line = f"Fastest: {fastest.place.name}, {fastest.prediction.step.value:.3g} s a step"
        priced = [row for row in rows if row.million_tokens is not None]
        if not priced:
            return line
        cheapest = min(priced, key=lambda row: row.million_tokens or 0.0)
        cost = f"${cheapest.million_tokens:.3g} per million tokens"
        return f"{line}. Cheapest: {cheapest.place.name}, {cost} at {cheapest.prediction.step.value:.3g} s a step"


@dataclass(frozen=True, slots=True)
class Row:
    place: Cluster
    prediction: Prediction
    efficiency: float
    price: str

    @property
    def million_tokens(self) -> float | None:
        term = self.prediction.cost.million_tokens.get(self.price)
        return term.value if term else None

    @property
    def hourly(self) -> float | None:
        return self.place.hourly(self.price)


def check_sweep(options: PlanOptions) -> None:
    """Refuse options that do not combine with --sweep or --utilisation."""
    if options.sweep is not None and options.sweep not in SWEEPS:
        raise ConfigError(f"unknown sweep {options.sweep!r}; {nearest(options.sweep, SWEEPS)}")
    if options.sweep and options.utilisation:
        raise ConfigError("--sweep and --utilisation are two tables: ask for one at a time")
    flag = "--sweep" if options.sweep else "--utilisation"
    others = {"--budget": options.budget, "--deadline": options.deadline, "--goal": options.goal,
              "--explain": options.explain, "--page": options.page,
              "--generation-hardware": options.generation_hardware}  # fmt: skip
    for name, value in others.items():
        if value is not None:
            raise ConfigError(f"{flag} is a table of its own: leave out {name}")


def sweep(question: Question, hardware: str | None) -> Sweep:
    """Plan on 1, 2, 3, 4, 6, 8, ... nodes, up to those of `hardware`, for each accelerator."""
    points = []
    for place in question.clusters:
        points += [Point(size, question.plans_on(size)) for size in _sizes(place, hardware)]
    if not any(point.result.plans for point in points):
        names = ", ".join(dict.fromkeys(chip.name for chip in question.chips))
        most = max(point.place.nodes for point in points)
        raise ConfigError(f"{question.workload.model.name} fits on none of {names} up to {most} nodes; give more nodes "
                          f"with --hardware, such as {4 * most}x{points[0].place.devices_per_node}x"
                          f"{points[0].place.accelerator.name}")  # fmt: skip
    return Sweep(question, tuple(points))


def _sizes(place: Cluster, hardware: str | None) -> Sequence[Cluster]:
    most = place.nodes if hardware else MOST_NODES * place.nodes
    # Trays of four are counted in pairs, as many devices as a node of eight.
    unit = 2 if place.devices_per_node == 4 and place.nodes % 2 == 0 else 1
    counts = {*takewhile(lambda n: n * unit <= most, NODES), most // unit}
    return [replace(place, nodes=n * unit) for n in sorted(counts)]
