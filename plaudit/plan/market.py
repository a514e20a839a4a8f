"""What to rent: accelerator, count and placement for a budget, a deadline and a goal, at one price level."""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace

from plaudit.errors import ConfigError, nearest
from plaudit.plan.cost.prediction import Prediction
from plaudit.plan.options import PlanOptions
from plaudit.plan.question import Outcome, Question, ask
from plaudit.plan.search import SearchResult
from plaudit.plan.shape.hardware import (
    GB,
    HOST_GB_PER_GPU,
    PRICES,
    Accelerator,
    Cluster,
    Overrides,
    accelerator,
    catalogue,
)

GOALS = ("cost", "time", "energy")
NODES = (1, 2, 3, 4, 6, 8, 12, 16, 24, 32, 48, 64)
"""Node counts that are tried."""


@dataclass(frozen=True, slots=True)
class Offer:
    """A plan with the time and cost of the whole run."""

    prediction: Prediction
    level: str

    @property
    def place(self) -> Cluster:
        """All devices of the plan; its pools are parts of one cluster."""
        plan = self.prediction.plan
        return plan.cluster if plan.shared else plan.cluster.part(plan.devices)

    @property
    def chip(self) -> Accelerator:
        return self.prediction.plan.cluster.accelerator

    @property
    def hours(self) -> float:
        return self.prediction.step.value * self.prediction.workload.steps / 3600

    def _dollars(self, price: float) -> float:
        return price * self.prediction.plan.devices * self.hours

    @property
    def hourly(self) -> float:
        return (self.chip.price.at(self.level) or 0.0) * self.prediction.plan.devices

    @property
    def dollars(self) -> float:
        return self.hourly * self.hours

    @property
    def range(self) -> tuple[float, float] | None:
        """Dollars of the run at the lowest and the highest source of the price."""
        ends = self.chip.price.range(self.level)
        return (self._dollars(ends[0]), self._dollars(ends[1])) if ends else None

    @property
    def kwh(self) -> float:
        return self.chip.power * self.prediction.plan.devices * self.hours / 1e3

    def by(self, goal: str) -> float:
        if goal == "energy":
            return self.kwh or math.inf
        return self.dollars if goal == "cost" else self.hours


