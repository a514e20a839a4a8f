"""The plan of one of our own recipes, and the recipe that runs it."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

from plaudit.config.recipe import load_recipe
from plaudit.config.rl import PlacementTable, ResourcesTable, RlRecipe
from plaudit.config.table import to_toml
from plaudit.errors import ConfigError
from plaudit.plan.model_shape import ModelShape
from plaudit.plan.prediction import Prediction
from plaudit.plan.question import Outcome
from plaudit.plan.workload import Workload

DTYPES = {"float32": "fp32", "bfloat16": "bf16", "float16": "bf16"}
PROMPT, ANSWERED = 64.0, 0.5
"""Where the command line does not say: tokens of a prompt, and the part of max_tokens that a response takes."""


def read_recipe(path: Path) -> RlRecipe:
    recipe = load_recipe(path)
    if not isinstance(recipe, RlRecipe):
        raise ConfigError(f"{path} is of task {recipe.task!r}; --for plans recipes of task 'rl'")
    return recipe


def workload_of(
    recipe: RlRecipe, resolve: Callable[[str], Path], prompt: float | None = None, response: float | None = None
) -> Workload:
    """`resolve` finds the directory of a model, as the trainer would."""

    def shape(name: str) -> ModelShape:
        return replace(ModelShape.from_config(resolve(name) / "config.json"), name=name)

    model = shape(str(recipe.model.path))
    critic = None
    if recipe.critic is not None and not recipe.critic.shared and recipe.critic.url is None:
        critic = shape(recipe.critic.path) if recipe.critic.path else model
    reward = recipe.reward.own.get("path")
    train, longest = recipe.train, float(recipe.sampling.max_tokens)
    # A critic on the policy's own trunk, or on a server, is no second model here.
    name = "grpo" if critic is None and recipe.algorithm.name == "ppo" else recipe.algorithm.name
    return Workload(
        model, name, prompt or PROMPT, response or max(1.0, ANSWERED * longest), longest,
        train.prompts_per_step * train.samples_per_prompt,
        train.samples_per_prompt, train.epochs * train.minibatches, train.epochs, recipe.algorithm.kl.coef > 0, critic,
        shape(str(reward)) if reward else None, DTYPES[recipe.model.dtype], "", DTYPES[recipe.model.dtype],
        train.steps, plain=True,
    )  # fmt: skip


def runnable(outcome: Outcome) -> Prediction:
    """The fastest plan that our trainer executes."""
    ours = [prediction for prediction in outcome.plans if not prediction.plan.not_ours()]
    if not ours:
        first = outcome.best.plan
        raise ConfigError(f"no plan that fits can be run by Plaudit's trainer; the fastest wants {first.not_ours()}")
    return ours[0]


def recipe_for(recipe: RlRecipe, prediction: Prediction) -> str:
    """The recipe with the plan's placement, ranks and recomputation, as TOML."""
    plan = prediction.plan
    placement = PlacementTable.model_validate({**recipe.placement.model_dump(), "name": plan.placement})
    wanted = {"data_parallel": plan.training.dp, "tensor_parallel": plan.training.tp}
    known = {**recipe.resources.model_dump(), **wanted}
    changed = recipe.model_copy(
        update={
            "placement": placement,
            "resources": ResourcesTable.model_validate(known),
            "model": recipe.model.model_copy(update={"recompute": plan.training.recompute == "full"}),
        }
    )
    note = (
        f"# Planned: {plan}\n# {prediction.step.value:.3g} s a step, {prediction.peak.value / 1e9:.3g} GB at the peak\n"
    )
    return note + to_toml(changed)
