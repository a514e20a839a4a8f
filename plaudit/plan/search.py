"""Search the plans of a run on a cluster: the best of each placement, and why the others do not fit.

Layouts of generation and training are searched independently: the best of each side is computed alone, then joined.
Pairs are tried only if both are on a device at the same time (colocated, hybrid). Each training layout uses the first
option that fits of: no recomputation, full recomputation, the optimizer offloaded too.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace

from plaudit.errors import ConfigError
from plaudit.plan.cost.parts import Parts, Shortage
from plaudit.plan.cost.plans import PLACEMENTS, SHARED, Plan
from plaudit.plan.cost.prediction import Prediction, default_channel, predict_plan
from plaudit.plan.own_trainer import CHANNEL, missing
from plaudit.plan.shape.constants import Constants
from plaudit.plan.shape.hardware import Cluster
from plaudit.plan.shape.layouts import GenerationLayout, TrainingLayout
from plaudit.plan.shape.workload import Workload

Progress = Callable[[int, int], None]
SPLITS = (1 / 8, 1 / 4, 3 / 8, 1 / 2, 5 / 8, 3 / 4)
"""Fractions of the cluster that generate in disaggregated placements."""
PAIRED = 4
"""Number of best layouts per side that are paired if both share a device."""
KIN = {"async": "disaggregated", "colocated": "hybrid"}
"""Placements that reuse the training side of another."""
THRIFT = (
    ("none", False, False),
    ("none", True, False),
    ("full", False, False),
    ("full", True, False),
    ("full", True, True),
)
"""(recompute, offload the reference, offload the optimizer), cheapest first"""


@dataclass(frozen=True, slots=True)
class Rejection:
    placement: str
    plan: Plan
    reason: str
    factor: float


@dataclass(frozen=True, slots=True)
class SearchResult:
    plans: tuple[Prediction, ...]
    """Plans that fit, fastest first."""
    rejected: tuple[Rejection, ...]
    """For each placement in which nothing fits: the closest plan."""
    tried: int


def generation_layouts(workload: Workload, cluster: Cluster) -> Iterator[GenerationLayout]:
    model, devices = workload.model, cluster.devices
    for tp in _powers(min(devices, model.heads, 32)):
        if model.heads % tp or (tp > cluster.domain and tp > 8 and tp > 2 * cluster.domain):
            continue
        for pp in (1, 2, 4):
            # Pipeline stages only pay off if the model does not fit in a domain.
            if tp * pp <= devices and (pp == 1 or tp == min(cluster.domain, _largest_power(devices))):
                yield GenerationLayout(tp, pp)
        if model.experts and not workload.plain:  # our engines distribute experts over tensor ranks themselves
            for ep in _powers(min(devices, model.experts, 4 * cluster.domain)):
                if ep > 1 and ep >= tp and model.experts % ep == 0:
                    yield GenerationLayout(tp, 1, ep)


def training_layouts(workload: Workload, cluster: Cluster) -> Iterator[TrainingLayout]:
    model, devices = workload.model, cluster.devices
    longest = workload.prompt + workload.longest
    tokens = int(max(workload.micro_tokens or 4096, longest))
    for tp in _powers(min(devices, cluster.domain, 8)):
        if model.heads % tp:
            continue
        for cp in _powers(max(1, min(8, int(longest // 8192)))):
            for pp in _powers(min(16, model.layers)):
                if devices % (tp * cp * pp):
                    continue
                dp = devices // (tp * cp * pp)
                for ep in _powers(min(model.experts, tp * cp * dp)) if model.experts else (1,):
                    if ep > 1 and (model.experts % ep or (tp * cp * dp) % ep):
                        continue
                    yield TrainingLayout(tp, pp, dp, ep, cp, 1, 1, tokens, plain=workload.plain)
                    stages = pp == 1 or workload.plain  # pipeline stages with FSDP: only our trainer
                    if stages and dp * cp > 1 and (ep == 1 or tp == 1):
                        yield TrainingLayout(tp, pp, dp, ep, cp, 1, 3, tokens, plain=workload.plain)


def _powers(most: int) -> list[int]:
    return [1 << i for i in range(max(1, most).bit_length()) if 1 << i <= max(1, most)]


def _largest_power(number: int) -> int:
    return 1 << (number.bit_length() - 1)


class Search:
    """Searches the plans of one workload on one cluster, or on two with different accelerators."""

    def __init__(
        self, workload: Workload, cluster: Cluster, constants: Constants | None = None, *,
        placements: Sequence[str] = PLACEMENTS, channel: str | None = None, staleness: int = 1,
        generation_cluster: Cluster | None = None, generation: GenerationLayout | None = None,
        training: TrainingLayout | None = None, progress: Progress | None = None, ours: bool = False,
    ) -> None:  # fmt: skip
        """`ours`: only what Plaudit's own trainer can run."""
        self.workload, self.cluster, self.constants = workload, cluster, constants or Constants()
        self.placements = [p for p in placements if generation_cluster is None or p not in SHARED]
        if not self.placements:
            raise ConfigError(
                "generation on hardware of its own goes with the placements disaggregated and async alone"
            )
        self.channel, self.staleness, self.progress = channel, staleness, progress
        self.generation_cluster = generation_cluster
        self.generation, self.training, self.ours = generation, training, ours
        read_only = workload.reward is not None or (workload.has_reference and not workload.lora_rank)
        # Without inference-only models there is nothing to offload; our trainer never offloads them.
        parks = read_only and not ours
        self.thrift = THRIFT if parks else tuple(dict.fromkeys((how, False, off) for how, _, off in THRIFT))
        self.tried = 0
        self._nearest: dict[str, Rejection] = {}
        self._sides: dict[tuple[str, int], list[tuple[float, TrainingLayout]]] = {}

    def run(self) -> SearchResult:
        predictions: list[Prediction] = []
        for done, placement in enumerate(self.placements):
            if self.progress:
                self.progress(done, len(self.placements))
            if placement in ("colocated", "hybrid"):
                predictions += self._paired(placement)
            elif placement == "swapped":
                predictions += self._joined(placement, self.cluster, self.cluster)
            else:
                for engines, trainers in self._splits():
                    predictions += self._joined(placement, engines, trainers)
        if self.progress:
            self.progress(len(self.placements), len(self.placements))
        best = sorted(predictions, key=lambda prediction: prediction.step.value)
        fitting = {prediction.plan.placement for prediction in best}
        rejected = [self._nearest[p] for p in self.placements if p not in fitting and p in self._nearest]
        return SearchResult(tuple(best), tuple(rejected), self.tried)

    def _splits(self) -> Iterator[tuple[Cluster, Cluster]]:
        if self.generation_cluster is not None:
            yield self.generation_cluster, self.cluster
            return
        whole = self.cluster
        unit = whole.devices_per_node if whole.nodes > 1 else 1
        seen = set()
        for share in SPLITS:
            engines = round(whole.devices * share / unit) * unit
            if 0 < engines < whole.devices and engines not in seen:
                seen.add(engines)
                yield whole.part(engines), whole.part(whole.devices - engines)
        if self.ours and whole.nodes == 1 and whole.devices - 1 not in {0, *seen}:  # one device trains
            yield whole.part(whole.devices - 1), whole.part(1)

    def _predict(self, plan: Plan, simulate: bool = False) -> Prediction | None:
        # The requested channel applies to weights sent between devices; on shared devices only these three apply.
        channel = self.channel if not plan.shared or self.channel in ("shared", "ipc", "host") else None
        own = CHANNEL if self.ours and not plan.shared else None
        plan = replace(plan, channel=channel or own or default_channel(plan, self.workload))
        if self.ours and missing(self.workload, plan):
            return None
        self.tried += 1
        try:
            plan.check(self.workload.model)
        except ConfigError:
            return None
        # Check memory before any simulation, as it is cheap.
        if shortages := Parts(self.workload, plan, self.constants).capacity().shortages:
            self._reject(plan.placement, plan, max(shortages, key=lambda shortage: shortage.factor))
            return None
        return predict_plan(self.workload, plan, self.constants, simulate=simulate)

    def _generations(self, cluster: Cluster) -> list[GenerationLayout]:
        return [self.generation] if self.generation else list(generation_layouts(self.workload, cluster))

    def _trainings(self, cluster: Cluster) -> list[TrainingLayout]:
        return [self.training] if self.training else list(training_layouts(self.workload, cluster))

    def fastest_training(self, placement: str, trainers: Cluster) -> tuple[float, TrainingLayout] | None:
        """Seconds of scoring and updates with the fastest training layout that fits; None if none does."""
        return next(iter(self._timed(placement, trainers)), None)

    def _trained(self, placement: str, trainers: Cluster) -> list[TrainingLayout]:
        return [layout for _, layout in self._timed(placement, trainers)]

    def _timed(self, placement: str, trainers: Cluster) -> list[tuple[float, TrainingLayout]]:
        """Training layouts that fit with only the state that the placement keeps on the devices, fastest first."""
        kind = KIN.get(placement, placement)
        if (kind, trainers.devices) in self._sides:
            return self._sides[kind, trainers.devices]
        timed = []
        for layout in self._trainings(trainers):
            timed_layout = self._thrifty_training(kind, trainers, layout)
            if timed_layout is not None:
                timed.append(timed_layout)
        timed.sort(key=lambda pair: pair[0])
        self._sides[kind, trainers.devices] = timed
        return self._sides[kind, trainers.devices]

    def _thrifty_training(
        self, placement: str, trainers: Cluster, layout: TrainingLayout
    ) -> tuple[float, TrainingLayout] | None:
        """The cheapest memory option with which the layout fits, with its seconds; None if none does."""
        thrift = self.thrift if self.training is None else ((layout.recompute, layout.park, layout.offload_optimizer),)
        nearest: tuple[Shortage, Plan] | None = None
        kin = [name for name in self.placements if KIN.get(name, name) == placement]
        # A rejection is only reported if it is closer to fitting than all before.
        bound = max((self._nearest[name].factor if name in self._nearest else math.inf for name in kin), default=0.0)
        if self.ours:  # later options only require more features: if the first is not supported, none is
            recompute, park, offload = thrift[0]
            cut = replace(layout, recompute=recompute, park=park, offload_optimizer=offload)
            if missing(self.workload, Plan(placement, trainers, trainers, GenerationLayout(), cut, "ipc", 0)):
                return None
        for recompute, park, offload in thrift:
            if (offload or park) and placement == "swapped" and self.training is None:
                continue
            cut = replace(layout, recompute=recompute, park=park, offload_optimizer=offload)
            plan = Plan(placement, trainers, trainers, GenerationLayout(), cut, "ipc", 0)
            if self.ours and missing(self.workload, plan):
                continue
            self.tried += 1
            try:
                cut.check(self.workload.model)
            except ConfigError:
                return None
            parts = Parts(self.workload, plan, self.constants)
            chip = trainers.accelerator
            training = Shortage("training, per device", parts.training_memory(0.0).value, chip.memory)
            if training.factor > 1 and training.factor >= bound:
                continue
            needs = [training, Shortage("scoring, per device", parts.scoring_memory(0.0).value, chip.memory),
                     Shortage("host memory, per node", parts.host().value, trainers.host_memory)]  # fmt: skip
            worst = max(needs, key=lambda need: need.factor)
            if worst.factor <= 1:
                seconds = sum(term.value for term in (*parts.scores(), *parts.learning()))
                return seconds, cut
            if worst.factor < bound:
                nearest, bound = (worst, plan), worst.factor
        if nearest:
            for name in kin:
                self._reject(name, nearest[1], nearest[0])
        return None

    def _reject(self, placement: str, plan: Plan, worst: Shortage) -> None:
        nearest = self._nearest.get(placement)
        if nearest is None or worst.factor < nearest.factor:
            self._nearest[placement] = Rejection(placement, plan, str(worst), worst.factor)

    def _joined(self, placement: str, engines: Cluster, trainers: Cluster) -> list[Prediction]:
        """Plans of the best training layout with every generation layout, and of the second best with the best of
        those."""
        trained = self._trained(placement, trainers)
        if not trained:
            return []
        predictions = []
        stale = self.staleness if placement == "async" else 0
        for generation in self._generations(engines):
            plan = Plan(placement, trainers, engines, generation, trained[0], "", stale)
            predictions.append(self._predict(plan))
        best = sorted(filter(None, predictions), key=lambda p: p.step.value)[:2]
        if best and len(trained) > 1:
            best += filter(None, [self._predict(replace(best[0].plan, training=trained[1]))])
        if placement == "async":
            best = [again for p in best if (again := self._predict(p.plan, simulate=True)) is not None]
        return best

    def _paired(self, placement: str) -> list[Prediction]:
        """Plans with both sides on the same devices: memory that training keeps is not available to the cache."""
        trained = self._trained(placement, self.cluster)
        memory_by_cut = {}
        for cut in trained:
            plan = Plan("hybrid", self.cluster, self.cluster, GenerationLayout(), cut, "ipc")
            memory_by_cut[cut] = Parts(self.workload, plan, self.constants).training_memory(0.0).value
        # Layouts with the least memory leave the most for the cache, the fastest cost the least: try some of both.
        lean = sorted(trained, key=lambda cut: memory_by_cut[cut])[:PAIRED]
        cuts = dict.fromkeys([*trained[:PAIRED], *lean])
        predictions = [
            prediction
            for cut in cuts
            for generation in self._generations(self.cluster)
            for prediction in self._beside_engine(placement, cut, generation)
        ]
        return sorted(predictions, key=lambda p: p.step.value)[:3]

    def _beside_engine(self, placement: str, cut: TrainingLayout, generation: GenerationLayout) -> Iterator[Prediction]:
        """Predict the layout with this engine, then options that save more memory while a larger cache makes steps
        faster: training may fit alone but leave no memory for the engine."""
        levels = [(cut.recompute, cut.park, cut.offload_optimizer)]
        if self.training is None:
            levels = list(self.thrift[self.thrift.index(levels[0]) :])
        before = float("inf")
        for recompute, park, offload in levels:
            training = replace(cut, recompute=recompute, park=park, offload_optimizer=offload)
            prediction = self._predict(Plan(placement, self.cluster, self.cluster, generation, training, ""))
            if prediction is not None:
                yield prediction
                if prediction.waves <= 1 or prediction.step.value > before:
                    return
                before = prediction.step.value


