"""The question of a `plaudit plan` call and its full answer."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace

from plaudit.errors import ConfigError, nearest
from plaudit.plan.cost.channel import find
from plaudit.plan.cost.decode import Replica
from plaudit.plan.cost.parts import OWN_ENGINE_SHARE, Parts
from plaudit.plan.cost.plans import PLACEMENTS, SHARED, Plan
from plaudit.plan.cost.prediction import Prediction, default_channel, predict_plan
from plaudit.plan.options import PlanOptions
from plaudit.plan.own_trainer import CHANNEL, CHANNELS, own_constants, unsupported
from plaudit.plan.search import (
    Progress,
    Search,
    SearchResult,
    generation_layouts,
    smallest_that_fits,
    some_plan_fits,
)
from plaudit.plan.shape.constants import Constants
from plaudit.plan.shape.hardware import PRICES, Accelerator, Cluster, Overrides, Price, accelerator, catalogue, cluster
from plaudit.plan.shape.layouts import GenerationLayout
from plaudit.plan.shape.model_shape import ModelShape
from plaudit.plan.shape.workload import Workload

NONE = "a smaller model or shorter responses"
HARDWARE = "1x8xH100"
SMALLEST = "smollm2-135m"
"""Placeholder for a recipe's model until the recipe is read."""


