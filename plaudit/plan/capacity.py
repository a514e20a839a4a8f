"""Size a reward service for a load: replicas, accelerator and price that meet a p99 latency limit."""

from __future__ import annotations

import math
import random
from collections.abc import Sequence
from dataclasses import dataclass, replace

from plaudit.errors import ConfigError
from plaudit.plan.cost.decode import Replica
from plaudit.plan.market import all_names
from plaudit.plan.options import PlanOptions
from plaudit.plan.question import Question, ask
from plaudit.plan.shape.hardware import GB, HOST_GB_PER_GPU, Accelerator, Cluster, Overrides
from plaudit.plan.shape.layouts import GenerationLayout

BUDGET = 32768.0
"""Token budget of one worker step on a GPU, as in core/device/cuda.py."""
MOST_PER_SERVER = 2480.0
"""Items per second that one HTTP process can forward: overhead-64 in benchmarks/results/serving.json."""
ITEMS = 4000
"""Items simulated to estimate a percentile."""
MOST_REPLICAS = 4096


@dataclass(frozen=True, slots=True)
class Scorer:
    """One replica. A step takes queued sequences up to a token budget and returns their results when it ends. There is
    no batching delay: sequences that arrive during a step form the next one."""

    replica: Replica
    budget: float = BUDGET

    def step_seconds(self, lengths: Sequence[float]) -> float:
        """Seconds of a step over sequences of these lengths in tokens."""
        return self._once() + sum(map(self.replica.prefill_seconds, lengths))

    def _once(self) -> float:
        """Fixed seconds of a step, independent of its batch."""
        model, fixed = self.replica.model, self.replica.constants
        layers = model.layers * fixed.layer_seconds + model.moe_layers * fixed.expert_layer_seconds
        return fixed.step_seconds + layers

    def under(self, rate: float, lengths: Sequence[float]) -> Traffic:
        """Simulate sequences that arrive at random (Poisson), `rate` per second."""
        draw, once = random.Random(0), self._once()
        each = {length: self.replica.prefill_seconds(length) for length in set(lengths)}
        arrivals: list[float] = []
        for _ in lengths:
            arrivals.append((arrivals[-1] if arrivals else 0.0) + draw.expovariate(rate))
        waits: list[float] = []
        now = busy = 0.0
        steps = last = 0
        while last < len(lengths):
            first, tokens, seconds = last, 0.0, once
            now = max(now, arrivals[first])
            # The first sequence is always taken, the others within the budget.
            while last < len(lengths) and arrivals[last] <= now and (last == first or tokens < self.budget):
                tokens, seconds, last = tokens + lengths[last], seconds + each[lengths[last]], last + 1
            now, busy, steps = now + seconds, busy + seconds, steps + 1
            waits += [now - arrived for arrived in arrivals[first:last]]
        waits.sort()
        return Traffic(waits[len(waits) // 2], waits[math.ceil(0.99 * len(waits)) - 1], len(waits) / steps, busy / now)


@dataclass(frozen=True, slots=True)
class Traffic:
    p50: float
    p99: float
    batch: float
    """Mean number of sequences per step."""
    busy: float
    """Fraction of time in which the replica is busy."""


@dataclass(frozen=True, slots=True)
class Service:
    """Replicas on one kind of accelerator that meet the load and latency limit."""

    scorer: Scorer
    replicas: int
    rate: float
    traffic: Traffic
    level: str

    @property
    def chip(self) -> Accelerator:
        return self.scorer.replica.cluster.accelerator

    @property
    def devices(self) -> int:
        return self.replicas * self.scorer.replica.layout.devices

    @property
    def servers(self) -> int:
        """Number of HTTP processes; each serves a share of the replicas."""
        return math.ceil(self.rate / MOST_PER_SERVER)

    @property
    def hourly(self) -> float | None:
        return self._at(self.chip.price.at(self.level))

    @property
    def per_million(self) -> float | None:
        return None if self.hourly is None else self.hourly / (self.rate * 3600) * 1e6

    @property
    def range(self) -> tuple[float, float] | None:
        """Dollars per million scores at the lowest and the highest source of the price."""
        ends = self.chip.price.range(self.level)
        scores = self.rate * 3600 / 1e6
        return (ends[0] * self.devices / scores, ends[1] * self.devices / scores) if ends else None

    def _at(self, price: float | None) -> float | None:
        return None if price is None else price * self.devices


@dataclass(frozen=True, slots=True)
class Demand:
    """The load and latency required of the service."""

    question: Question
    """Its workload sets the model and the lengths; its clusters the accelerators."""
    rate: float
    p99: float
    samples: int
    """Responses per prompt in one request; the prompt is computed once."""

    def lengths(self) -> list[float]:
        work = self.question.workload
        drawn = work.lengths(self.question.constants).quantiles(48, ITEMS)
        draw = random.Random(1)
        return [work.prompt / self.samples + draw.choice(drawn) for _ in range(ITEMS)]

    def answer(self) -> tuple[list[Service], dict[str, str]]:
        """The best service on each accelerator, cheapest first, and the reason for each accelerator without one."""
        lengths = self.lengths()
        services: list[Service] = []
        refused: dict[str, str] = {}
        for chip in self.question.chips:
            service = self._on(chip, lengths)
            if isinstance(service, str):
                refused[chip.name] = service
            else:
                services.append(service)
        if not services:
            raise ConfigError(f"no accelerator answers {self.rate:g} items/s of {self.question.workload.model.name} "
                              f"within {self.p99:g} s: {next(iter(refused.values()))}")  # fmt: skip
        services.sort(key=lambda s: (math.inf if s.hourly is None else s.hourly, s.devices))
        return services, refused

    def _on(self, chip: Accelerator, lengths: Sequence[float]) -> Service | str:
        """Service with the smallest tp that fits the weights and scores one item in time, and the fewest replicas for
        the load; otherwise the reason there is none."""
        why = ""
        for tp in (n for n in (1, 2, 4, 8) if n <= chip.node and self.question.workload.model.heads % n == 0):
            service = self._replicated(self._scorer(chip, tp), lengths)
            if not isinstance(service, str):
                return service
            why = service
        return why

    def _scorer(self, chip: Accelerator, tp: int) -> Scorer:
        place, work = Cluster(chip, 1, chip.node, HOST_GB_PER_GPU * GB * chip.node), self.question.workload
        layout, constants = GenerationLayout(tp), self.question.constants
        return Scorer(Replica(work.model, place, layout, work.engine_dtype, work.kv_dtype, constants))

    def _replicated(self, scorer: Scorer, lengths: Sequence[float]) -> Service | str:
        replica = scorer.replica
        chip, model, fixed = replica.cluster.accelerator, replica.model, replica.constants
        # Besides the weights, a step needs memory for the keys and values of its tokens and the activations of one
        # layer.
        numbers = model.kv_numbers(1.0) + 4 * model.hidden + 3 * max(model.ffn, model.top_k * model.expert_ffn)
        needed = replica.weight_bytes() + fixed.reserve_bytes + BUDGET * numbers * 2 / replica.layout.tp
        if needed > chip.memory:
            return f"it needs {needed / GB:.1f} of {chip.memory / GB:.1f} GB with tp {replica.layout.tp} on {chip.name}"
        slowest = sorted(lengths)[math.ceil(0.99 * len(lengths)) - 1]
        alone = scorer.step_seconds([slowest])
        if alone > self.p99:
            return f"one item of {slowest:,.0f} tokens alone takes {alone:.3g} s on {replica.layout.tp} {chip.name}"

        def carried(replicas: int) -> Service:
            return Service(
                scorer, replicas, self.rate, scorer.under(self.rate / replicas, lengths), self.question.price
            )

        least = math.ceil(self.rate * sum(map(replica.prefill_seconds, lengths)) / len(lengths))
        few = max(0, least - 1)
        many = max(1, least)
        while carried(many).traffic.p99 > self.p99:
            few, many = many, 2 * many
            if many > MOST_REPLICAS:
                return f"more than {MOST_REPLICAS} replicas of {replica.layout.tp} {chip.name} would be needed"
        while many - few > 1:  # few is too few, many is enough
            middle = (few + many) // 2
            if carried(middle).traffic.p99 > self.p99:
                few = middle
            else:
                many = middle
        return carried(many)


def demand(options: PlanOptions) -> Demand:
    """Build the `Demand` from the command-line options."""
    if options.rate is None or options.p99 is None:
        raise ConfigError("--serve needs the load and the limit: --rate 500 (items per second) and --p99 0.5 (seconds)")
    for name, value in (("rate", options.rate), ("p99", options.p99)):
        if not (math.isfinite(value) and value > 0):
            raise ConfigError(f"--{name} {value:g}: expected more than zero")
    if options.hardware:
        raise ConfigError(f"--hardware {options.hardware}: --serve says how many devices it takes; name the "
                          "accelerators with --compare")  # fmt: skip
    others = {"--budget": options.budget, "--deadline": options.deadline, "--goal": options.goal,
              "--for": options.recipe, "--explain": options.explain, "--page": options.page,
              "--generation-hardware": options.generation_hardware}  # fmt: skip
    if unread := [name for name, value in others.items() if value is not None]:
        raise ConfigError(f"--serve plans a reward service, to which {', '.join(unread)} does not apply: remove it")
    if options.model:
        raise ConfigError(
            f"--model {options.model} plans a training run and --serve {options.serve} a service: give one"
        )
    overrides = Overrides.read(options.hardware_file) if options.hardware_file else None
    names = options.compare or ",".join(all_names(overrides, options.power_price is not None))
    question = ask(replace(options, model=options.serve, compare=names))
    if not options.compare:  # without --compare, only accelerators with a price
        question = replace(question, clusters=tuple(
            place for place in question.clusters if place.accelerator.price.at(question.price) is not None
        ))  # fmt: skip
    return Demand(question, options.rate, options.p99, max(1, options.samples))
