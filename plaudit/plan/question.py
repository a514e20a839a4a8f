"""What `plaudit plan` is asked, and the whole answer to it."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path

from plaudit.errors import ConfigError, nearest
from plaudit.plan.channel import find
from plaudit.plan.constants import Constants
from plaudit.plan.cost import PRICES
from plaudit.plan.hardware import Cluster, Overrides, Price, accelerator, catalogue, cluster
from plaudit.plan.model_shape import ModelShape
from plaudit.plan.plans import PLACEMENTS
from plaudit.plan.prediction import Prediction
from plaudit.plan.search import Found, Progress, Search, smallest_that_fits, some_plan_fits
from plaudit.plan.workload import Workload


@dataclass(frozen=True, slots=True)
class Question:
    workload: Workload
    clusters: tuple[Cluster, ...]
    """One, or the same nodes with each of the accelerators to compare."""
    constants: Constants = field(default_factory=Constants)
    placements: tuple[str, ...] = PLACEMENTS
    channel: str | None = None
    staleness: int = 1
    generation_cluster: Cluster | None = None
    price: str = "mid"
    ours: bool = False
    """Only plans that Plaudit's own trainer runs."""

    def answer(self, progress: Progress | None = None) -> Outcome:
        found = {}
        for place in self.clusters:
            found[place.name] = Search(
                self.workload, place, self.constants, placements=self.placements, channel=self.channel,
                staleness=self.staleness, generation_cluster=self.generation_cluster, progress=progress,
                ours=self.ours,
            ).run()  # fmt: skip
        outcome = Outcome(self, found)
        if not outcome.plans:
            raise ConfigError(self._nothing_fits(outcome))
        return outcome

    def _nothing_fits(self, outcome: Outcome) -> str:
        """One line: what comes nearest, and the smallest change that fits."""
        place = self.clusters[0]
        near = min(
            (r for found in outcome.found.values() for r in found.rejected), key=lambda r: r.factor, default=None
        )
        whose = " that Plaudit's trainer runs" if self.ours else ""
        told = f"{self.workload.model.name} fits on {place.name} in no plan{whose}"
        told += f"; nearest: {near.placement}, {near.reason}" if near else ""
        larger = smallest_that_fits(self.workload, place, self.constants, self.placements)
        roomier = _roomier(self.workload, place, self.constants, self.placements)
        ways = [f"{larger.name} ({larger.devices} devices)"] if larger else []
        ways += [roomier.name] if roomier else []
        return f"{told}; smallest change that fits: {' or '.join(ways) or 'a smaller model or shorter responses'}"


def _roomier(workload: Workload, place: Cluster, constants: Constants, placements: Sequence[str]) -> Cluster | None:
    """As many devices of the same maker with the least more memory that do."""
    now = place.accelerator
    alike = [chip for chip in catalogue().values() if chip.vendor == now.vendor and chip.memory > now.memory]
    larger = sorted(alike, key=lambda chip: chip.memory)
    tried: set[float] = set()
    for chip in larger:
        if chip.memory in tried:
            continue
        tried.add(chip.memory)
        other = replace(place, accelerator=chip)
        if some_plan_fits(workload, other, constants, placements):
            return other
    return None


@dataclass(frozen=True, slots=True)
class Outcome:
    question: Question
    found: dict[str, Found]
    """By cluster."""

    @property
    def plans(self) -> list[Prediction]:
        """Of all clusters, the fastest first."""
        return sorted((p for found in self.found.values() for p in found.plans), key=lambda p: p.step.value)

    @property
    def best(self) -> Prediction:
        return self.plans[0]

    def best_of_each(self) -> list[Prediction]:
        """The fastest plan of each cluster."""
        return [found.plans[0] for found in self.found.values() if found.plans]

    def frontier(self) -> list[Prediction]:
        """Plans that no other beats in both time and cost, the fastest first."""
        kept: list[Prediction] = []
        cheapest = float("inf")
        for plan in self.plans:
            dollars = plan.cost.step.get(self.question.price)
            value = dollars.value if dollars else float(plan.plan.devices) * plan.step.value
            if value < cheapest * (1 - 1e-9):
                kept.append(plan)
                cheapest = value
        return kept


def ask(
    model: str, hardware: str, *, algorithm: str = "grpo", prompt: float = 512, response: float = 1024,
    max_response: float = 0, batch: int = 1024, samples_per_prompt: int = 1, updates: int = 1, epochs: int = 1,
    steps: int = 1000, reward: str | None = None, critic: str | None = None, dtype: str = "bf16",
    generation_dtype: str = "", kv_dtype: str = "bf16", placements: Sequence[str] = (), channel: str | None = None,
    staleness: int = 1, generation_hardware: str | None = None, compare: Sequence[str] = (), price: str = "mid",
    hardware_file: Path | None = None, reference: bool | None = None,
) -> Question:  # fmt: skip
    """The typed question from the words of the command line."""
    overrides = Overrides.read(hardware_file) if hardware_file else None
    place = cluster(hardware, overrides)
    places = tuple(_other(place, name, overrides) for name in compare) or (place,)
    engines = cluster(generation_hardware, overrides) if generation_hardware else None
    level, fixed = _price(price)
    if fixed is not None:
        places = tuple(replace(p, accelerator=replace(p.accelerator, price=fixed)) for p in places)
        engines = replace(engines, accelerator=replace(engines.accelerator, price=fixed)) if engines else None
    if channel is not None:
        find(channel)
    if staleness < 0:
        raise ConfigError(f"staleness = {staleness}: expected zero or more updates")
    for name in placements:
        if name not in PLACEMENTS:
            raise ConfigError(f"unknown placement {name!r}; {nearest(name, PLACEMENTS)}")
    work = Workload(
        ModelShape.named(model), algorithm, prompt, response, max_response, batch, samples_per_prompt, updates, epochs,
        reference, ModelShape.named(critic) if critic else None, ModelShape.named(reward) if reward else None, dtype,
        generation_dtype, kv_dtype, steps,
    )  # fmt: skip
    constants = Constants().changed(overrides.constants) if overrides else Constants()
    return Question(work, places, constants, tuple(placements) or PLACEMENTS, channel, staleness, engines, level)


def _other(place: Cluster, name: str, overrides: Overrides | None) -> Cluster:
    """The same number of nodes and devices with another accelerator."""
    return replace(place, accelerator=accelerator(name, overrides))


def _price(text: str) -> tuple[str, Price | None]:
    if text in PRICES:
        return text, None
    try:
        dollars = float(text)
    except ValueError:
        raise ConfigError(
            f"price {text!r}: expected dollars per device and hour, or one of {', '.join(PRICES)}"
        ) from None
    if not (math.isfinite(dollars) and dollars >= 0):
        raise ConfigError(f"price {text}: expected zero or more dollars per device and hour")
    return "mid", Price(dollars, dollars, dollars, dollars, "given")