@dataclass(frozen=True, slots=True)
class Question:
    workload: Workload
    clusters: tuple[Cluster, ...]
    """One cluster, or the same nodes with each of the accelerators to compare."""
    constants: Constants = field(default_factory=Constants)
    placements: tuple[str, ...] = PLACEMENTS
    channel: str | None = None
    staleness: int = 1
    generation_cluster: Cluster | None = None
    price: str = "mid"

    @property
    def chips(self) -> list[Accelerator]:
        """All accelerators that the plan pays for."""
        return [place.accelerator for place in (*self.clusters, self.generation_cluster) if place is not None]

    @property
    def price_basis(self) -> str:
        """Source and date of the prices, and for accelerators without one a level that has them."""
        if all(chip.price.source == "given" for chip in self.chips):
            return "prices as given"
        basis = f"prices: {PRICES[self.price]} (--price {self.price})"
        silent = list(dict.fromkeys(chip.name for chip in self.chips if chip.price.at(self.price) is None))
        return f"{basis}; none is public for {', '.join(silent)}: {self.other_price()}" if silent else basis

    def other_price(self) -> str:
        levels = [level for level in PRICES if all(chip.price.at(level) is not None for chip in self.chips)]
        if levels:
            return f"take --price {' or '.join(levels)}"
        return "give dollars per device and hour with --price, or a price for each in a --hardware-file"

    def check_price(self) -> None:
        """Raise an error if no accelerator has a price at the requested level; no other level replaces it."""
        if self.price != "mid" and all(chip.price.at(self.price) is None for chip in self.chips):
            names = ", ".join(dict.fromkeys(chip.name for chip in self.chips))
            raise ConfigError(f"--price {self.price}: no such price of {names} is public; {self.other_price()}")

    def answer(self, progress: Progress | None = None) -> Outcome:
        results, own = {}, {}
        for place in self.clusters:
            own[place.name] = self._search(place, progress, ours=True)
            results[place.name] = _merged(own[place.name], self._search(place, progress, ours=False))
        cure = ""
        if not any(p.runnable for of in results.values() for p in of.plans):
            if not any(of.plans for of in results.values()):
                nearest = self._nearest(results)
                raise NothingFits(self._nothing_fits(nearest), Outcome(self, results, nearest=nearest))
            cure = self._cure(own)
        return Outcome(self, results, cure)

    def plans_on(self, place: Cluster) -> SearchResult:
        """Plans on a cluster with any software, including our trainer."""
        return _merged(self._search(place, None, ours=True), self._search(place, None, ours=False))

    def plans_of_others(self, place: Cluster) -> SearchResult:
        """Plans on a cluster with other software, including those that our trainer can run too."""
        return self._search(place, None, ours=False)

    def _search(self, place: Cluster, progress: Progress | None, ours: bool) -> SearchResult:
        """Search plans of our trainer with its own constants, or of any software."""
        return Search(
            replace(self.workload, plain=ours), place, own_constants(self.constants) if ours else self.constants,
            placements=self.placements, channel=self.channel, staleness=self.staleness,
            generation_cluster=self.generation_cluster, progress=progress, ours=ours,
        ).run()  # fmt: skip

    def _nothing_fits(self, nearest: Prediction | None) -> str:
        """One line: the closest plan and the smallest change that fits."""
        place = self.clusters[0]
        problem = f"{self.workload.model.name} fits on {place.name} in no plan"
        if nearest is not None:
            worst = max(nearest.shortages, key=lambda shortage: shortage.factor)
            problem += f"; nearest: {nearest.plan.placement}, {worst}"
        any_software, own = self._smallest_change(ours=False), ""
        if not unsupported(self.workload) and (ours := self._smallest_change(ours=True)) not in (any_software, NONE):
            own = f", and that Plaudit's own trainer runs: {ours}"
        return f"{problem}; smallest change that fits: {any_software}{own}"

    def _nearest(self, results: Mapping[str, SearchResult]) -> Prediction | None:
        """The closest plan with the engines of the smallest shortage, predicted as if it fitted."""
        best: tuple[tuple[float, int], Plan] | None = None
        for rejected in (r for result in results.values() for r in result.rejected):
            for generation in generation_layouts(self.workload, rejected.plan.generation_cluster):
                plan = replace(rejected.plan, placement=rejected.placement, generation=generation)
                plan = replace(plan, channel=self.channel or default_channel(plan, self.workload))
                lacks = Parts(self.workload, plan, self.constants).capacity().shortages
                # A layout may have been rejected for one side only: here both sides are counted.
                rank = (max((lack.factor for lack in lacks), default=math.inf), len(lacks))
                if best is None or rank < best[0]:
                    best = rank, plan
        return predict_plan(self.workload, best[1], self.constants, simulate=False) if best else None

    def _cure(self, own: Mapping[str, SearchResult]) -> str:
        """If plans fit but our trainer runs none: the reason and the smallest change with which it runs one."""
        if lacks := unsupported(self.workload):
            return "; ".join(f"it has no {name}: {cure}" for name, cure in lacks.items())
        if self.channel not in (None, *CHANNELS) and not set(self.placements) & set(SHARED):
            return f"it has no {self.channel} channel: take --channel {CHANNEL}"
        place, work = self.clusters[0], self.workload
        why = _nearest(own).removeprefix("; ")
        if place.devices == 1 and not self._one_device_holds_the_weights(place):
            size = self._engine(place).weight_bytes()
            why = (f"its engine has one device, and {work.model.name} takes {size / 1e9:.1f} GB of the "
                   f"{OWN_ENGINE_SHARE * place.accelerator.memory / 1e9:.1f} GB that it may use there")  # fmt: skip
        return f"{why}; smallest change that it runs: {self._smallest_change(ours=True)}"

    def _smallest_change(self, ours: bool) -> str:
        place, constants = self.clusters[0], own_constants(self.constants) if ours else self.constants
        work = replace(self.workload, plain=ours)
        larger = smallest_that_fits(work, place, constants, self.placements, ours)
        roomier = _roomier(work, place, constants, self.placements, ours)
        ways = [f"{larger.name} ({larger.devices} devices)"] if larger else []
        ways += [roomier.name] if roomier else []
        return " or ".join(ways) or NONE

    def _engine(self, place: Cluster) -> Replica:
        """An engine on one device."""
        work = self.workload
        return Replica(work.model, place, GenerationLayout(), work.engine_dtype, work.kv_dtype, self.constants)

    def _one_device_holds_the_weights(self, place: Cluster) -> bool:
        return self._engine(place).weight_bytes() < OWN_ENGINE_SHARE * place.accelerator.memory