def smallest_that_fits(
    workload: Workload, cluster: Cluster, constants: Constants | None = None, placements: Sequence[str] = PLACEMENTS,
    ours: bool = False,
) -> Cluster | None:  # fmt: skip
    """The fewest devices of the same kind on which some plan fits: first more devices of the node, then more nodes."""
    fits = (larger for larger in _larger(cluster) if some_plan_fits(workload, larger, constants, placements, ours))
    return next(fits, None)


def some_plan_fits(
    workload: Workload, cluster: Cluster, constants: Constants | None, placements: Sequence[str] = PLACEMENTS,
    ours: bool = False,
) -> bool:  # fmt: skip
    # Whatever fits colocated fits hybrid, and whatever fits async fits disaggregated, so only the latter are tried.
    wanted = (
        tuple(dict.fromkeys(KIN.get(name, name) for name in placements)) if set(placements) - {*KIN} else placements
    )
    return bool(Search(workload, cluster, constants, placements=wanted, ours=ours).run().plans)


def _larger(cluster: Cluster) -> Iterator[Cluster]:
    now, most = cluster.devices_per_node, cluster.accelerator.node
    if cluster.nodes == 1:
        for devices in (2, 4, 8):
            if now < devices <= most:
                yield replace(cluster, devices_per_node=devices, host_memory=cluster.host_memory * devices / now)
    full = cluster if cluster.nodes > 1 or now >= most else replace(
        cluster, devices_per_node=most, host_memory=cluster.host_memory * most / now
    )  # fmt: skip
    for nodes in (full.nodes + 1, *(full.nodes * k for k in (2, 3, 4, 6, 8, 12, 16, 24, 32, 48, 64))):
        larger = replace(full, nodes=nodes)
        if larger.devices & (larger.devices - 1) == 0 or larger.devices % 8 == 0:
            yield larger
