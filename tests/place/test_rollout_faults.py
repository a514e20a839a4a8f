"""Rollout processes that are killed or stopped while they generate: real processes, real signals."""

import os
import signal
import subprocess
import sys
import threading
import time
from pathlib import Path
from typing import Literal

import psutil
import pytest
import torch

from plaudit.config import to_toml
from plaudit.core import Engine, SamplingParams
from plaudit.errors import ReceiverLost, RequestError
from plaudit.models import load_policy
from plaudit.place.channels.shared import SharedChannel
from plaudit.place.channels.weights import Weights
from plaudit.place.workers import frames, remote_engine
from plaudit.place.workers.fleet import Fleet
from plaudit.place.workers.remote_engine import EngineLost, OwnProcess, RemoteEngine
from plaudit.rl.loop import RlTraining
from tests.place.rollout_host import RolloutHost
from tests.place.runs import GRPO, PPO, assert_equal, samples, small, train
from tests.place.test_async import ages, first_prompts, prompts_of
from tests.train.rl_world import recipe, weights

DISAGGREGATED = {"placement": {"name": "disaggregated"}}


def hit(number: int, when: int, rollout_host: RolloutHost):  # type: ignore[no-untyped-def]
    """Sends the signal to the newest worker while it generates for the step after `when`."""

    def at(training: RlTraining, step: int) -> None:
        if step != when:
            return
        fleet = training.engine
        assert isinstance(fleet, Fleet)
        threading.Thread(target=strike, args=(fleet,)).start()

    def strike(fleet: Fleet) -> None:
        deadline = time.monotonic() + 120
        while time.monotonic() < deadline and not fleet.engines[0].outstanding:
            time.sleep(0.0005)
        os.kill(rollout_host.workers[-1].pid, number)

    return at


@pytest.mark.slow
@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGSTOP])
def test_a_killed_or_stopped_worker_is_replaced_and_the_samples_are_the_same(
    tmp_path: Path, rollout_host: RolloutHost, monkeypatch: pytest.MonkeyPatch, number: signal.Signals
) -> None:
    assert remote_engine.SILENCE_SECONDS <= 30
    monkeypatch.setattr(remote_engine, "SILENCE_SECONDS", 6.0)
    expected = train(tmp_path / "colocated", small(3, GRPO), rollout_host)
    tree = small(3, GRPO, **DISAGGREGATED)
    actual = train(tmp_path / "run", tree, rollout_host, hit(number, 1, rollout_host))
    assert_equal((tmp_path / "run", actual), (tmp_path / "colocated", expected))
    assert actual.seen[-1]["rollout/restarts"] == 1
    (warning,) = actual.warnings
    reason = "was ended by SIGKILL" if number == signal.SIGKILL else "gave no sign of life for 6 s"
    assert reason in warning
    assert "it is restarted" in warning


@pytest.mark.slow
def test_a_worker_killed_during_async_training_loses_no_prompt(tmp_path: Path, rollout_host: RolloutHost) -> None:
    tree = small(6, GRPO, placement={"name": "async", "staleness": 2})
    viewer = train(tmp_path / "run", tree, rollout_host, hit(signal.SIGKILL, 2, rollout_host))
    assert viewer.seen[-1]["rollout/restarts"] == 1
    assert prompts_of(tmp_path / "run") == first_prompts(tree, 48), "no prompt lost, none twice"
    assert all(
        len({s.index for s in step if s.group == g}) == 4 for step in samples(tmp_path / "run") for g in range(8)
    )
    assert max(ages(tmp_path / "run")) <= 2


def remote(
    rollout_host: RolloutHost, keep: Literal["recompute", "continue"] = "recompute"
) -> tuple[RemoteEngine, Fleet, torch.nn.Module]:
    tree = recipe().model_dump(mode="json", exclude_none=True)
    engine = RemoteEngine("rollout 0", frames.Start(tree, ["cpu"], 1, [], keep), rollout_host.start)
    module = load_policy("sums-policy").module
    return engine, Fleet([engine], SharedChannel(), lambda: Weights.of(module), engine.news, lambda _: None), module


PROMPTS = [[1, 5, 6], [1, 7], [1, 5, 6, 9, 4]]
PARAMS = [SamplingParams(n=3, max_tokens=20, seed=seed) for seed in range(3)]


