"""A reward that fails ends the run; the resumed run uses the same prompts as a run in which it did not fail."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from plaudit.errors import RunError
from tests.place.rollout_host import RolloutHost
from tests.place.runs import DAPO, GRPO, assert_equal, samples, small, train
from tests.place.test_async import ages, first_prompts, prompts_of
from tests.place.test_async_ranks import assert_close, written
from tests.train.test_ranks import TWO, command, fork_ranks

FUNCTION = """
from pathlib import Path

def score(prompt, response, truth):
    down = Path(__file__).parent / "down"
    if down.exists() and prompt in down.read_text().splitlines():
        raise ConnectionError("the reward is down")
    return float(response.endswith(f"#{truth}"))
"""
PLACEMENTS: dict[str, dict[str, Any]] = {
    "colocated": {"placement": {"name": "colocated"}},
    "swapped": {"placement": {"name": "swapped"}},
    "hybrid": {"placement": {"name": "hybrid"}},
    "disaggregated": {"placement": {"name": "disaggregated"}},
    "async": {"placement": {"name": "async", "staleness": 0}},
}


def reward(directory: Path) -> dict[str, Any]:
    (directory / "rewards.py").write_text(FUNCTION)
    return {"rule": "function", "function": f"{directory / 'rewards.py'}:score", "on_error": "halt"}


def fail(directory: Path, prompts: list[str]) -> Path:
    (directory / "down").write_text("\n".join(prompts))
    return directory / "down"


@pytest.mark.slow
@pytest.mark.parametrize("tables", [GRPO, DAPO], ids=["grpo", "dapo"])
@pytest.mark.parametrize("name", PLACEMENTS)
def test_resumed_run_equals_a_run_without_the_failure(
    tmp_path: Path, rollout_host: RolloutHost, name: str, tables: dict[str, Any]
) -> None:
    rewards = {**tables, "reward": reward(tmp_path)}
    straight = train(tmp_path / "straight", small(3, rewards), rollout_host)
    run, tree = tmp_path / "run", small(3, rewards, **PLACEMENTS[name])
    second = first_prompts(tree, 48)[8:16]
    down = fail(tmp_path, second)
    with pytest.raises(RunError, match=r"the reward is down.*--resume continues"):
        train(run, tree, rollout_host)
    down.unlink()
    resumed = train(run, tree, rollout_host, resume=True)
    assert samples(run) == samples(tmp_path / "straight")
    straight.seen = straight.seen[-len(resumed.seen) :]
    assert_equal((run, resumed), (tmp_path / "straight", straight))


@pytest.mark.slow
@pytest.mark.parametrize("tables", [GRPO, DAPO], ids=["grpo", "dapo"])
def test_async_run_uses_each_prompt_once_across_a_failure(
    tmp_path: Path, rollout_host: RolloutHost, tables: dict[str, Any]
) -> None:
    tree = small(6, {**tables, "reward": reward(tmp_path)}, placement={"name": "async", "staleness": 2})
    prompts = first_prompts(tree, 200)
    down = fail(tmp_path, prompts[18:22])
    with pytest.raises(RunError, match="the reward is down"):
        train(tmp_path / "run", tree, rollout_host)
    down.unlink()
    train(tmp_path / "run", tree, rollout_host, resume=True)
    used = prompts_of(tmp_path / "run")
    assert len(used) == len(set(used)) == 48
    if tables is GRPO:  # dynamic sampling leaves some out
        assert set(used) == set(prompts[:48])
    assert max(ages(tmp_path / "run")) <= 2


@pytest.mark.slow
@pytest.mark.parametrize("placement", ["colocated", "async"])
def test_resumed_run_of_two_ranks_equals_one_without_the_failure(
    tmp_path: Path, rollout_host: RolloutHost, placement: str
) -> None:
    rewards = {**GRPO, "reward": reward(tmp_path)}
    placed = {"placement": {"name": placement, **({"staleness": 0} if placement == "async" else {})}}
    train(tmp_path / "straight", small(10, rewards), rollout_host)
    file, run = written(tmp_path, 10, rewards, **placed), tmp_path / "run"
    down = fail(tmp_path, first_prompts(small(10, rewards), 48)[24:32])
    with pytest.raises(AssertionError, match="the reward is down"):
        fork_ranks(2, command(file, run, TWO)[3:], tmp_path)
    down.unlink()
    fork_ranks(2, command(file, run, TWO, "--resume")[3:], tmp_path)
    assert_close(run, tmp_path / "straight")