def _merged(own: SearchResult, others: SearchResult) -> SearchResult:
    """Our trainer's plans first, then those of other software that our trainer cannot run."""
    fitting = {p.plan.placement for p in own.plans}
    return SearchResult(
        (*own.plans, *(p for p in others.plans if not p.runnable)),
        tuple(r for r in others.rejected if r.placement not in fitting), own.tried + others.tried,
    )  # fmt: skip


def _nearest(results: Mapping[str, SearchResult]) -> str:
    near = min((r for of in results.values() for r in of.rejected), key=lambda r: r.factor, default=None)
    return f"; nearest: {near.placement}, {near.reason}" if near else ""


def _roomier(
    workload: Workload, place: Cluster, constants: Constants, placements: Sequence[str], ours: bool
) -> Cluster | None:
    """The same number of devices by the same vendor, with the least additional memory that suffices."""
    now = place.accelerator
    alike = [chip for chip in catalogue().values() if chip.vendor == now.vendor and chip.memory > now.memory]
    larger = sorted(alike, key=lambda chip: chip.memory)
    tried: set[float] = set()
    for chip in larger:
        if chip.memory in tried:
            continue
        tried.add(chip.memory)
        other = place.of(chip)
        if some_plan_fits(workload, other, constants, placements, ours):
            return other
    return None


@dataclass(frozen=True, slots=True)
class Outcome:
    question: Question
    results: dict[str, SearchResult]
    """By cluster name."""
    cure: str = ""
    """If Plaudit's trainer runs none of the plans: the reason and the change needed."""
    nearest: Prediction | None = None
    """If nothing fits: the closest plan, with its predicted numbers."""

    @property
    def runnable(self) -> list[Prediction]:
        """Plans that Plaudit's own trainer can run, of all clusters, fastest first."""
        return self._ranked(True)

    @property
    def others(self) -> list[Prediction]:
        """Plans that it cannot run, fastest first."""
        return self._ranked(False)

    def _ranked(self, runnable: bool) -> list[Prediction]:
        plans = (p for result in self.results.values() for p in result.plans if p.runnable is runnable)
        return sorted(plans, key=lambda p: p.step.value)

    def kinds_of_others(self) -> list[tuple[Prediction, int]]:
        """The other plans grouped by missing features: the fastest of each group and the group's size."""
        kinds: dict[tuple[str, ...], list[Prediction]] = {}
        for prediction in self.others:
            kinds.setdefault(prediction.missing, []).append(prediction)
        return [(alike[0], len(alike)) for alike in kinds.values()]

    @property
    def plans(self) -> list[Prediction]:
        """All plans, runnable ones first."""
        return self.runnable + self.others

    @property
    def best(self) -> Prediction:
        """The first plan; if nothing fits, the closest."""
        return self.plans[0] if self.plans else self.nearest  # type: ignore[return-value]

    @property
    def headline(self) -> str:
        """One line: our trainer's best step time and the gain of other software, or why our trainer cannot run."""
        runnable, others = self.runnable, self.others
        if self.nearest is not None:
            return f"Nothing fits. Nearest: {self.nearest.plan} on {self.nearest.plan.hardware}"
        if not runnable:
            return f"Plaudit's own trainer runs none of these plans; {self.cure}"
        best = runnable[0]
        line = f"Plaudit's trainer takes {best.step.value:.3g} s a step on {best.plan.hardware}: {best.plan}"
        if others and others[0].step.value < best.step.value:
            gain = best.step.value / others[0].step.value
            line += f". {gain:.2f} times as fast with other software: {others[0].plan.placement}, "
            line += f"for which ours lacks {', '.join(others[0].missing)}"
        return line

    def best_of_each(self, runnable: bool = False) -> list[Prediction]:
        """The fastest plan of each cluster that has one: with our trainer if `runnable`, else with any software."""
        plans = ([p for p in result.plans if p.runnable or not runnable] for result in self.results.values())
        return [min(of, key=lambda p: p.step.value) for of in plans if of]

    def frontier(self) -> list[Prediction]:
        """Pareto frontier of step time and cost, fastest first: of the runnable plans if there are any."""
        kept: list[Prediction] = []
        cheapest = float("inf")
        price, plans = self.question.price, self.runnable or self.others
        priced = all(price in plan.cost.step for plan in plans)
        for plan in plans:
            value = plan.cost.step[price].value if priced else float(plan.plan.devices) * plan.step.value
            if value < cheapest * (1 - 1e-9):
                kept.append(plan)
                cheapest = value
        return kept


