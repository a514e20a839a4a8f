"""Swapped over ranks: the numbers of one rank, with shards and engine alternating in memory."""

from __future__ import annotations

import math
from collections import defaultdict
from pathlib import Path
from typing import Any

import pytest

from plaudit.events import read_events
from tests.place.test_engine_parts import GRPO, STAGE_ENGINE, TENSOR_ENGINE, ranks_that_generate
from tests.train.test_ranks import (
    PPO,
    STAGES,
    TWO,
    Shape,
    back_to_step_2,
    close,
    command,
    fork_ranks,
    run_alone,
    written,
)

pytestmark = pytest.mark.slow
TENSOR, CONTEXT = (1, 1, 2), (1, 2, 1)
DYNAMIC = {"algorithm": {"name": "dapo", "dynamic": {"rounds": 2}, "kl": {"coef": 0.05}}, "train": GRPO["train"]}
SWAPPED = ("--set", "placement.name=swapped")


def phases(run: Path) -> dict[str, dict[str, int]]:
    """Rank 0's memory by owner in each phase of the last step."""
    by_phase: dict[str, dict[str, int]] = defaultdict(dict)
    for event in read_events(run):
        if event["kind"] == "memory":
            by_phase[event["phase"]] = event["bytes"]
    return by_phase


@pytest.mark.parametrize(
    ("tables", "shape", "rollout"),
    [
        pytest.param(PPO, TWO, {}, id="data"),
        pytest.param(GRPO, TENSOR, TENSOR_ENGINE, id="tensor-tensor"),
        pytest.param({**PPO, "train": {**PPO["train"], "minibatches": 2}}, TWO, STAGE_ENGINE, id="data-stages"),
        pytest.param(DYNAMIC, CONTEXT, TENSOR_ENGINE, id="context-dynamic"),
        pytest.param(GRPO, STAGES, {}, id="stages"),
        pytest.param(PPO, (2, 1, 2), STAGE_ENGINE, id="data-tensor-stages"),
    ],
)
def test_a_run_matches_one_rank_and_each_phase_has_only_the_state_it_needs(
    tables: dict[str, Any], shape: Shape, rollout: dict[str, int], tmp_path: Path
) -> None:
    run_alone(tmp_path / "one", tables)
    file, run, world = written(tmp_path / "recipe.toml", tables), tmp_path / "many", math.prod(shape)
    fork_ranks(world, command(file, run, shape, *SWAPPED, *ranks_that_generate(rollout))[3:], tmp_path)
    close(run, tmp_path / "one")
    for phase, by_owner in phases(run).items():
        # Buffers of a few kilobytes (rotary embedding angles) stay in memory.
        generates, learns = by_owner.get("policy weights", 0) > 20_000, by_owner.get("policy shards", 0) > 20_000
        if phase in ("generate", "evaluate"):
            assert (generates, learns) == (True, False), phase
            assert "policy optimizer" not in by_owner
        elif phase in ("old", "reference", "values", "update", "critic", "checkpoint"):
            assert (generates, learns) == (False, True), phase
            assert "KV" not in by_owner
        elif phase == "publish":
            assert generates
            assert learns
    back_to_step_2(run)
    if world == 2:
        run_alone(run, tables, resume=True)
    else:
        fork_ranks(2, command(file, run, TWO, *SWAPPED, "--resume")[3:], tmp_path)
    close(run, tmp_path / "one")


def test_a_colocated_run_resumes_swapped_on_ranks_that_share_an_engine(tmp_path: Path) -> None:
    run_alone(tmp_path / "one", PPO)
    file, run = written(tmp_path / "recipe.toml", PPO), tmp_path / "many"
    fork_ranks(2, command(file, run, TWO)[3:], tmp_path)
    back_to_step_2(run)
    words = command(file, run, TENSOR, *SWAPPED, *ranks_that_generate(TENSOR_ENGINE), "--resume")
    fork_ranks(2, words[3:], tmp_path)
    close(run, tmp_path / "one")
