"""One fully given run: memory and seconds of every phase, the step, its cost, and what does not fit."""

from __future__ import annotations

from dataclasses import dataclass, replace

from plaudit.plan import memory
from plaudit.plan.constants import Constants
from plaudit.plan.cost import Cost, cost
from plaudit.plan.generation import Generation, generate
from plaudit.plan.hardware import Cluster, cluster
from plaudit.plan.layouts import GenerationLayout, TrainingLayout
from plaudit.plan.model_shape import ModelShape
from plaudit.plan.parts import Parts, Phase
from plaudit.plan.plans import Plan
from plaudit.plan.term import Term
from plaudit.plan.workload import Workload

MOST_SEQUENCES = 1024
"""That an engine schedules at once (vLLM's default for large devices)."""


@dataclass(frozen=True, slots=True)
class Shortage:
    """A constraint that the plan breaks, and by how much."""

    what: str
    needed: float
    available: float

    def __str__(self) -> str:
        return f"{self.what}: needs {self.needed / 1e9:.1f} GB, has {self.available / 1e9:.1f} GB"

    @property
    def factor(self) -> float:
        return self.needed / max(self.available, 1.0)


@dataclass(frozen=True, slots=True)
class Prediction:
    workload: Workload
    plan: Plan
    phases: tuple[Phase, ...]
    step: Term
    cost: Cost
    host: Term
    """Bytes of one node's host memory."""
    concurrency: float
    waves: float
    shortages: tuple[Shortage, ...]
    trainer_waits: float = 0.0

    @property
    def fits(self) -> bool:
        return not self.shortages

    @property
    def peak(self) -> Term:
        return max((phase.memory for phase in self.phases), key=lambda found: found.value)

    def phase(self, name: str) -> Phase:
        return next(phase for phase in self.phases if phase.name == name)


def predict(
    model: str | ModelShape | Workload, hardware: str | Cluster, placement: str = "colocated", *,
    generation: GenerationLayout | None = None, training: TrainingLayout | None = None,
    generation_hardware: str | Cluster | None = None, channel: str | None = None, staleness: int | None = None,
    constants: Constants | None = None, **workload: object,
) -> Prediction:  # fmt: skip
    """The run of `model` on `hardware` under one plan. `workload`: fields of Workload (prompt, response, batch, ...).

    Without layouts: generation in replicas of one device, training with FSDP over all devices.
    """
    if isinstance(model, Workload):
        work = replace(model, **workload)  # type: ignore[arg-type]
    else:
        shape = ModelShape.named(model) if isinstance(model, str) else model
        work = Workload(shape, **workload)  # type: ignore[arg-type]
    where = cluster(hardware) if isinstance(hardware, str) else hardware
    asked = generation_hardware or where
    engines = cluster(asked) if isinstance(asked, str) else asked
    plan = Plan(
        placement, where, engines, generation or GenerationLayout(),
        training or TrainingLayout(dp=where.devices, zero=3),
        channel or "", (1 if placement == "async" else 0) if staleness is None else staleness,
    )  # fmt: skip
    plan = replace(plan, channel=channel or default_channel(plan, work))
    return predict_plan(work, plan, constants or Constants())


def default_channel(plan: Plan, workload: Workload) -> str:
    if plan.shared:
        return "shared" if plan.one_module(workload.dtype, workload.engine_dtype) else "ipc"
    return "reshard"


def predict_plan(
    workload: Workload, plan: Plan, constants: Constants, generated: Generation | None = None, simulate: bool = True
) -> Prediction:
    """`generated` may be handed in where many plans share it. Without `simulate` async is the slower of its sides."""
    plan.check(workload.model)
    run = Parts(workload, plan, constants)
    pool, engine_memory = run.engine_memory()
    at_once = min(MOST_SEQUENCES * plan.generation.attention_groups, memory.concurrency(run.replica, pool, run.grown))
    shortages = []
    if at_once < 1:
        one = memory.sequence_bytes(run.replica, run.grown) / plan.generation.attention_groups
        short = engine_memory.value + one
        shortages.append(
            Shortage("generation, weights and the cache of one sequence", short, engine_memory.value + pool)
        )
    made = generated or generate(
        run.replica, plan.replicas, workload.batch, workload.prompt, workload.lengths(constants), max(1.0, at_once),
        workload.samples_per_prompt,
    )  # fmt: skip
    phases, step, waits = run.timeline(made, engine_memory, pool, at_once, simulate)
    for phase in phases:
        limit = (plan.generation_cluster if phase.pool == "generation" else plan.cluster).accelerator.memory
        if phase.memory.value > limit:
            shortages.append(Shortage(f"{phase.name}, per device", phase.memory.value, limit))
    host = run.host()
    if host.value > plan.cluster.host_memory:
        shortages.append(Shortage("host memory, per node", host.value, plan.cluster.host_memory))
    spent = cost(plan, step.value, workload.generated_tokens, workload.steps)
    return Prediction(workload, plan, phases, step, spent, host, at_once, made.waves, tuple(shortages), waits)
