"""Runs in any placement, and comparison of two runs."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

from plaudit.config import RlRecipe
from plaudit.records import Sample
from plaudit.rl.loop import RlTraining
from plaudit.train.rollouts.dump import Dump
from plaudit.train.run.run import Run
from tests.place.rollout_host import RolloutHost
from tests.train.rl_world import Silent, recipe, weights

SMALL = {"prompts_per_step": 8, "samples_per_prompt": 4, "eval_every": 2, "dump": True}
GRPO: dict[str, Any] = {"algorithm": {"name": "grpo"}}
PPO: dict[str, Any] = {
    "algorithm": {"name": "ppo", "kl": {"coef": 0.05}}, "reward": {"path": "sums"}, "train": {"minibatches": 2},
}  # fmt: skip
DAPO: dict[str, Any] = {"algorithm": {"name": "dapo", "dynamic": {"rounds": 3}}}
OWN_AFFAIRS = ("time/", "perf/", "publish/", "rollout/")  # metrics that a placement may change


def small(steps: int, tables: dict[str, Any], **more: Any) -> RlRecipe:
    return recipe(**{**tables, **more, "train": {**SMALL, "steps": steps, **tables.get("train", {})}})


class Watched(Silent):
    """Calls `at` after each step."""

    def __init__(self, at: Callable[[RlTraining, int], None] | None = None) -> None:
        super().__init__()
        self.at = at
        self.training: RlTraining | None = None

    def step(self, step: int, metrics: dict[str, float]) -> None:
        super().step(step, metrics)
        if self.at is not None and self.training is not None:
            self.at(self.training, step)


def train(
    directory: Path, tree: RlRecipe, rollout_host: RolloutHost, at: Callable[[RlTraining, int], None] | None = None,
    **options: Any,
) -> Watched:  # fmt: skip
    viewer = Watched(at)
    with Run(directory, tree, **options) as run:
        viewer.training = RlTraining(tree, run, viewer, host=rollout_host.start)
        viewer.training.fit()
    return viewer


def samples(directory: Path) -> list[tuple[Sample, ...]]:
    """The samples of each step, bit for bit."""
    dump = Dump.find(directory)
    return [dump.read(step)[0] for step in dump.steps()]


def numbers(viewer: Silent) -> list[dict[str, float]]:
    return [{k: v for k, v in seen.items() if not k.startswith(OWN_AFFAIRS)} for seen in viewer.seen]


def assert_equal(actual: tuple[Path, Silent], expected: tuple[Path, Silent]) -> None:
    assert samples(actual[0]) == samples(expected[0])
    assert numbers(actual[1]) == numbers(expected[1])
    actual_weights, expected_weights = weights(actual[0]), weights(expected[0])
    assert actual_weights.keys() == expected_weights.keys()
    assert all(torch.equal(actual_weights[name], expected_weights[name]) for name in expected_weights)