class NothingFits(ConfigError):
    """No plan fits; `outcome` has the closest one with its numbers."""

    def __init__(self, message: str, outcome: Outcome) -> None:
        super().__init__(message)
        self.outcome = outcome


def ask(options: PlanOptions) -> Question:
    """Build the `Question` from the command-line options."""
    overrides = Overrides.read(options.hardware_file) if options.hardware_file else None
    place = cluster(options.hardware or HARDWARE, overrides)
    compared = filter(None, (options.compare or "").split(","))
    places = tuple(_other(place, name, overrides) for name in compared) or (place,)
    engines = cluster(options.generation_hardware, overrides) if options.generation_hardware else None
    level, fixed = _price(options.price)
    power = check_power_price(options.power_price, fixed is not None)
    if fixed is not None:
        places = tuple(replace(p, accelerator=priced(p.accelerator, fixed, power)) for p in places)
        engines = replace(engines, accelerator=priced(engines.accelerator, fixed, power)) if engines else None
    if options.channel is not None:
        find(options.channel)
    if options.staleness < 0:
        raise ConfigError(f"staleness = {options.staleness}: expected zero or more updates")
    for name in options.placement:
        if name not in PLACEMENTS:
            raise ConfigError(f"unknown placement {name!r}; {nearest(name, PLACEMENTS)}")
    work = _workload(options)
    constants = Constants().changed(overrides.constants) if overrides else Constants()
    placements = tuple(options.placement) or PLACEMENTS
    question = Question(work, places, constants, placements, options.channel, options.staleness, engines, level)
    question.check_price()
    return question


def _workload(options: PlanOptions) -> Workload:
    return Workload(
        ModelShape.named(options.model or SMALLEST), options.algorithm,
        512 if options.prompt is None else options.prompt, 1024 if options.response is None else options.response,
        options.max_response, options.batch, options.samples, options.updates, options.epochs, dtype=options.dtype,
        generation_dtype=options.generation_dtype, kv_dtype=options.kv_dtype, steps=options.steps,
        lora_rank=options.lora,
        critic=ModelShape.named(options.critic) if options.critic else None,
        reward=ModelShape.named(options.reward) if options.reward else None,
    )  # fmt: skip


def _other(place: Cluster, name: str, overrides: Overrides | None) -> Cluster:
    """The same number of devices with another accelerator."""
    return place.of(accelerator(name, overrides))


def check_power_price(dollars: float | None, fixed: bool) -> float:
    """$ per kWh. Refused with public prices, which include power already."""
    if dollars is None:
        return 0.0
    if not (math.isfinite(dollars) and dollars >= 0):
        raise ConfigError(f"power price {dollars}: expected zero or more dollars per kWh")
    if not fixed:
        raise ConfigError(
            f"--power-price {dollars:g} goes with a price of yours, such as --price 1.10: public prices, also the "
            "owned one, have power in them"
        )
    return dollars


def priced(chip: Accelerator, dollars: float, power_price: float) -> Accelerator:
    """The accelerator at a given price per hour plus the cost of its power."""
    if power_price and not chip.power:
        raise ConfigError(f"--power-price: nothing is known of the power of {chip.name}; give it power_w in a "
                          "--hardware-file")  # fmt: skip
    return replace(chip, price=Price.given(dollars + power_price * chip.power / 1e3))


def _price(text: str) -> tuple[str, float | None]:
    """The price level, and dollars if given as a number."""
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
    return "mid", dollars
