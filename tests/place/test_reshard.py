"""Weights from training shards to engine shards, bit for bit, between real processes over gloo."""

import math
import signal
from pathlib import Path
from typing import Any

import pytest
import torch

from plaudit.errors import ConfigError
from tests.place.reshard_run import Training, running
from tests.place.rollout_host import RolloutHost
from tests.place.runs import samples, small, train
from tests.place.test_async import ages, first_prompts, prompts_of
from tests.place.test_async_ranks import GRPO, started, until, worker_of, written
from tests.train.rl_world import recipe, weights
from tests.train.test_ranks import STAGES, TWO, Shape, command, fork_ranks, ranks_of, steps

RESHARD = {"placement": {"name": "disaggregated", "channel": "reshard"}}


def versions_and_mismatches(training: Training, engine: int, seed: int) -> list[Any]:
    """For every rank of an engine: its version, and the tensors that differ from the model of the seed."""
    replies = training.ask(engine=engine, ask={"look": seed})["found"]
    return [(each["version"], each["wrong"]) for each in replies]


@pytest.mark.parametrize(
    ("shape", "tensor", "stages"),
    [
        pytest.param((2, 2), 2, 1, id="2x2 to 2 tensor ranks"),
        pytest.param((3, 1), 1, 2, id="3x1 to 2 stages", marks=pytest.mark.slow),
        pytest.param((1, 2), 1, 1, id="1x2 to 1", marks=pytest.mark.slow),
        pytest.param((1, 1), 2, 2, id="1 to 2 tensor ranks of 2 stages", marks=pytest.mark.slow),
    ],
)
@pytest.mark.slow
def test_every_engine_rank_receives_its_part_bit_for_bit(shape: tuple[int, int], tensor: int, stages: int) -> None:
    with running(shape, tensor, stages) as (training, _):
        for version in (1, 2):
            reply = training.ask(version=version, seed=version, engines=[0])
            assert "error" not in reply, reply
            assert versions_and_mismatches(training, 0, version) == [(version, [])] * tensor * stages


@pytest.mark.slow
@pytest.mark.parametrize("victim", [0, 1])
def test_an_engine_that_dies_during_an_update_is_named_and_replaced(victim: int) -> None:
    """The surviving engine serves no partial update: it has no version until the update is complete."""
    with running((2, 2), 2, engines=3) as (training, engines):
        assert "error" not in training.ask(version=1, seed=1, engines=[0, 1])
        training.ask(engine=0, rank=victim, ask_one={"die": int(signal.SIGKILL)})
        reply = training.ask(version=2, seed=2, engines=[0, 1])
        assert reply["kind"] == "ReceiverLost", reply
        assert "engine 0" in reply["error"]
        assert "engine 1" not in reply["error"]
        assert engines[0].processes[victim].wait() == -signal.SIGKILL
        for version, wrong in versions_and_mismatches(training, 1, 2):
            assert (version, wrong) in ((None, wrong), (2, []))
        assert "error" not in training.ask(version=2, seed=2, engines=[1, 2])
        assert versions_and_mismatches(training, 1, 2) == versions_and_mismatches(training, 2, 2) == [(2, [])] * 2


@pytest.mark.slow
def test_corruption_in_transit_is_detected() -> None:
    with running((2, 1), 2) as (training, _):
        assert "error" not in training.ask(version=1, seed=1, engines=[0])
        training.ask(engine=0, rank=1, ask_one={"damage": True})
        reply = training.ask(version=2, seed=2, engines=[0])
        assert reply["kind"] == "WeightsRefused"
        assert "damaged on the way" in reply["error"]
        assert "error" not in training.ask(version=2, seed=2, engines=[0])
        assert versions_and_mismatches(training, 0, 2) == [(2, [])] * 2


@pytest.mark.slow
def test_four_training_ranks_with_an_engine_of_two_match_one_rank(tmp_path: Path, rollout_host: RolloutHost) -> None:
    train(tmp_path / "one", small(4, GRPO), rollout_host)
    file, run = written(tmp_path, 4, GRPO, **RESHARD, resources={"rollout": {"tensor_parallel": 2}}), tmp_path / "four"
    fork_ranks(4, command(file, run, (2, 1, 2))[3:], tmp_path)
    assert_same(run, tmp_path / "one")
    for metrics in steps(run):
        assert "publish/gather_seconds" not in metrics, "nothing is put together"
        assert metrics["publish/bytes"] > 0


def assert_same(actual: Path, expected: Path) -> None:
    """The same samples; losses and weights equal up to the order of summation."""
    tokens = [[sample.token_ids for sample in batch] for batch in samples(actual)]
    assert tokens == [[sample.token_ids for sample in batch] for batch in samples(expected)]
    for here, there in zip(steps(actual), steps(expected), strict=True):
        assert here["policy/loss"] == pytest.approx(there["policy/loss"], abs=1e-5)
    for name, tensor in weights(expected).items():
        assert torch.allclose(weights(actual)[name], tensor, atol=2e-5), name


@pytest.mark.slow
@pytest.mark.parametrize(
    ("channel", "shape"),
    [
        ("disk", (1, 1, 2)), ("collective", (1, 1, 2)), ("reshard", (1, 1, 2)), ("reshard", (1, 2, 1)),
        ("disk", STAGES), ("collective", STAGES), ("shared", STAGES), ("reshard", STAGES), ("reshard", (2, 1, 1, 2)),
        ("reshard", (1, 1, 2, 2)),
    ],
)  # fmt: skip
def test_weights_published_from_split_ranks_match_those_of_one_rank(
    tmp_path: Path, rollout_host: RolloutHost, channel: str, shape: Shape
) -> None:
    train(tmp_path / "one", small(3, GRPO), rollout_host)
    placed = {"placement": {"name": "disaggregated", "channel": channel}}
    file, run = written(tmp_path, 3, GRPO, **placed), tmp_path / "two"
    fork_ranks(math.prod(shape), command(file, run, shape)[3:], tmp_path)
    assert_same(run, tmp_path / "one")


@pytest.mark.slow
def test_all_ranks_send_weights_to_a_replacement_engine(tmp_path: Path) -> None:
    """While the main rank waits for samples, the other ranks wait for its orders and execute them."""
    placed = {"placement": {"name": "async", "staleness": 2, "channel": "reshard"}}
    file, run = written(tmp_path, 100_000, GRPO, **placed), tmp_path / "run"
    child = started(file, run)
    worker_of(ranks_of(child.pid)[0]).kill()
    until(lambda: steps(run)[-1]["rollout/restarts"] == 1, child)
    child.terminate()
    _, stderr = child.communicate(timeout=60)
    assert "stopped by SIGTERM at step " in stderr
    done = len(steps(run))
    fork_ranks(2, command(file, run, TWO, "--resume", "--set", f"train.steps={done + 2}")[3:], tmp_path)
    assert prompts_of(run) == first_prompts(small(6, GRPO), 8 * (done + 2)), "no prompt lost, none twice"
    assert max(ages(run)) <= 2


@pytest.mark.parametrize(
    ("tables", "message"),
    [
        ({"placement": {"name": "hybrid", "channel": "reshard"}}, "are shared"),
        ({"placement": {"name": "disaggregated", "channel": "reshard", "delta": True}}, "placement.delta"),
        ({**RESHARD, "engine": {"name": "vllm", "url": "http://localhost:1"}}, '"vllm" cannot receive'),
    ],
)  # fmt: skip
def test_configurations_unsupported_by_reshard_are_rejected(tables: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        recipe(**tables)