@dataclass(frozen=True, slots=True)
class Market:
    question: Question
    """The question for the first accelerator; the others differ only in hardware."""
    chips: tuple[Accelerator, ...]
    """Accelerators with a price at the requested level."""
    silent: tuple[str, ...]
    """Names of the accelerators without one."""
    goal: str
    budget: float = math.inf
    """Dollars per hour."""
    deadline: float = math.inf
    """Hours."""
    host_memory: float | None = None
    """Per node, if given."""

    @property
    def level(self) -> str:
        return self.question.price

    def answer(self) -> Choice:
        affordable = {chip: sizes for chip in self.chips if (sizes := list(self.sizes(chip, self.budget)))}
        if not affordable:
            cheapest = min(self.chips, key=self._price)
            raise ConfigError(f"--budget {self.budget:g}/h buys nothing: one {cheapest.name} is the cheapest device at "
                              f"${self._price(cheapest):g}/h ({PRICES[self.level]}); raise --budget to "
                              f"{self._price(cheapest):g}/h or more")  # fmt: skip
        results: dict[Cluster, SearchResult] = {}
        for sizes in affordable.values():
            for place in self._tried(sizes, results):
                results.setdefault(place, self.question.plans_on(place))
        offers = [Offer(p, self.level) for result in results.values() for p in result.plans]
        if not offers:
            raise ConfigError(self._nothing_fits())
        in_time = [offer for offer in offers if offer.hours <= self.deadline]
        if not in_time:
            raise ConfigError(self._too_slow(min(offers, key=lambda offer: offer.hours)))
        tried = sum(result.tried for result in results.values())
        return Choice(self, self._best(in_time, True), self._best(in_time, False), results, tried)

    def _price(self, chip: Accelerator) -> float:
        price = chip.price.at(self.level)
        assert price is not None, "chips without a price are left out"
        return price

    def sizes(self, chip: Accelerator, budget: float) -> Iterator[Cluster]:
        """Clusters of the accelerator within the budget, smallest first."""
        host = self.host_memory or HOST_GB_PER_GPU * GB * chip.node
        node = Cluster(chip, 1, chip.node, host)
        parts = [
            replace(node, devices_per_node=n, host_memory=host * n / chip.node) for n in (1, 2, 4) if n < chip.node
        ]
        most = math.floor(budget / (self._price(chip) * chip.node)) if math.isfinite(budget) and budget else NODES[-1]
        nodes = sorted({n for n in (*NODES, min(most, NODES[-1])) if 0 < n <= most})
        for place in (*parts, *(replace(node, nodes=n) for n in nodes)):
            if (place.hourly(self.level) or 0.0) <= budget:
                yield place

    def _tried(self, sizes: Sequence[Cluster], results: dict[Cluster, SearchResult]) -> Iterator[Cluster]:
        """Cluster sizes to search.

        For goal time: the largest, and the largest power of two, which shards more evenly. For cost and energy: from
        the smallest size that fits up to the first that meets the deadline, and one more.
        """
        if self.goal == "time":
            even = [place for place in sizes if place.devices & (place.devices - 1) == 0]
            yield from dict.fromkeys((*even[-1:], sizes[-1]))
            return
        needed, more, before = 0.0, 1, math.inf
        for place in sizes:
            if place.devices < needed and place is not sizes[-1]:
                continue
            yield place
            plans = [Offer(p, self.level) for p in results[place].plans]
            if not plans:
                continue
            # Continue while our trainer or other software misses the deadline; whichever is closer sets the next size.
            kinds = [[offer.hours for offer in plans if offer.prediction.runnable], [offer.hours for offer in plans]]
            late = [min(hours) for hours in kinds if hours and min(hours) > self.deadline]
            if not late:
                more -= 1
                if more < 0:
                    return
            elif sum(late) > 0.95 * before:
                return  # more devices no longer help
            else:  # speedup is linear at best
                needed, before = place.devices * min(late) / self.deadline, sum(late)

    def _best(self, offers: list[Offer], runnable: bool) -> list[Offer]:
        """The best offer of each accelerator by the goal, with our trainer or with any software."""
        best: dict[str, Offer] = {}
        for offer in offers:
            if offer.prediction.runnable or not runnable:
                rival = best.get(offer.chip.name)
                if rival is None or (offer.by(self.goal), offer.dollars) < (rival.by(self.goal), rival.dollars):
                    best[offer.chip.name] = offer
        return sorted(best.values(), key=lambda offer: (offer.by(self.goal), offer.dollars))

    def _nothing_fits(self) -> str:
        """Error text, with the cheapest cluster that fits."""
        model = self.question.workload.model.name
        problem = f"{model} fits on nothing that --budget {self.budget:g}/h buys" if math.isfinite(self.budget) else (
            f"{model} fits on none of {', '.join(chip.name for chip in self.chips)} up to {NODES[-1]} nodes"
        )  # fmt: skip
        larger = [place for chip in self.chips for place in self.sizes(chip, math.inf)]
        dearer = sorted(larger, key=lambda place: place.hourly(self.level) or 0.0)
        for place in dearer if math.isfinite(self.budget) else ():
            hourly = place.hourly(self.level) or 0.0
            if hourly > self.budget and self.question.plans_on(place).plans:
                return f"{problem}; the cheapest on which it fits is {place.name}: raise --budget to {hourly:.4g}/h"
        return f"{problem}; take a smaller model, shorter responses or --lora"

    def _too_slow(self, fastest: Offer) -> str:
        steps = fastest.prediction.workload.steps
        limit = f" for ${self.budget:g}/h" if math.isfinite(self.budget) else ""
        cures = [f"--deadline {math.ceil(fastest.hours)}h", f"--steps {int(steps * self.deadline / fastest.hours)}"]
        cures += [f"a --budget above {self.budget:g}/h"] if limit else []
        return (f"--deadline {self.deadline:g}h: {steps} steps take {fastest.hours:.1f} h at least{limit}, on "
                f"{fastest.place.name}; take {' or '.join(cures)}")  # fmt: skip


