"""async over several training ranks: the numbers of one rank, bounded staleness, and recovery when a process dies. Real
processes, gloo."""

import math
import os
import signal
import subprocess
import time
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import Any

import psutil
import pytest
import torch

from plaudit.config import to_toml
from plaudit.place.async_rollouts import FILE
from tests.place.rollout_host import RolloutHost
from tests.place.runs import samples, small, train
from tests.place.test_async import ages, first_prompts, prompts_of
from tests.train.rl_world import weights
from tests.train.test_ranks import ENV, LIMIT, TWO, Shape, command, fork_ranks, ranks_of, steps, wait_for_first_step

pytestmark = pytest.mark.slow

# A low learning rate: Adam's first steps have the size of the rate for any gradient, which amplifies rounding error.
GRPO: dict[str, Any] = {
    "algorithm": {"name": "grpo", "kl": {"coef": 0.05}}, "train": {"lr": 3e-5, "checkpoint": {"every": 5}},
}  # fmt: skip
PPO: dict[str, Any] = {
    "algorithm": {"name": "ppo", "kl": {"coef": 0.05}}, "reward": {"path": "sums"},
    "train": {"lr": 3e-5, "minibatches": 2, "checkpoint": {"every": 5}},
}  # fmt: skip
TOGETHER = {"placement": {"name": "async", "staleness": 0}}
AHEAD = {"placement": {"name": "async", "staleness": 2}}


def written(directory: Path, count: int, tables: dict[str, Any], **placed: Any) -> Path:
    file = directory / "recipe.toml"
    file.write_text(to_toml(small(count, tables, **placed)))
    return file


def assert_close(actual: Path, expected: Path) -> None:
    """The same samples; losses and weights equal up to the order of summation."""
    tokens = [[sample.token_ids for sample in batch] for batch in samples(actual)]
    assert tokens == [[sample.token_ids for sample in batch] for batch in samples(expected)]
    assert len(steps(actual)) == len(steps(expected)) == 10
    for here, there in zip(steps(actual), steps(expected), strict=True):
        assert here["policy/loss"] == pytest.approx(there["policy/loss"], abs=1e-5)
        assert here["reward/mean"] == pytest.approx(there["reward/mean"], abs=1e-6)
    for name, tensor in weights(expected).items():
        assert torch.allclose(weights(actual)[name], tensor, atol=2e-5), name


@pytest.mark.parametrize(
    ("tables", "shape"),
    [(GRPO, TWO), (PPO, TWO), (GRPO, (1, 1, 2)), (GRPO, (2, 1, 2)), (GRPO, (1, 2, 1))],
    ids=["grpo-2x1x1", "ppo-2x1x1", "grpo-1x1x2", "grpo-2x1x2", "grpo-1x2x1"],
)
def test_ten_steps_at_staleness_0_match_one_rank_and_a_synchronous_run(
    tables: dict[str, Any], shape: Shape, tmp_path: Path, rollout_host: RolloutHost
) -> None:
    train(tmp_path / "one", small(10, tables, **TOGETHER), rollout_host)
    train(tmp_path / "synchronous", small(10, tables, placement={"name": "disaggregated"}), rollout_host)
    file, run = written(tmp_path, 10, tables, **TOGETHER), tmp_path / "many"
    fork_ranks(math.prod(shape), command(file, run, shape)[3:], tmp_path)
    assert_close(run, tmp_path / "one")
    assert_close(run, tmp_path / "synchronous")


def test_checkpoints_resume_across_one_and_two_ranks(tmp_path: Path, rollout_host: RolloutHost) -> None:
    train(tmp_path / "one", small(10, GRPO, **TOGETHER), rollout_host)
    file, run = written(tmp_path, 10, GRPO, **TOGETHER), tmp_path / "run"
    fork_ranks(2, command(file, run, TWO, "--set", "train.steps=4", "--set", "train.checkpoint.every=4")[3:], tmp_path)
    train(run, small(7, GRPO, **TOGETHER), rollout_host, resume=True)
    fork_ranks(2, command(file, run, TWO, "--resume")[3:], tmp_path)
    assert_close(run, tmp_path / "one")


