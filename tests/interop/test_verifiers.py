"""Environments written with verifiers' own classes work in training: single-turn and multi-turn."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from tests.interop.environments import run_client

pytestmark = pytest.mark.interop


def trained(directory: Path, taskset: str, numbers: int, steps: int, recipe: dict[str, Any]) -> Any:
    given = {"directory": str(directory), "taskset": taskset, "options": {"numbers": numbers}, "steps": steps}
    found = run_client(".venv-verifiers", "verifiers_run", {**given, "recipe": recipe}, 800)
    assert max(found["reward/errors"]) < 0.05, "on a machine with much else to do an episode may run out of time"
    assert max(found["mismatch/abs_max"]) < 1e-3, "what was sampled is what is learned from"
    assert any(found["policy/grad_norm"])
    return found


def test_a_taskset_of_single_answers_is_learned(tmp_path: Path) -> None:
    found = trained(tmp_path, "sums_single", 5, 12, {"train.prompts_per_step": 16})
    reward = found["reward/mean"]
    assert sum(reward[-4:]) > sum(reward[:4]) + 0.2, reward
    assert max(found["turns/mean"]) == 1


def test_an_environment_in_turns_is_learned_from(tmp_path: Path) -> None:
    found = trained(tmp_path, "sums_turns", 8, 2, {"train.prompts_per_step": 4, "sampling.stop": ["="]})
    assert found["turns/mean"][0] > 5
    assert found["reward/mean"][0] > 0.1
