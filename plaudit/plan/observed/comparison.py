"""Compare a run with its plan, phase by phase, and fit the constants that reproduce it."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path

from plaudit.config.recipe import load_recipe
from plaudit.config.rl import RlRecipe
from plaudit.config.table import to_toml
from plaudit.errors import ConfigError
from plaudit.plan.cost.plans import Plan
from plaudit.plan.cost.prediction import Prediction, default_channel, predict_plan
from plaudit.plan.observed.measured import Measured, other_run, our_run
from plaudit.plan.observed.refit import refit
from plaudit.plan.options import PlanOptions
from plaudit.plan.own_trainer import own_constants
from plaudit.plan.question import Question, ask
from plaudit.plan.recipes import layout_of, workload_of
from plaudit.plan.shape.constants import Constants
from plaudit.plan.shape.hardware import Cluster, Overrides
from plaudit.plan.shape.layouts import GenerationLayout, TrainingLayout
from plaudit.plan.shape.workload import Workload

CHANNELS = {"disk": "disk", "collective": "broadcast", "shared": "ipc", None: "ipc"}
"""Weight channel of our recipes to the planner's: with shared memory only addresses are passed."""
CLOSE = 0.05
"""Share of a step below which a deviation is not reported."""


@dataclass(frozen=True, slots=True)
class PhaseRow:
    name: str
    planned: float
    measured: float | None
    """None if the log lacks it."""
    refitted: float

    @property
    def factor(self) -> float | None:
        """Measured over planned seconds; None if either is missing or zero."""
        return self.measured / self.planned if self.measured and self.planned else None


@dataclass(frozen=True, slots=True)
class Comparison:
    measured: Measured
    planned: Prediction
    refitted: Prediction
    before: Constants
    after: Constants
    as_run: bool
    """Whether the plan is the one that ran; otherwise the fastest plan, as the run's layouts are unknown."""

    @property
    def rows(self) -> list[PhaseRow]:
        rows = []
        for phase in self.planned.phases:
            again = self.refitted.phase(phase.name).seconds.value
            seconds = self.measured.phases.get(phase.name)
            rows.append(PhaseRow(phase.name, phase.seconds.value, seconds, again))
        return [*rows, PhaseRow("step", self.planned.step.value, self.measured.step, self.refitted.step.value)]

    @property
    def changes(self) -> dict[str, tuple[float, float]]:
        """Changed constants: (before, after)."""
        names = Constants.__dataclass_fields__
        pairs = {name: (getattr(self.before, name), getattr(self.after, name)) for name in names}
        return {name: pair for name, pair in pairs.items() if pair[0] != pair[1]}

    @property
    def headline(self) -> str:
        """How the step compares with the plan, and the phase with the largest deviation in seconds."""
        *phases, step = self.rows
        assert step.factor is not None
        line = f"A step took {step.measured:.3g} s, {step.factor:.2f} times the {step.planned:.3g} s planned"
        logged = [row for row in phases if row.measured is not None]
        far = max(logged, key=lambda row: abs((row.measured or 0.0) - row.planned))
        if abs((far.measured or 0.0) - far.planned) < CLOSE * step.measured:  # type: ignore[operator]
            return f"{line}: no phase deviates by a twentieth of the step"
        times = f", {far.factor:.2f} times as long" if far.factor else ""
        return f"{line}: {far.name} deviates the most, {far.measured:.3g} s for {far.planned:.3g} s{times}"


def compare(options: PlanOptions, resolve: Callable[[str], Path]) -> Comparison:
    assert options.from_run is not None
    if options.hardware is None:
        raise ConfigError(f"--from {options.from_run}: say on what it ran with --hardware, such as 1x8xH100")
    ours = (options.from_run / "events.jsonl").is_file()
    measured = our_run(options.from_run) if ours else other_run(options.from_run)
    question = ask(_with_lengths(options, measured))
    if ours:
        work, plan = _our_plan(options.from_run, question.clusters[0], resolve, measured)
        base, as_run = own_constants(question.constants), True
    else:
        work, base = question.workload, question.constants
        as_run = bool(options.generation_layout and options.training_layout and options.placement)
        plan = _given_plan(options, question) if as_run else _fastest(question)

    if plan.placement == "async":
        measured = measured.overlapped()
    if measured.devices and measured.devices != plan.devices:
        raise ConfigError(f"--hardware has {plan.devices} devices, and by its throughput the run of "
                          f"{options.from_run} had {measured.devices}: give those")  # fmt: skip

    def predicted(constants: Constants) -> Prediction:
        return predict_plan(work, plan, constants)

    after = refit(base, predicted, measured.phases, work.batch)
    return Comparison(measured, predicted(base), predicted(after), base, after, as_run)


