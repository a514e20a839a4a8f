"""Prefill, decode and training in separate pools, each on the cheapest accelerator and sized for the step time."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace

from plaudit.errors import ConfigError
from plaudit.plan.cost import memory
from plaudit.plan.cost.decode import Replica
from plaudit.plan.cost.generation import generate
from plaudit.plan.cost.parts import MOST_SEQUENCES, OWN_ENGINE_SHARE, Parts
from plaudit.plan.cost.plans import Plan
from plaudit.plan.cost.prediction import default_channel
from plaudit.plan.market import Choice, Market, market
from plaudit.plan.options import PlanOptions
from plaudit.plan.search import Search, generation_layouts
from plaudit.plan.shape.hardware import DTYPE_BYTES, Accelerator, Cluster
from plaudit.plan.shape.layouts import GenerationLayout, TrainingLayout

MOST_REPLICAS = 4096
WIDEST = 3.0
"""Device memory per parameter, in bytes, above which an engine certainly fits with a cache."""


@dataclass(frozen=True, slots=True)
class Pool:
    work: str
    """prefill | decode | generation (both) | training"""
    place: Cluster
    cut: str
    """Parallel layout of the pool."""
    seconds: float
    """Seconds per step in which the pool is busy."""
    level: str
    layout: GenerationLayout | None = None

    @property
    def hourly(self) -> float:
        return self.place.hourly(self.level) or 0.0


@dataclass(frozen=True, slots=True)
class Arrangement:
    """Pools that work concurrently, each on a different batch."""

    pools: tuple[Pool, ...]
    sync: float
    """Seconds in which engines wait for new weights."""
    tokens: float
    """Tokens generated per step."""
    kv_rate: float = 0.0
    """Bytes per second that each decode device receives from the prefill pool."""

    @property
    def step(self) -> float:
        return max(pool.seconds for pool in self.pools) + self.sync

    @property
    def hourly(self) -> float:
        return sum(pool.hourly for pool in self.pools)

    @property
    def per_million(self) -> float:
        return self.hourly / 3600 * self.step / self.tokens * 1e6

    @property
    def devices(self) -> int:
        return sum(pool.place.devices for pool in self.pools)


@dataclass(frozen=True, slots=True)
class PoolPlan:
    market: Market
    limit: float
    """Limit of the step time, in seconds."""
    apart: Arrangement
    """Prefill, decode and training in separate pools."""
    two: Arrangement
    """Generation and training in separate pools."""
    together: Choice | None
    """The cheapest plan within the limit on a single kind of accelerator; None if there is none."""

    @property
    def headline(self) -> str:
        """The cheapest of the three."""
        kinds = {"prefill, decode and training apart": self.apart.per_million,
                 "two pools, generation and training": self.two.per_million}  # fmt: skip
        if self.together is not None:
            offer = self.together.any_software[0]
            plan = f"{offer.place.name}, {offer.prediction.plan.placement}"
            term = offer.prediction.cost.million_tokens[self.market.level]
            kinds[f"one kind of accelerator ({plan})"] = term.value
        best = min(kinds, key=lambda name: kinds[name])
        return f"Cheapest within {self.limit:g} s a step: {best}, ${kinds[best]:.3g} per million tokens"


class PoolSearch:
    """Sizes each pool for a step of `limit` seconds, on every accelerator that has a price."""

    def __init__(self, of: Market, limit: float) -> None:
        self.market = of
        self.limit = limit
        self.question = of.question
        self.work = of.question.workload
        self.lengths = self.work.lengths(self.question.constants)
        self.refused: dict[str, str] = {}
        self._trainings: dict[Cluster, tuple[float, TrainingLayout] | None] = {}

    def arrange(self, *generation: str) -> Arrangement:
        """Pools for generation (one or two) and training. Time in which engines wait for weights is subtracted from the
        limit."""
        limit, tokens = self.limit, self.work.batch * self.work.response
        while limit > 0:
            pools = tuple(self._cheapest(work, limit) for work in (*generation, "training"))
            sync = self._sync(pools)
            if max(pool.seconds for pool in pools) + sync <= self.limit:
                rate = self._kv_rate(pools, sync) if "prefill" in generation else 0.0
                return Arrangement(pools, sync, tokens, rate)
            limit = min(0.98 * limit, self.limit - sync)  # needs more devices, which may change the transfer time again
        raise ConfigError(
            f"--pools {self.limit:g}: engines wait {sync:.3g} s for new weights alone; allow more seconds"
        )

    def _cheapest(self, work: str, limit: float) -> Pool:
        pools = [pool for chip in self.market.chips if (pool := self._on(work, chip, limit)) is not None]
        if not pools:
            names = ", ".join(chip.name for chip in self.market.chips)
            raise ConfigError(f"--pools {self.limit:g}: {work} of {self.work.model.name} takes longer on any number of "
                              f"{names}: {self.refused.get(work, 'nothing fits')}; allow more seconds")  # fmt: skip
        return min(pools, key=lambda pool: (pool.hourly, pool.place.devices))

    def _on(self, work: str, chip: Accelerator, limit: float) -> Pool | None:
        return self._training(chip, limit) if work == "training" else self._engines(work, chip, limit)

    def _training(self, chip: Accelerator, limit: float) -> Pool | None:
        needed = 0.0
        for place in self.market.sizes(chip, math.inf):
            if place.devices < needed or (timed := self._trained(place)) is None:
                continue
            if timed[0] <= limit:
                return Pool("training", place, str(timed[1]), timed[0], self.market.level)
            needed = place.devices * timed[0] / limit  # speedup is linear at best
            self.refused["training"] = f"{timed[0]:.3g} s on {place.name}"
        return None

    def _trained(self, place: Cluster) -> tuple[float, TrainingLayout] | None:
        if place not in self._trainings:
            search = Search(self.work, place, self.question.constants, placements=("async",))
            self._trainings[place] = search.fastest_training("async", place)
        return self._trainings[place]

    def _engines(self, work: str, chip: Accelerator, limit: float) -> Pool | None:
        pools = []
        for replica in self._replicas(chip):
            busy = self._busy(work, replica)
            if busy is None:
                continue
            count = _fewest(lambda n, busy=busy: busy(n) <= limit)  # type: ignore[misc]
            if count is None:
                fastest = f"{busy(self.work.batch):.3g} s with an engine for every response, on {chip.name}"
                self.refused[work] = fastest
                continue
            place = _devices(replica.cluster, count * replica.layout.devices)
            pools.append(
                Pool(work, place, f"{count} × {replica.layout}", busy(count), self.market.level, replica.layout)
            )
        return min(pools, key=lambda pool: (pool.hourly, pool.seconds), default=None)

    def _replicas(self, chip: Accelerator) -> Iterator[Replica]:
        """Every generation layout once, on the fewest devices; multi-node only if a single node is too small."""
        work, fits = self.work, False
        for place in self.market.sizes(chip, math.inf):
            if place.nodes > 1 and (fits or place.nodes > 4):
                return
            for layout in generation_layouts(work, place):
                if layout.devices == place.devices:
                    fits |= place.devices * OWN_ENGINE_SHARE * chip.memory > work.model.parameters * WIDEST
                    yield Replica(work.model, place, layout, work.engine_dtype, work.kv_dtype, self.question.constants)

    def _busy(self, work: str, replica: Replica) -> Callable[[int], float] | None:
        """Function from the number of replicas to busy seconds per step; None if the layout does not fit."""
        run, chip = self.work, replica.cluster.accelerator
        fixed = memory.reserve(replica.constants).value + memory.graphs(replica.constants).value
        free = OWN_ENGINE_SHARE * chip.memory - replica.weight_bytes() - fixed
        prompts = run.batch / run.group
        if work == "prefill":
            if memory.concurrency(replica, free, run.prompt) < 1:
                return None
            return lambda count: prompts / count * replica.prefill_seconds(run.prompt)
        at_once = memory.concurrency(replica, free, run.prompt + run.response)
        if at_once < 1:
            return None
        at_once = min(at_once, MOST_SEQUENCES * replica.layout.attention_groups)

        def busy(count: int) -> float:
            made = generate(replica, count, run.batch, run.prompt, self.lengths, at_once, run.group).seconds
            return made.value if work == "generation" else made.value - made.parts[0].value

        return busy

    def _sync(self, pools: tuple[Pool, ...]) -> float:
        engines, trainers = pools[-2], pools[-1]
        timed = self._trained(trainers.place)
        assert engines.layout is not None
        assert timed is not None, "the pool was sized with it"
        plan = Plan("async", trainers.place, engines.place, engines.layout, timed[1], "", self.question.staleness)
        plan = replace(plan, channel=self.question.channel or default_channel(plan, self.work))
        return Parts(self.work, plan, self.question.constants).weights().value

    def _kv_rate(self, pools: tuple[Pool, ...], sync: float) -> float:
        work, decode = self.work, next(pool for pool in pools if pool.work == "decode")
        prompts = work.batch / work.group
        size = prompts * work.model.kv_numbers(work.prompt) * DTYPE_BYTES[work.kv_dtype]
        seconds = max(pool.seconds for pool in pools) + sync
        rate = size / decode.place.devices / seconds
        link = min(pool.place.accelerator.scale_out for pool in pools[:2]) * self.question.constants.bulk_link_share
        if rate > link:
            raise ConfigError(f"--pools {self.limit:g}: prompts' keys and values come at {rate / 1e9:.3g} GB/s to a "
                              f"decoding device, whose network has {link / 1e9:.3g}; allow more seconds")  # fmt: skip
        return rate


def plan_pools(options: PlanOptions, planned: Callable[[Market], Market]) -> PoolPlan:
    limit = options.pools
    assert limit is not None, "the caller has looked"
    if not (math.isfinite(limit) and limit > 0):
        raise ConfigError(f"--pools {limit:g}: expected the seconds of a step, more than zero")
    others = {"--budget": options.budget, "--deadline": options.deadline, "--goal": options.goal,
              "--explain": options.explain, "--page": options.page, "--hardware": options.hardware,
              "--generation-hardware": options.generation_hardware}  # fmt: skip
    for name, value in others.items():
        if value is not None:
            raise ConfigError(f"--pools computes the devices itself: remove {name}")
    of = planned(market(replace(options, goal="cost", deadline=f"{limit * options.steps / 3600}h")))
    search = PoolSearch(of, limit)
    apart, two = search.arrange("prefill", "decode"), search.arrange("generation")
    chips = tuple(dict.fromkeys(pool.place.accelerator for each in (apart, two) for pool in each.pools))
    try:
        together = replace(of, chips=chips).answer()
    except ConfigError:  # too slow or too small on one kind of accelerator, unlike pools
        together = None
    return PoolPlan(of, limit, apart, two, together)


def _fewest(enough: Callable[[int], bool]) -> int | None:
    """The smallest number for which `enough` holds (monotonic), up to MOST_REPLICAS; None if there is none."""
    many = 1
    while not enough(many):
        many *= 2
        if many > MOST_REPLICAS:
            return None
    few = many // 2
    while many - few > 1:
        middle = (few + many) // 2
        few, many = (few, middle) if enough(middle) else (middle, many)
    return many


def _devices(node: Cluster, devices: int) -> Cluster:
    """A cluster with at least `devices` devices: whole nodes, or part of one if fewer are needed."""
    chip = node.accelerator
    if devices < chip.node:
        return replace(node, nodes=1, devices_per_node=devices)
    nodes = math.ceil(devices / chip.node)
    return replace(node, nodes=nodes, devices_per_node=chip.node,
                   host_memory=node.host_memory / node.devices_per_node * chip.node)  # fmt: skip
