"""Training in environments written with verifiers' own classes: single-turn and multi-turn."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from tests.interop.environments import run_client

pytestmark = pytest.mark.interop


def trained(directory: Path, taskset: str, numbers: int, steps: int, recipe: dict[str, Any]) -> Any:
    inputs = {"directory": str(directory), "taskset": taskset, "options": {"numbers": numbers}, "steps": steps}
    metrics = run_client(".venv-verifiers", "verifiers_run", {**inputs, "recipe": recipe}, 800)
    assert max(metrics["reward/errors"]) < 0.05, "on a machine with much else to do an episode may run out of time"
    assert max(metrics["mismatch/abs_max"]) < 1e-3, "what was sampled is what is learned from"
    assert any(metrics["policy/grad_norm"])
    return metrics


def test_policy_learns_a_single_turn_taskset(tmp_path: Path) -> None:
    metrics = trained(tmp_path, "sums_single", 5, 12, {"train.prompts_per_step": 16})
    reward = metrics["reward/mean"]
    assert sum(reward[-4:]) > sum(reward[:4]) + 0.2, reward
    assert max(metrics["turns/mean"]) == 1


def test_policy_trains_in_a_multi_turn_environment(tmp_path: Path) -> None:
    metrics = trained(tmp_path, "sums_turns", 8, 2, {"train.prompts_per_step": 4, "sampling.stop": ["="]})
    assert metrics["turns/mean"][0] > 5
    assert metrics["reward/mean"][0] > 0.1
