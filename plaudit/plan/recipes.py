"""Plan one of our own recipes, and write the recipe that runs a plan."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

from pydantic import ValidationError

from plaudit.config.recipe import load_recipe
from plaudit.config.rl import RlRecipe
from plaudit.config.table import to_toml
from plaudit.errors import ConfigError
from plaudit.plan.cost.prediction import Prediction
from plaudit.plan.question import Outcome
from plaudit.plan.shape.layouts import TrainingLayout
from plaudit.plan.shape.model_shape import ModelShape
from plaudit.plan.shape.workload import Workload

DTYPES = {"float32": "fp32", "bfloat16": "bf16", "float16": "bf16"}
PLANNED = ("processes", "devices", "tensor_parallel", "pipeline_parallel", "nodes")  # of resources.rollout
PROMPT, ANSWERED = 64.0, 0.5
"""Defaults without command-line values: prompt tokens, and response length as a fraction of max_tokens."""


def read_recipe(path: Path) -> RlRecipe:
    recipe = load_recipe(path)
    if not isinstance(recipe, RlRecipe):
        raise ConfigError(f"{path} is of task {recipe.task!r}; --for plans recipes of task 'rl'")
    return recipe


def workload_of(
    recipe: RlRecipe, resolve: Callable[[str], Path], prompt: float | None = None, response: float | None = None
) -> Workload:
    """The planner's workload of a recipe. `resolve` returns the directory of a model, as in the trainer."""

    def shape(name: str) -> ModelShape:
        return replace(ModelShape.from_config(resolve(name) / "config.json"), name=name)

    model = shape(str(recipe.model.path))
    critic = None
    if recipe.critic is not None and not recipe.critic.shared and recipe.critic.url is None:
        critic = shape(recipe.critic.path) if recipe.critic.path else model
    reward = recipe.reward.own.get("path")
    judge = None if recipe.search is None else recipe.search.prm
    lora = recipe.model.lora
    train, longest = recipe.train, float(recipe.sampling.max_tokens)
    # A critic that shares the policy's trunk, or runs on a server, is not a second model here.
    name = "grpo" if critic is None and recipe.algorithm.name == "ppo" else recipe.algorithm.name
    return Workload(
        model, name, prompt or PROMPT, response or max(1.0, ANSWERED * longest), longest,
        train.prompts_per_step * train.samples_per_prompt,
        train.samples_per_prompt, train.epochs * train.minibatches, train.epochs, recipe.algorithm.kl.coef > 0, critic,
        shape(str(reward)) if reward else None, DTYPES[recipe.model.dtype], "", DTYPES[recipe.model.dtype],
        train.steps, plain=True, micro_tokens=train.micro_batch_tokens,
        cache_bytes=recipe.engine.kv_bytes if isinstance(recipe.engine.kv_bytes, int) else 0,
        process=shape(str(judge.path)) if judge is not None and judge.url is None else None,
        process_cache_bytes=judge.kv_bytes if judge is not None and isinstance(judge.kv_bytes, int) else 0,
        lora_rank=lora.rank if lora else 0,
        lora_targets=lora.targets if lora and not isinstance(lora.targets, str) else (),
    )  # fmt: skip


def layout_of(recipe: RlRecipe, work: Workload) -> TrainingLayout:
    """Parallel layout of the recipe's training."""
    ranks = recipe.resources
    return TrainingLayout(
        tp=ranks.tensor_parallel, dp=ranks.data_parallel, cp=ranks.context_parallel, pp=ranks.pipeline_parallel,
        ep=ranks.expert_parallel,
        zero=3 if ranks.ranks > 1 else 0, plain=True, micro_tokens=work.micro_tokens,
        recompute="full" if recipe.model.recompute else "none", offload_optimizer=recipe.train.offload_optimizer,
    )  # fmt: skip


def recipe_for(recipe: RlRecipe, outcome: Outcome) -> tuple[str, Prediction]:
    """The recipe with the fastest plan that our trainer can run and that validates, as TOML."""
    refused = ""
    question = outcome.question
    several_nodes = question.clusters[0].nodes > 1 or question.generation_cluster is not None
    for prediction in outcome.runnable:
        try:
            return _planned(recipe, prediction, several_nodes), prediction
        except ValidationError as error:  # the next plan may avoid it
            refused = error.errors()[0]["msg"]
    raise ConfigError(f"no recipe was written: {refused}" if refused else f"no recipe was written. {outcome.headline}")


def _planned(recipe: RlRecipe, prediction: Prediction, several_nodes: bool) -> str:
    plan = prediction.plan
    tables = recipe.model_dump(exclude_unset=True)  # unset keys keep the preset of a method, unlike our defaults
    apart = not plan.shared
    placement = {**tables.get("placement", {}), "name": plan.placement}
    if plan.channel == "reshard":
        placement["channel"] = "reshard"
    elif apart and several_nodes:  # on one node the default, shared memory, is the fastest
        placement["channel"] = "disk" if plan.channel == "disk" else "collective"
    elif not apart:
        placement.pop("channel", None)
    if plan.placement == "async":
        placement["staleness"] = plan.staleness
    resources = {**tables.get("resources", {}), "data_parallel": plan.training.dp, "tensor_parallel": plan.training.tp}
    own = plan.training
    kinds = {"context_parallel": own.cp, "expert_parallel": own.ep, "pipeline_parallel": own.pp}
    for key, size in kinds.items():
        resources.pop(key, None)
        if size > 1:
            resources[key] = size
    # Disaggregated engines run on their own nodes, unless the recipe uses Ray, which starts single-device engines.
    nodes = plan.generation_cluster.nodes if several_nodes and apart and "ray" not in resources else 0
    torchrun = nodes > 0 or (not apart and plan.generation.devices > 1)
    if several_nodes and not torchrun:  # on one node the command starts its own processes
        resources.setdefault("ray", "auto")
    rollout = {k: v for k, v in resources.pop("rollout", {}).items() if k not in PLANNED}
    cut = plan.generation
    if apart:
        rollout["processes"] = plan.replicas
    if nodes:
        rollout["nodes"] = nodes
    if apart or cut.devices > 1:
        rollout |= {"tensor_parallel": cut.tp, "pipeline_parallel": cut.pp}
    if rollout:
        resources["rollout"] = rollout
    model = {**tables["model"], "recompute": plan.training.recompute == "full"}
    train = {**tables["train"], "offload_optimizer": plan.training.offload_optimizer}
    planned = {**tables, "placement": placement, "resources": resources, "model": model, "train": train}
    changed = RlRecipe.model_validate(planned)
    note = (
        f"# Planned: {plan}\n# {prediction.step.value:.3g} s a step, {prediction.peak.value / 1e9:.3g} GB at the peak\n"
    )
    if several_nodes and torchrun:
        note += "# Started by torchrun on every node"
        note += f" that trains, and by plaudit rollouts on {nodes} that generate" if nodes else ""
        note += f": plaudit launch --nodes {plan.cluster.nodes} writes the job for Slurm or Kubernetes.\n"
    return note + to_toml(changed)
