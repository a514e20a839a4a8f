"""Prediction of one fully specified run: memory and time of every phase, step time, cost, and what does not fit."""

from __future__ import annotations

from dataclasses import dataclass, replace

from plaudit.plan.cost.cost import Cost, cost
from plaudit.plan.cost.generation import Generation, generate
from plaudit.plan.cost.parts import Parts, Phase, Shortage
from plaudit.plan.cost.plans import Plan
from plaudit.plan.cost.term import Term
from plaudit.plan.own_trainer import missing
from plaudit.plan.shape.constants import Constants
from plaudit.plan.shape.hardware import Cluster, cluster
from plaudit.plan.shape.layouts import GenerationLayout, TrainingLayout
from plaudit.plan.shape.model_shape import ModelShape
from plaudit.plan.shape.workload import Workload


@dataclass(frozen=True, slots=True)
class Prediction:
    workload: Workload
    plan: Plan
    phases: tuple[Phase, ...]
    step: Term
    cost: Cost
    host: Term
    """Host memory of one node, in bytes."""
    concurrency: float
    waves: float
    shortages: tuple[Shortage, ...]
    trainer_waits: float = 0.0

    @property
    def note(self) -> str:
        """Explanation of numbers that may surprise a reader."""
        notes, longest = [], max(self.phases, key=lambda phase: phase.seconds.value)
        if idle := self.plan.idle_devices:
            engines = f"{self.plan.replicas} × {self.plan.generation.devices}"
            notes.append(
                f"{idle} of {self.plan.generation_cluster.devices} devices generate nothing: engines take {engines}"
            )
        if self.step.value < 0.999 * longest.seconds.value:
            phase = f"the {longest.seconds.value:.3g} s of its {longest.name}"
            notes.append(f"a step is shorter than {phase}, since several batches generate at the same time")
        return "; ".join(notes)

    @property
    def fits(self) -> bool:
        return not self.shortages

    @property
    def peak(self) -> Term:
        return max((phase.memory for phase in self.phases), key=lambda term: term.value)

    @property
    def missing(self) -> tuple[str, ...]:
        """Features that Plaudit's own trainer lacks for the plan."""
        return missing(self.workload, self.plan)

    @property
    def runnable(self) -> bool:
        return not self.missing

    def phase(self, name: str) -> Phase:
        return next(phase for phase in self.phases if phase.name == name)


def predict(
    model: str | ModelShape | Workload, hardware: str | Cluster, placement: str = "colocated", *,
    generation: GenerationLayout | None = None, training: TrainingLayout | None = None,
    generation_hardware: str | Cluster | None = None, channel: str | None = None, staleness: int | None = None,
    constants: Constants | None = None, **workload: object,
) -> Prediction:  # fmt: skip
    """Predict the run of `model` on `hardware`. `workload`: fields of Workload (prompt, response, batch, ...).

    Default layouts: generation in replicas of one device, training with FSDP over all devices.
    """
    if isinstance(model, Workload):
        work = replace(model, **workload)  # type: ignore[arg-type]
    else:
        shape = ModelShape.named(model) if isinstance(model, str) else model
        work = Workload(shape, **workload)  # type: ignore[arg-type]
    where = cluster(hardware) if isinstance(hardware, str) else hardware
    requested = generation_hardware or where
    engines = cluster(requested) if isinstance(requested, str) else requested
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
    """Predict one plan. `generated` can be passed if many plans share it. Without `simulate`, async takes as long as
    its slower side plus the publication."""
    plan.check(workload.model)
    run = Parts(workload, plan, constants)
    capacity = run.capacity()
    made = generated or generate(
        run.replica, plan.replicas, workload.batch, workload.prompt, workload.lengths(constants),
        max(1.0, capacity.sequences), workload.group,
    )  # fmt: skip
    phases, step, waits = run.timeline(made, capacity, simulate)
    spent = cost(plan, step.value, workload.generated_tokens, workload.steps)
    return Prediction(
        workload, plan, phases, step, spent, run.host(), capacity.sequences, made.waves, capacity.shortages, waits
    )
