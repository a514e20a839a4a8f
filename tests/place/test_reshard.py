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
from tests.place.test_async import ages, asked, prompts_of
from tests.place.test_async_ranks import GRPO, started, until, worker_of, written
from tests.train.rl_world import recipe, weights
from tests.train.test_ranks import STAGES, TWO, Shape, command, fork_ranks, ranks_of, steps

RESHARD = {"placement": {"name": "disaggregated", "channel": "reshard"}}


def has(training: Training, engine: int, seed: int) -> list[Any]:
    """Of every rank of an engine: its version, and which of its tensors are not those of the seed."""
    found = training.ask(engine=engine, ask={"look": seed})["found"]
    return [(each["version"], each["wrong"]) for each in found]


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
def test_every_rank_of_an_engine_gets_its_part_bit_for_bit(shape: tuple[int, int], tensor: int, stages: int) -> None:
    with running(shape, tensor, stages) as (training, _):
        for version in (1, 2):
            done = training.ask(version=version, seed=version, engines=[0])
            assert "error" not in done, done
            assert has(training, 0, version) == [(version, [])] * tensor * stages


@pytest.mark.slow
@pytest.mark.parametrize("victim", [0, 1])
def test_an_engine_that_dies_in_mid_update_is_named_and_another_takes_its_place(victim: int) -> None:
    """The engine that lives has nothing half written that it would serve: no version until it has the whole."""
    with running((2, 2), 2, engines=3) as (training, engines):
        assert "error" not in training.ask(version=1, seed=1, engines=[0, 1])
        training.ask(engine=0, rank=victim, ask_one={"die": int(signal.SIGKILL)})
        done = training.ask(version=2, seed=2, engines=[0, 1])
        assert done["kind"] == "ReceiverLost", done
        assert "engine 0" in done["error"]
        assert "engine 1" not in done["error"]
        assert engines[0].processes[victim].wait() == -signal.SIGKILL
        for version, wrong in has(training, 1, 2):
            assert (version, wrong) in ((None, wrong), (2, []))
        assert "error" not in training.ask(version=2, seed=2, engines=[1, 2])
        assert has(training, 1, 2) == has(training, 2, 2) == [(2, [])] * 2


@pytest.mark.slow
def test_damage_on_the_way_is_noticed() -> None:
    with running((2, 1), 2) as (training, _):
        assert "error" not in training.ask(version=1, seed=1, engines=[0])
        training.ask(engine=0, rank=1, ask_one={"damage": True})
        done = training.ask(version=2, seed=2, engines=[0])
        assert done["kind"] == "WeightsRefused"
        assert "damaged on the way" in done["error"]
        assert "error" not in training.ask(version=2, seed=2, engines=[0])
        assert has(training, 0, 2) == [(2, [])] * 2


@pytest.mark.slow
def test_four_ranks_train_an_engine_of_two_to_the_losses_of_one(tmp_path: Path, rollout_host: RolloutHost) -> None:
    train(tmp_path / "one", small(4, GRPO), rollout_host)
    file, run = written(tmp_path, 4, GRPO, **RESHARD, resources={"rollout": {"tensor_parallel": 2}}), tmp_path / "four"
    fork_ranks(4, command(file, run, (2, 1, 2))[3:], tmp_path)
    assert_same(run, tmp_path / "one")
    for here in steps(run):
        assert "publish/gather_seconds" not in here, "nothing is put together"
        assert here["publish/bytes"] > 0


def assert_same(found: Path, expected: Path) -> None:
    """The samples; losses and weights as far as sums in another order can be."""
    tokens = [[sample.token_ids for sample in batch] for batch in samples(found)]
    assert tokens == [[sample.token_ids for sample in batch] for batch in samples(expected)]
    for here, there in zip(steps(found), steps(expected), strict=True):
        assert here["policy/loss"] == pytest.approx(there["policy/loss"], abs=1e-5)
    for name, tensor in weights(expected).items():
        assert torch.allclose(weights(found)[name], tensor, atol=2e-5), name


@pytest.mark.slow
@pytest.mark.parametrize(
    ("channel", "shape"),
    [
        ("disk", (1, 1, 2)), ("collective", (1, 1, 2)), ("reshard", (1, 1, 2)), ("reshard", (1, 2, 1)),
        ("disk", STAGES), ("collective", STAGES), ("shared", STAGES), ("reshard", STAGES), ("reshard", (2, 1, 1, 2)),
        ("reshard", (1, 1, 2, 2)),
    ],
)  # fmt: skip
def test_ranks_that_share_a_vocabulary_rows_or_layers_send_an_engine_the_weights_of_one(
    tmp_path: Path, rollout_host: RolloutHost, channel: str, shape: Shape
) -> None:
    train(tmp_path / "one", small(3, GRPO), rollout_host)
    placed = {"placement": {"name": "disaggregated", "channel": channel}}
    file, run = written(tmp_path, 3, GRPO, **placed), tmp_path / "two"
    fork_ranks(math.prod(shape), command(file, run, shape)[3:], tmp_path)
    assert_same(run, tmp_path / "one")


@pytest.mark.slow
def test_all_ranks_send_to_an_engine_in_a_lost_ones_place(tmp_path: Path) -> None:
    """While the main rank waits for samples, the others wait for it, and carry out what it needs."""
    placed = {"placement": {"name": "async", "staleness": 2, "channel": "reshard"}}
    file, run = written(tmp_path, 100_000, GRPO, **placed), tmp_path / "run"
    child = started(file, run)
    worker_of(ranks_of(child.pid)[0]).kill()
    until(lambda: steps(run)[-1]["rollout/restarts"] == 1, child)
    child.terminate()
    _, said = child.communicate(timeout=60)
    assert "stopped by SIGTERM at step " in said
    done = len(steps(run))
    fork_ranks(2, command(file, run, TWO, "--resume", "--set", f"train.steps={done + 2}")[3:], tmp_path)
    assert prompts_of(run) == asked(small(6, GRPO), 8 * (done + 2)), "no prompt lost, none twice"
    assert max(ages(run)) <= 2


@pytest.mark.parametrize(
    ("tables", "said"),
    [
        ({"placement": {"name": "hybrid", "channel": "reshard"}}, "are shared"),
        ({"placement": {"name": "disaggregated", "channel": "reshard", "delta": True}}, "placement.delta"),
        ({**RESHARD, "engine": {"name": "vllm", "url": "http://localhost:1"}}, '"vllm" cannot receive'),
    ],
)  # fmt: skip
def test_what_cannot_be_resharded_is_refused(tables: dict[str, Any], said: str) -> None:
    with pytest.raises(ConfigError, match=said):
        recipe(**tables)
