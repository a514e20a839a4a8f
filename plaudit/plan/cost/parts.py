"""Memory and time of each phase of a plan, before they are compared with the hardware's limits."""

from __future__ import annotations

import math
from copy import copy
from dataclasses import dataclass, replace

from plaudit.plan.cost import memory
from plaudit.plan.cost.channel import find, transfer
from plaudit.plan.cost.decode import Replica
from plaudit.plan.cost.generation import Generation
from plaudit.plan.cost.plans import Plan
from plaudit.plan.cost.simulation import overlap
from plaudit.plan.cost.term import Term, times, total
from plaudit.plan.cost.training import Trainer
from plaudit.plan.shape.constants import Constants
from plaudit.plan.shape.hardware import DTYPE_BYTES
from plaudit.plan.shape.model_shape import ModelShape
from plaudit.plan.shape.workload import Workload

ENGINE_SHARE = 0.7
"""Share of a device's memory for an engine that shares it with a trainer (verl 0.5 to 0.7, OpenRLHF 0.5) ..."""
OWN_ENGINE_SHARE = 0.9
"""... and for an engine on a device of its own."""


MOST_SEQUENCES = 1024
"""Most sequences that an engine schedules at once (vLLM's default for large devices)."""
BYTE = 1.0
"""Tolerance for rounding: sums of the same terms in another order differ by far less."""


@dataclass(frozen=True, slots=True)
class Shortage:
    """A memory limit that the plan exceeds, and by how much."""

    what: str
    needed: float
    available: float

    def __str__(self) -> str:
        return f"{self.what}: needs {self.needed / 1e9:.1f} GB, has {self.available / 1e9:.1f} GB"

    @property
    def factor(self) -> float:
        return self.needed / max(self.available, 1.0)


@dataclass(frozen=True, slots=True)
class Capacity:
    """Memory per device in each phase, and the number of sequences that a replica's cache fits."""

    generation: Term
    scoring: Term
    training: Term
    sequences: float
    shortages: tuple[Shortage, ...]


@dataclass(frozen=True, slots=True)
class Phase:
    name: str
    pool: str
    """all | generation | training"""
    start: float
    seconds: Term
    memory: Term
    """Per device of the pool."""