def test_a_remote_engine_behaves_like_a_local_engine(rollout_host: RolloutHost) -> None:
    engine, fleet, module = remote(rollout_host)
    try:
        engine.start()
        assert engine.control("stats")["version"] == 0
        waiting = engine.submit(PROMPTS, PARAMS)
        assert not waiting.done.wait(0.2), "without weights it must not generate"
        fleet.publish(7)
        local = Engine(module, load_policy("sums-policy").tokenizer, version=7)
        assert waiting.done.wait(30)
        assert waiting.result() == local.generate(PROMPTS, PARAMS)
        assert engine.control("health") == {"tokens": 1, "version": 7}
        engine.control("sleep")
        engine.control("wake")
        local.sleep()
        local.wake()
        assert engine.generate(PROMPTS, PARAMS) == local.generate(PROMPTS, PARAMS)
        with pytest.raises(RequestError, match="rollout 0: token id 4711"):
            engine.generate([[4711]], PARAMS[:1])
        engine.cancel(engine.submit(PROMPTS, PARAMS))
        assert engine.outstanding == 0
    finally:
        fleet.close()
    with pytest.raises(ReceiverLost):
        engine.send({})


def test_in_flight_weight_updates_lose_no_tokens(rollout_host: RolloutHost) -> None:
    engine, fleet, module = remote(rollout_host, "continue")
    try:
        fleet.publish(1)
        many = SamplingParams(n=8, max_tokens=150, ignore_eos=True, seed=3)
        call = engine.submit([[1, 5, 6]], [many])
        version = 1
        while not call.done.is_set():
            version += 1
            with torch.no_grad():
                next(module.parameters()).mul_(1.001)
            fleet.publish(version)
        generated = call.result()
        assert [len(sample.token_ids) for sample in generated] == [150] * 8
        assert all(list(sample.versions) == sorted(sample.versions) for sample in generated)
        assert all(len(set(sample.versions)) > 1 for sample in generated), "the weights changed while they were written"
    finally:
        fleet.close()


def test_a_worker_that_dies_three_times_in_a_row_is_not_restarted(rollout_host: RolloutHost) -> None:
    engine, fleet, _ = remote(rollout_host)
    try:
        for _ in range(remote_engine.MOST_DEATHS):
            fleet.publish(0)
            os.kill(rollout_host.workers[-1].pid, signal.SIGKILL)
            with engine.news:
                assert engine.news.wait_for(lambda: engine.lost is not None, 30)
        with pytest.raises(EngineLost, match="3 times in a row without a sample"):
            fleet.publish(0)
    finally:
        fleet.close()


def test_a_worker_that_dies_while_loading_is_restarted(rollout_host: RolloutHost) -> None:
    def host() -> OwnProcess:
        worker = rollout_host.start()
        if engine.restarts == 0:
            os.kill(worker.pid, signal.SIGKILL)
        return worker

    engine, fleet, _ = remote(rollout_host)
    engine._host = host
    try:
        fleet.publish(0)
        assert engine.restarts == 1
        assert len(engine.generate(PROMPTS, PARAMS)) == 9
    finally:
        fleet.close()


def test_a_model_that_cannot_be_loaded_is_reported(rollout_host: RolloutHost) -> None:
    tree = recipe(model={"path": "nowhere"}).model_dump(mode="json", exclude_none=True)
    engine = RemoteEngine("rollout 0", frames.Start(tree, ["cpu"], 1, [], "recompute"), rollout_host.start)
    with pytest.raises(EngineLost, match=r"rollout 0 failed: .*nowhere"):
        engine.start()
    engine.close()


@pytest.mark.slow
@pytest.mark.parametrize("name", ["disaggregated", "async"])
def test_a_killed_trainer_resumes_and_its_workers_end_with_it(
    tmp_path: Path, rollout_host: RolloutHost, name: str
) -> None:
    tables = {**PPO, "train": {**PPO["train"], "checkpoint": {"every": 4}}}
    placed = {"placement": {"name": name, "staleness": 0}}
    train(tmp_path / "straight", small(12, tables), rollout_host)
    tree = small(12, tables, **placed)
    file, run = tmp_path / "recipe.toml", tmp_path / "run"
    file.write_text(to_toml(tree))
    command = [sys.executable, "-m", "plaudit", "train", str(file), "--out", str(run)]
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    child = subprocess.Popen(command, env=environment, stderr=subprocess.DEVNULL, stdout=subprocess.DEVNULL)
    deadline = time.monotonic() + 200
    while time.monotonic() < deadline and not (run / "checkpoints" / "step-000004").exists():
        time.sleep(0.002)
    descendants = psutil.Process(child.pid).children(recursive=True)
    child.kill()
    child.wait(30)
    (worker,) = (each.pid for each in descendants if each.name() == "plaudit-worker")
    assert not (run / "summary.json").exists(), "the run ended before it could be killed"
    while time.monotonic() < deadline and Path(f"/proc/{worker}").exists():
        time.sleep(0.05)
    assert not Path(f"/proc/{worker}").exists(), "the worker outlived its trainer"
    train(run, tree, rollout_host, resume=True)
    assert samples(run) == samples(tmp_path / "straight")
    actual, expected = weights(run), weights(tmp_path / "straight")
    assert all(torch.equal(actual[key], expected[key]) for key in expected)
