"""Expected memory of a run per phase and owner, by the planner's formulas, for comparison with the measurement.

Prompts are assumed as long as held-out ones, responses as in the first evaluation; before it, half the maximum length.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace

from plaudit.config import RlRecipe
from plaudit.errors import PlauditError
from plaudit.models.catalog import resolve
from plaudit.plan.cost.prediction import Prediction, predict
from plaudit.plan.recipes import layout_of, workload_of
from plaudit.plan.shape.constants import Constants
from plaudit.plan.shape.hardware import cluster
from plaudit.plan.shape.layouts import GenerationLayout
from plaudit.plan.shape.workload import Workload

# Ledger phase -> planner phase, and planner memory term -> ledger owner.
PHASES = {"generate": "generation", "reference": "scoring", "old": "scoring", "update": "training"}
OWNERS = {
    "weights": "policy weights", "engine weights": "policy weights", "gradients": "policy gradients",
    "reference": "reference weights", "critic weights": "critic weights", "critic optimizer": "critic optimizer",
    "reward model": "reward weights", "cache": "KV",
}  # fmt: skip
HUGE = 1e15
"""Device memory in bytes on which everything fits: the forecast does not depend on the actual device."""


def forecast(
    recipe: RlRecipe, program: int, *, prompt: float | None = None, response: float | None = None, cache: int = 0
) -> dict[str, dict[str, int]]:
    """Return bytes by phase and owner; empty if the formulas do not apply.

    program             host memory of the process itself
    prompt, response    mean tokens, if known
    cache               bytes of the engine's KV cache if it is preallocated; 0 = as much as is used
    """
    if recipe.model.lora is not None or recipe.placement.name != "colocated":
        return {}
    try:
        work = workload_of(recipe, resolve, prompt, response)
        plan = _prediction(recipe, replace(work, cache_bytes=cache or work.cache_bytes))
    except PlauditError:  # the planner has no formulas for this architecture
        return {}
    by_phase = {name: _owners(plan, phase, program) for name, phase in PHASES.items()}
    runs = {"reference": plan.workload.has_reference, "old": plan.workload.takes_old}
    return {name: owners for name, owners in by_phase.items() if runs.get(name, True)}


def _prediction(recipe: RlRecipe, work: Workload) -> Prediction:
    place = cluster(f"1x{recipe.resources.ranks}xH100")
    chip = replace(place.accelerator, memory=HUGE)
    # CUDA graphs and the reserve have no owner: only tensors are counted.
    constants = replace(Constants(), reserve_bytes=0.0, graph_bytes=0.0)
    rollout = recipe.resources.rollout
    return predict(
        work, replace(place, accelerator=chip), "colocated",
        generation=GenerationLayout(rollout.tensor_parallel, rollout.pipeline_parallel),
        training=layout_of(recipe, work), constants=constants,
    )  # fmt: skip


def _owners(plan: Prediction, phase: str, program: int) -> dict[str, int]:
    bytes_of: dict[str, float] = {"program": float(program)}
    for part in plan.phase(phase).memory.parts:
        for owner, size in _shares(part.name, part.value, plan.workload.dtype).items():
            bytes_of[owner] = bytes_of.get(owner, 0.0) + size
    return {owner: round(size) for owner, size in bytes_of.items() if size >= 1}


def _shares(name: str, size: float, dtype: str) -> Mapping[str, float]:
    if name.endswith("optimizer"):
        model = "critic" if name.startswith("critic") else "policy"
        if dtype == "fp32":
            return {f"{model} optimizer": size}
        return {f"{model} masters": size / 3, f"{model} optimizer": size * 2 / 3}
    return {OWNERS.get(name, "activations"): size}