class Parts:
    """The components of one plan: what is in memory in each phase, and how long each phase takes."""

    def __init__(self, workload: Workload, plan: Plan, constants: Constants) -> None:
        self.workload, self.plan, self.constants = workload, plan, constants
        self.replica = Replica(
            workload.model,
            plan.generation_cluster,
            plan.generation,
            workload.engine_dtype,
            workload.kv_dtype,
            constants,
        )
        self.trainer = self._trainer(workload.model, trained_share=workload.trained_share)
        self.critic = self._trainer(workload.value_model) if workload.value_model else None
        self.reward = self._trainer(workload.reward, whole=plan.training.plain) if workload.reward else None
        self.process = self._trainer(workload.process, whole=plan.training.plain) if workload.process else None
        self.one_module = plan.one_module(workload.dtype, workload.engine_dtype)
        # Cache capacity is counted at the final mean length of a sequence.
        self.grown = workload.prompt + workload.response

    def _trainer(self, model: ModelShape, whole: bool = False, trained_share: float = 1.0) -> Trainer:
        """`whole`: not sharded. In Plaudit's trainer every rank has a full copy of the reward model."""
        layout = self.plan.training
        if whole:
            layout = replace(layout, tp=1, pp=1, cp=1, dp=layout.devices, zero=0)
        share = self.workload.trained_length / self.workload.length
        if share < 1:
            layout = replace(layout, micro_tokens=max(1, round(layout.micro_tokens * share)))
        if model.experts == 0 or model.experts % layout.ep:
            layout = replace(layout, ep=1)
        if layout.pp > model.layers or model.heads % layout.tp:
            layout = replace(layout, pp=1, tp=1, dp=layout.devices // layout.cp)
        updates = self.workload.updates / self.workload.epochs
        most = math.ceil(self.workload.batch / updates / layout.dp) * self.workload.trained_length
        cluster, dtype = self.plan.cluster, self.workload.dtype
        return Trainer(model, cluster, layout, dtype, self.constants, 1 / share, most, trained_share)

    # Memory

    def _states(self, trainer: Trainer, name: str = "") -> list[Term]:
        """State that persists between steps. Gradients do not: they are freed after the update."""
        terms = [memory.weights(trainer)]
        if trainer.adapted:
            beside = trainer.trained_share * trainer.parameters_here() * memory.weight_size(trainer)
            terms.append(
                Term("adapters", beside, "B", "bytes of a weight · rank · (inputs + outputs) of adapted layers")
            )
        terms += [] if trainer.layout.offload_optimizer else [memory.optimizer(trainer)]
        return [replace(term, name=f"{name}{term.name}") for term in terms] if name else terms

    def _forward_only(self, parked: bool = False) -> list[Term]:
        """Weights of inference-only models: those on the device, or with `parked` those offloaded to the host."""
        terms: list[Term] = []
        if self.plan.training.park is not parked:
            return []
        if self.workload.has_reference and not self.trainer.adapted:  # else adapters are disabled
            terms.append(memory.weights(self.trainer, "reference"))
        if self.reward:
            terms.append(memory.weights(self.reward, "reward model"))
        return terms

    def _resident(self) -> list[Term]:
        critic = self._states(self.critic, "critic ") if self.critic else []
        process = [memory.weights(self.process, "process model")] if self.process else []
        return self._states(self.trainer) + critic + self._forward_only() + process

    def _process_cache(self) -> list[Term]:
        """KV cache of the process reward model that scores the paths of a search."""
        work = self.workload
        if work.process is None:
            return []
        each = work.process.kv_numbers(work.length) * DTYPE_BYTES[work.kv_dtype]
        need = min(work.batch * each, work.process_cache_bytes or math.inf)
        return [Term("process model's cache", need, "B", "responses · KV of one, no more than kv_bytes of search.prm")]

    def _moment(self, trainer: Trainer) -> list[Term]:
        length = self.workload.trained_length
        used = [memory.activations(trainer, length), memory.workspace(trainer, length), memory.logits(trainer, length)]
        return used if self.constants.heap_factor == 1 else [*used, memory.holes(used, self.constants)]

    def engine_memory(self) -> tuple[float, Term, float]:
        """(bytes for the cache, generation memory without it, memory of the fullest phase that keeps it)"""
        plan, chip = self.plan, self.plan.generation_cluster.accelerator
        engine = memory.engine_weights(self.replica)
        graphs = memory.graphs(self.constants)
        terms = [memory.reserve(self.constants), graphs]
        share = ENGINE_SHARE if plan.shared else OWN_ENGINE_SHARE
        if plan.placement in ("colocated", "hybrid"):
            terms += self._resident() + ([] if self.one_module else [engine])
            terms += self._process_cache()
        else:
            terms.append(engine)
            if plan.placement == "swapped" and self.process:
                terms += [memory.weights(self.process, "process model"), *self._process_cache()]
        if plan.double_buffer:
            terms.append(replace(engine, name="second buffer", formula="the next weights arrive beside those at work"))
        inside = total("generation", terms, "B")
        fullest = inside.value
        if plan.placement == "colocated":
            # A colocated engine keeps its cache, so every later phase must fit beside it.
            fullest = max(fullest, self.training_memory(0.0).value, self.scoring_memory(0.0).value)
        cache_limit = min(share * chip.memory - engine.value - graphs.value, chip.memory - fullest)
        return max(0.0, min(cache_limit, self.workload.cache_bytes or cache_limit)), inside, fullest

    def capacity(self) -> Capacity:
        work, plan = self.workload, self.plan
        groups = plan.generation.attention_groups
        pool, inside, fullest = self.engine_memory()
        one = memory.sequence_bytes(self.replica, self.grown) / groups
        at_once = min(MOST_SEQUENCES * groups, memory.concurrency(self.replica, pool, self.grown))
        shortages = []
        if at_once < 1:
            what = "generation, weights" if fullest == inside.value else "training, its states"
            shortages.append(Shortage(f"{what} and the cache of one sequence", fullest + one, fullest + pool))
        used = pool if work.cache_bytes else min(pool, one * min(at_once, work.batch / plan.replicas))
        cache = Term("cache", used, "B", "sequences at once · bytes of one, no more than the pool", (("pool", pool),))
        phases = (
            total("generation", [*inside.parts, cache], "B"),
            self.scoring_memory(used),
            self.training_memory(used),
        )
        for phase in phases:
            apart = phase.name == "generation" and not plan.shared
            limit = (plan.generation_cluster if apart else plan.cluster).accelerator.memory
            if phase.value > limit + BYTE:
                shortages.append(Shortage(f"{phase.name}, per device", phase.value, limit))
        host = self.host()
        if host.value > plan.cluster.host_memory:
            shortages.append(Shortage("host memory, per node", host.value, plan.cluster.host_memory))
        return Capacity(*phases, at_once, tuple(shortages))

    def training_memory(self, pool: float) -> Term:
        """Training memory; for a pipeline of our trainer that of the fullest stage: the first keeps the most
        micro-batches, the last has the head."""
        cut = self.plan.training
        if not cut.plain or cut.pp == 1 or self.trainer.layout.pp == 1:
            return self._training_memory(pool)
        stages = [copy(self) for _ in range(cut.pp)]
        for stage, parts in enumerate(stages):
            parts.trainer = replace(self.trainer, stage=stage)
            if self.critic and self.critic.layout.pp > 1:
                parts.critic = replace(self.critic, stage=stage)
        return max((parts._training_memory(pool) for parts in stages), key=lambda term: term.value)

    def _training_memory(self, pool: float) -> Term:
        terms = self._resident() if self.plan.placement != "swapped" else self._states(self.trainer)
        # Policy and critic train one after the other, so only the larger set of gradients counts.
        learners = [self.trainer, *([self.critic] if self.critic else [])]
        gradients = max((memory.gradients(learner) for learner in learners), key=lambda term: term.value)
        terms = [*terms, gradients, *self._moment(self.trainer), memory.reserve(self.constants)]
        terms += self._kept(pool) + ([] if self.plan.placement == "swapped" else self._process_cache())
        if self.plan.placement == "hybrid" and not self.one_module:
            terms.append(Term("bucket", 2e9, "B", "weights on their way to the engine's cut, a bucket at a time"))
        return total("training", terms, "B")

    def scoring_memory(self, pool: float) -> Term:
        moment = memory.scoring(self.trainer, self.workload.trained_length)
        if self.plan.placement == "swapped":
            return moment
        terms = [part for part in moment.parts if part.name in ("activations", "logits", "reserve")] + self._resident()
        terms += self._forward_only(parked=True)[:1]
        return total("scoring", terms + self._kept(pool) + self._process_cache(), "B")

    def _kept(self, pool: float) -> list[Term]:
        """Engine memory that stays allocated in other phases: everything if colocated, nothing otherwise."""
        if self.plan.placement != "colocated":
            return []
        kept = [Term("cache", pool, "B", "stays between steps"), memory.graphs(self.constants)]
        return kept if self.one_module else [*kept, memory.engine_weights(self.replica)]

    def host(self) -> Term:
        """Host memory of one node: offloaded state with the overhead of pinned copies."""
        devices = self.plan.cluster.devices_per_node
        moved = self._swapped() if self.plan.placement == "swapped" else []
        moved += self._forward_only(parked=True)
        if self.plan.training.offload_optimizer:
            moved.append(memory.optimizer(self.trainer))
            moved += [replace(memory.optimizer(self.critic), name="critic optimizer")] if self.critic else []
        parts = [
            replace(term, value=term.value * devices * memory.HOST_SLACK, parts=(),
                    formula=f"{term.formula}; × devices of a node × 1.5")
            for term in moved
        ]  # fmt: skip
        return total("host", parts, "B")

    # Time

    def scores(self) -> list[Term]:
        work, length = self.workload, self.workload.trained_length
        terms = [self.trainer.score(work.batch, length, "old log-probabilities")] if work.takes_old else []
        if work.has_reference:
            terms.append(self.trainer.score(work.batch, length, "reference"))
        if self.reward:
            terms.append(self.reward.score(work.batch, length, "reward"))
        if self.process:  # a search scores as many tokens as a run without one
            terms.append(self.process.score(work.batch, length, "process model"))
        if self.critic:
            terms.append(self.critic.score(work.batch, length, "values"))
        rate = self.plan.cluster.accelerator.pcie * self.constants.bulk_link_share
        terms += [
            Term(
                f"{term.name} from the host",
                term.value / rate,
                "s",
                "bytes / (PCIe · bulk_link_share)",
                (("bytes", term.value),),
            )
            for term in self._forward_only(parked=True)
        ]
        return terms

    def bookkeeping(self) -> Term:
        batch, each = self.workload.batch, self.constants.response_seconds
        return Term("bookkeeping", batch * each, "s", "responses · response_seconds", (("responses", batch),))

    def learning(self) -> list[Term]:
        work = self.workload
        sequences, length = work.batch * work.epochs, work.trained_length
        terms = [replace(self.trainer.step(sequences, length, work.updates, ragged=True), name="policy")]
        if self.critic:
            terms.append(replace(self.critic.step(sequences, length, work.updates, ragged=True), name="critic"))
        return terms

    def _swapped(self) -> list[Term]:
        """State offloaded to the host; on several ranks of our trainer also the engines' separate weights."""
        own = self.plan.training.plain and not self.one_module
        return self._resident() + ([memory.engine_weights(self.replica)] if own else [])

    def _swaps(self) -> Term:
        """Seconds per step to offload and reload all swapped state over PCIe."""
        rate = self.plan.cluster.accelerator.pcie * self.constants.bulk_link_share
        fixed = Term("switch", self.constants.switch_seconds, "s", "switch_seconds: the engine sleeps and wakes")
        moved = [
            Term(f"{term.name} out and in", 2 * term.value / rate, "s", "2 · bytes / (PCIe · bulk_link_share)",
                 (("bytes", term.value), ("rate", rate)))
            for term in self._swapped()
        ]  # fmt: skip
        return total("transitions", [fixed, *moved], "s")

    def weights(self) -> Term:
        work, plan = self.workload, self.plan
        engine = self.replica.weight_bytes()
        busiest = max(engine, engine * plan.replicas * plan.generation.devices / plan.cluster.devices)
        seconds = transfer(
            find(plan.channel), work.model, plan.cluster.accelerator, work.dtype, work.engine_dtype,
            senders=plan.cluster.devices, busiest=busiest,
        )  # fmt: skip
        factor = self.constants.channel_factor
        return seconds if factor == 1 else times("weights", factor, seconds, "channel_factor")

    def timeline(self, made: Generation, capacity: Capacity, simulate: bool) -> tuple[tuple[Phase, ...], Term, float]:
        plan = self.plan
        scoring = total("scoring", [self.bookkeeping(), *self.scores()], "s")
        learning = total("training", self.learning(), "s")
        weights = self.weights()
        on = ("all", "all") if plan.shared else ("generation", "training")
        if plan.placement == "async":
            return self._overlapped(made, capacity, scoring, learning, weights, simulate)
        rows = [
            ("generation", on[0], made.seconds, capacity.generation), ("scoring", on[1], scoring, capacity.scoring),
            ("training", on[1], learning, capacity.training), ("weights", on[0], weights, capacity.generation),
        ]  # fmt: skip
        if plan.placement == "swapped":
            rows.append(("transitions", "all", self._swaps(), capacity.training))
        phases, clock = [], 0.0
        for name, where, seconds, memory_used in rows:
            phases.append(Phase(name, where, clock, seconds, memory_used))
            clock += seconds.value
        return tuple(phases), total("step", [phase.seconds for phase in phases], "s"), 0.0

    @property
    def batches_at_once(self) -> int:
        """Batches that generate concurrently in async. Our trainer submits prompts of the next batch while the last
        ones of a batch run; published one-step-off runs finish a batch before they start the next."""
        return self.plan.staleness + 1 if self.workload.plain else max(1, self.plan.staleness)

    def _overlapped(
        self, made: Generation, capacity: Capacity, scoring: Term, learning: Term, weights: Term, simulate: bool
    ) -> tuple[tuple[Phase, ...], Term, float]:
        work, plan = self.workload, self.plan
        busy = scoring.value + learning.value
        waits = 0.0
        if simulate:
            simulated = overlap(
                self.replica, plan.replicas, work.batch, work.prompt, work.lengths(self.constants),
                max(1.0, capacity.sequences), busy, 0.0 if plan.double_buffer else weights.value, plan.staleness,
                work.group, self.batches_at_once,
            )  # fmt: skip
            seconds, waits = simulated.step_seconds, simulated.trainer_waits
        else:
            seconds = max(made.seconds.value, busy) + weights.value
        step = Term(
            "step", seconds, "s", "simulated: a response may begin once update k - staleness is published",
            (("staleness", plan.staleness), ("batches at once", self.batches_at_once),
             ("generation alone", made.seconds.value), ("training alone", busy)),
            (made.seconds, scoring, learning, weights),
        )  # fmt: skip
        phases = (
            Phase("generation", "generation", 0.0, made.seconds, capacity.generation),
            Phase("scoring", "training", max(0.0, seconds - busy - weights.value), scoring, capacity.scoring),
            Phase(
                "training", "training", max(0.0, seconds - learning.value - weights.value), learning, capacity.training
            ),
            Phase("weights", "generation", max(0.0, seconds - weights.value), weights, capacity.generation),
        )
        return phases, step, waits