@dataclass(frozen=True, slots=True)
class Choice:
    market: Market
    runnable: list[Offer]
    """The best offer of each accelerator with Plaudit's own trainer, best first."""
    any_software: list[Offer]
    results: dict[Cluster, SearchResult]
    tried: int

    @property
    def first(self) -> Offer:
        return (self.runnable or self.any_software)[0]

    @property
    def outcome(self) -> Outcome:
        """All plans on the cluster of the first offer."""
        place = next(p for p, result in self.results.items() if any(self.first.prediction is q for q in result.plans))
        question = replace(self.market.question, clusters=(place,))
        return Outcome(question, {place.name: self.results[place]})

    @property
    def headline(self) -> str:
        best = self.first
        aim = {"cost": "Cheapest", "time": "Fastest", "energy": "Least energy"}[self.market.goal]
        limits = [f"for at most ${self.market.budget:g}/h"] if math.isfinite(self.market.budget) else []
        limits += [f"within {self.market.deadline:g} h"] if math.isfinite(self.market.deadline) else []
        who = "Plaudit's own trainer" if best.prediction.runnable else "other software, since ours has no such plan"
        return (f"{aim}{' ' if limits else ''}{' and '.join(limits)}: {best.place.name}, {best.prediction.plan}, "
                f"with {who}: {best.prediction.workload.steps} steps in {best.hours:.1f} h for ${best.dollars:,.0f}"
                )  # fmt: skip

    @property
    def basis(self) -> str:
        """Source and date of the prices, and accelerators without one."""
        market = self.market
        if all(chip.price.source == "given" for chip in market.chips):
            return "prices as given"
        text = f"prices: {PRICES[market.level]} (--price {market.level})"
        ranged = any(chip.price.range(market.level) for chip in market.chips)
        text += "; ranges: lowest and highest source" if ranged else "; one source"
        silent = f"; left out for want of such a price: {', '.join(market.silent)}" if market.silent else ""
        return text + silent


def market(options: PlanOptions) -> Market:
    """Build the `Market` from the command-line options."""
    if options.hardware or options.generation_hardware:
        given = "--hardware" if options.hardware else "--generation-hardware"
        raise ConfigError(f"{given} is hardware that you have, and --budget, --deadline and --goal recommend what to "
                          f"rent: remove {given}, or those; --compare limits the accelerators")  # fmt: skip
    budget, deadline = _budget(options.budget), _deadline(options.deadline)
    goal = options.goal or ("cost" if math.isfinite(deadline) else "time")
    if goal not in GOALS:
        raise ConfigError(f"unknown goal {goal!r}; {nearest(goal, GOALS)}")
    if goal == "time" and not math.isfinite(budget):
        raise ConfigError("--goal time without --budget has no end: more devices are faster; give --budget 60/h, or "
                          "take --goal cost")  # fmt: skip
    overrides = Overrides.read(options.hardware_file) if options.hardware_file else None
    names = [*filter(None, (options.compare or "").split(","))] or all_names(overrides, options.power_price is not None)
    # One question covers all accelerators, so that prices, workload and constants are parsed in one function.
    question = ask(replace(options, compare=",".join(names)))
    chips = tuple(dict.fromkeys(chip for chip in question.chips if chip.price.at(question.price) is not None))
    silent = tuple(dict.fromkeys(chip.name for chip in question.chips if chip.price.at(question.price) is None))
    if silent and options.compare:
        raise ConfigError(
            f"--price {question.price}: no such price of {', '.join(silent)} is public; {question.other_price()}"
        )
    if goal == "energy":
        chips = _of_known_power(chips)
    host = overrides.host_memory_gb * 1e9 if overrides and overrides.host_memory_gb else None
    return Market(question, chips, silent, goal, budget, deadline, host)


def all_names(overrides: Overrides | None, powered: bool) -> list[str]:
    """Catalogue names, those that the hardware file changes replaced by its own."""
    own = {accelerator(name, overrides).name: name for name in (overrides.accelerator if overrides else ())}
    names = {**{name: name for name in catalogue()}, **own}
    return [name for name in names.values() if not powered or accelerator(name, overrides).power]


def _of_known_power(chips: tuple[Accelerator, ...]) -> tuple[Accelerator, ...]:
    powered = tuple(chip for chip in chips if chip.power)
    if not powered:
        names = ", ".join(chip.name for chip in chips)
        raise ConfigError(f"--goal energy: nothing is known of the power of {names}; give power_w in a --hardware-file")
    return powered


def _budget(text: str | None) -> float:
    return _quantity(text, r"\$?(\d+(?:\.\d+)?)\s*/\s*h", lambda match: float(match[1]), "budget",
                     "dollars per hour, such as 60/h")  # fmt: skip


def _deadline(text: str | None) -> float:
    hours = {"m": 1 / 60, "h": 1.0, "d": 24.0}
    return _quantity(text, r"(\d+(?:\.\d+)?)\s*([mhd])", lambda match: float(match[1]) * hours[match[2]], "deadline",
                     "minutes, hours or days, such as 90m, 24h or 7d")  # fmt: skip


def _quantity(text: str | None, form: str, read: Callable[[re.Match[str]], float], name: str, expected: str) -> float:
    if text is None:
        return math.inf
    results = re.fullmatch(rf"\s*{form}\s*", text)
    if not results or not read(results) > 0:
        raise ConfigError(f"--{name} {text}: expected {expected}")
    return read(results)