def _with_lengths(options: PlanOptions, measured: Measured) -> PlanOptions:
    """Take the batch from the log, and the lengths that the options do not set."""
    if options.model is None and measured.source != "plaudit":
        raise ConfigError(f"--from {options.from_run}: {measured.source}'s log does not name the model: give --model")
    prompt = options.prompt if options.prompt is not None else measured.prompt
    response = options.response if options.response is not None else measured.response
    longest = options.max_response or (measured.longest or 0.0)
    return replace(options, prompt=prompt, response=response, max_response=max(longest, response or 0.0) or 0.0,
                   batch=measured.batch or options.batch)  # fmt: skip


def _our_plan(run: Path, place: Cluster, resolve: Callable[[str], Path], measured: Measured) -> tuple[Workload, Plan]:
    recipe = load_recipe(run / "recipe.toml")
    if not isinstance(recipe, RlRecipe):
        raise ConfigError(f"--from {run}: a run of task {recipe.task!r}; steps of task 'rl' are planned")
    work = workload_of(recipe, resolve, measured.prompt, measured.response)
    name, resources = recipe.placement.name, recipe.resources
    rollout = resources.rollout
    engines = (rollout.processes or 1) * rollout.ranks if name in ("disaggregated", "async") else 0
    if place.devices != resources.ranks + engines:
        shape = f"1x{resources.ranks + engines}x{place.accelerator.name}"
        raise ConfigError(f"--hardware {place.name} has {place.devices} devices, and the run {run} took "
                          f"{resources.ranks + engines}: give --hardware {shape}")  # fmt: skip
    trainers = place.part(resources.ranks) if engines else place
    plan = Plan(name, trainers, place.part(engines) if engines else place,
                GenerationLayout(rollout.tensor_parallel, rollout.pipeline_parallel), layout_of(recipe, work),
                CHANNELS[recipe.placement.channel], recipe.placement.staleness if name == "async" else 0)  # fmt: skip
    return work, replace(plan, channel=default_channel(plan, work)) if plan.shared else plan


def _given_plan(options: PlanOptions, question: Question) -> Plan:
    place, work = question.clusters[0], question.workload
    (name,) = options.placement
    generation = GenerationLayout.parse(str(options.generation_layout))
    training = TrainingLayout.parse(str(options.training_layout), int(max(4096, work.prompt + work.longest)))
    plan = Plan(name, place, place, generation, training, "", options.staleness if name == "async" else 0)
    if not plan.shared:
        left = place.devices - training.devices
        if question.generation_cluster is None and left < generation.devices:
            raise ConfigError(f"--training-layout {training}: {training.devices} of {place.devices} devices "
                              f"leave {left} for engines of {generation.devices}; --hardware has all")  # fmt: skip
        engines = question.generation_cluster or place.part(left)
        plan = replace(plan, cluster=place.part(training.devices), generation_cluster=engines)
    plan = replace(plan, channel=options.channel or default_channel(plan, work))
    plan.check(work.model)
    return plan


def _fastest(question: Question) -> Plan:
    return min(question.answer().plans, key=lambda p: p.step.value).plan


def hardware_file(comparison: Comparison, known: Overrides | None) -> str:
    """The current hardware file with the refitted constants, as TOML."""
    tables = known.model_dump(exclude_none=True, exclude_defaults=True) if known else {}
    constants = {name: after for name, (_, after) in comparison.changes.items()}
    note = f"# Refitted on {comparison.measured.steps} steps of a run of {comparison.measured.source}\n"
    return note + to_toml({**tables, "constants": {**tables.get("constants", {}), **constants}})
