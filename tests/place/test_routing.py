"""Runs of a mixture whose learner replays the engine's routing: the same trajectory in every placement."""

from pathlib import Path
from typing import Any

import pytest
import torch

from plaudit.config import to_toml
from plaudit.models import load_tokenizer, resolve, save
from plaudit.train.rollouts.dump import Dump
from tests.command import plaudit_here
from tests.core.mixtures import mixture
from tests.forked import ForkedCommand
from tests.place.rollout_host import RolloutHost
from tests.place.runs import assert_equal, samples, train
from tests.train.rl_world import recipe, weights

MOVING = {"steps": 3, "prompts_per_step": 2, "minibatches": 2, "lr": 3e-3, "dump": True, "eval_every": 50}


@pytest.fixture(scope="module")
def policy_path(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save(mixture("qwen3_moe"), load_tokenizer(resolve("sums-policy")), tmp_path_factory.mktemp("mixture") / "m")


def run_of(path: Path, **tables: Any) -> Any:
    train = {**MOVING, "routing_replay": True, **tables.pop("train", {})}
    return recipe(
        model={"path": str(path)}, data={"eval_items": 2}, sampling={"max_tokens": 12}, train=train,
        reward={"rule": "regex", "pattern": "1"}, **tables,
    )  # fmt: skip


@pytest.mark.slow
def test_routing_replay_is_the_same_in_every_placement(
    tmp_path: Path, policy_path: Path, rollout_host: RolloutHost
) -> None:
    colocated = tmp_path / "straight", train(tmp_path / "straight", run_of(policy_path), rollout_host)
    metrics = colocated[1].seen
    assert all(0 < step["mismatch/routing"] < 1 for step in metrics), "the second minibatch has other routers"
    assert all(step["mismatch/abs_max"] < 1e-3 for step in metrics)
    for name in ("disaggregated", "async", "hybrid", "swapped"):
        placement = {"name": name, **({"staleness": 0} if name == "async" else {})}
        actual = train(tmp_path / name, run_of(policy_path, placement=placement), rollout_host)
        assert_equal((tmp_path / name, actual), colocated)


@pytest.mark.slow
def test_an_engine_of_two_ranks_records_the_same_experts_as_one(
    tmp_path: Path, policy_path: Path, rollout_host: RolloutHost
) -> None:
    """Each has half of the experts; losses differ by the rounding of their sums."""
    one = train(tmp_path / "one", run_of(policy_path), rollout_host)
    engine = {"placement": {"name": "disaggregated"}, "resources": {"rollout": {"tensor_parallel": 2}}}
    two = train(tmp_path / "two", run_of(policy_path, **engine), rollout_host)
    drawn = [Dump.find(tmp_path / name).read(1)[0] for name in ("one", "two")]
    assert all(a.token_ids == b.token_ids and a.experts == b.experts for a, b in zip(*drawn, strict=True))
    assert all(sample.experts for sample in drawn[0])
    for mine, theirs in zip(two.seen, one.seen, strict=True):
        assert mine["mismatch/routing"] == theirs["mismatch/routing"] > 0
        assert mine["policy/loss"] == pytest.approx(theirs["policy/loss"], abs=1e-5)


@pytest.mark.slow
def test_a_killed_run_resumes_to_the_same_weights_and_verifies_bit_for_bit(tmp_path: Path, policy_path: Path) -> None:
    file, straight, killed = tmp_path / "recipe.toml", tmp_path / "straight", tmp_path / "killed"
    file.write_text(to_toml(run_of(policy_path, train={"checkpoint": {"every": 1}})))
    done = plaudit_here("train", str(file), "--out", str(straight))
    assert done.returncode == 0, done.stderr
    killed_command = ["-m", "tests.train.struck", str(file), str(killed), "update", "5", "SIGKILL"]  # in the third step
    assert ForkedCommand(killed_command, tmp_path / "output").wait(200) == -9
    done = plaudit_here("train", str(file), "--out", str(killed), "--resume")
    assert done.returncode == 0, done.stderr
    assert samples(killed) == samples(straight)
    expected, actual = weights(straight), weights(killed)
    assert all(torch.equal(actual[name], expected[name]) for name in expected)
    done = plaudit_here("verify", str(straight))
    assert done.returncode == 0, done.stdout
    assert "equal to the bit: step 3" in done.stdout


@pytest.mark.slow
def test_without_routing_replay_no_experts_are_recorded_and_training_differs(
    tmp_path: Path, policy_path: Path, rollout_host: RolloutHost
) -> None:
    plain = train(tmp_path / "plain", run_of(policy_path, train={"routing_replay": False}), rollout_host)
    assert all("mismatch/routing" not in step for step in plain.seen)
    assert all(sample.experts is None for sample in Dump.find(tmp_path / "plain").read(1)[0])
    replayed = train(tmp_path / "replayed", run_of(policy_path), rollout_host)
    assert plain.seen[0]["reward/mean"] == replayed.seen[0]["reward/mean"]
    assert plain.seen[0]["policy/kl_old"] != replayed.seen[0]["policy/kl_old"]