def test_two_ranks_with_staleness_2_use_each_prompt_once_within_the_bound(tmp_path: Path) -> None:
    file, run = written(tmp_path, 6, GRPO, **AHEAD), tmp_path / "run"
    fork_ranks(2, command(file, run, TWO)[3:], tmp_path)
    assert 0 < max(ages(run)) <= 2
    assert prompts_of(run) == first_prompts(small(6, GRPO), 48), "in their order, none twice, none left out"
    assert all(values["publish/gather_bytes"] == values["publish/bytes"] for values in steps(run))


def started(file: Path, run: Path, *more: str) -> "subprocess.Popen[str]":
    child = subprocess.Popen(command(file, run, TWO, *more), env=ENV, stderr=subprocess.PIPE, text=True)
    wait_for_first_step(run, child)
    return child


def worker_of(rank: psutil.Process) -> psutil.Process:
    (worker,) = [each for each in rank.children(recursive=True) if each.name() == "plaudit-worker"]
    return worker


def until(condition: Callable[[], bool], child: "subprocess.Popen[str]") -> None:
    deadline = time.monotonic() + LIMIT
    while not condition():
        assert child.poll() is None, child.communicate()[1]
        assert time.monotonic() < deadline
        time.sleep(0.05)


def test_a_killed_rollout_process_is_replaced_and_sigterm_saves_pending_prompts(tmp_path: Path) -> None:
    file, run = written(tmp_path, 100_000, GRPO, **AHEAD), tmp_path / "run"
    child = started(file, run)
    main = ranks_of(child.pid)[0]
    worker_of(main).kill()
    until(lambda: steps(run)[-1]["rollout/restarts"] == 1, child)
    child.terminate()
    _, stderr = child.communicate(timeout=60)
    assert child.returncode == 2
    assert "stopped by SIGTERM at step " in stderr
    done = len(steps(run))
    (latest,) = [path for path in (run / "checkpoints").glob("step-*") if path.name == f"step-{done:06d}"]
    assert (latest / FILE).exists()
    fork_ranks(2, command(file, run, TWO, "--resume", "--set", f"train.steps={done + 4}")[3:], tmp_path)
    assert prompts_of(run) == first_prompts(small(6, GRPO), 8 * (done + 4)), "no prompt lost, none twice"
    assert max(ages(run)) <= 2


@pytest.mark.parametrize("rank", [0, 1])
def test_a_killed_rank_ends_the_run_which_resumes_from_its_checkpoint(rank: int, tmp_path: Path) -> None:
    file, run = written(tmp_path, 100_000, GRPO, **AHEAD), tmp_path / "run"
    child = started(file, run)
    until(lambda: (run / "checkpoints" / "latest").exists(), child)
    ranks = ranks_of(child.pid)
    worker = worker_of(ranks[0])
    os.kill(ranks[rank].pid, signal.SIGKILL)
    _, stderr = child.communicate(timeout=60)
    assert child.returncode not in (0, None)
    assert f"rank {rank} was ended by SIGKILL" in stderr
    _, alive = psutil.wait_procs([*ranks.values(), worker], timeout=60)
    assert not alive
    last = int((run / "checkpoints" / "latest").read_text().removeprefix("step-"))
    fork_ranks(2, command(file, run, TWO, "--resume", "--set", f"train.steps={last + 3}")[3:], tmp_path)
    assert prompts_of(run) == first_prompts(small(6, GRPO), 8 * (last + 3))


def test_repeated_rollout_failures_end_the_run_and_save_the_state_of_all_ranks(tmp_path: Path) -> None:
    """Only the main rank notices, while it publishes or waits for samples."""
    file, run = written(tmp_path, 100_000, GRPO, **AHEAD), tmp_path / "run"
    child = started(file, run)
    main = ranks_of(child.pid)[0]
    deadline = time.monotonic() + LIMIT
    while child.poll() is None and time.monotonic() < deadline:
        with suppress(psutil.Error, ValueError):
            worker_of(main).kill()
        time.sleep(0.01)
    _, stderr = child.communicate(timeout=60)
    assert child.returncode not in (0, None)
    assert "3 times in a row without a sample" in stderr
    assert "the state is saved: --resume continues" in stderr
    assert (run / "checkpoints" / "latest").exists()
