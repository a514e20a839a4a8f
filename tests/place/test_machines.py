"""Engines on separate machines: a run over TCP and a shared directory matches one process, whichever process dies."""

from __future__ import annotations

import os
import signal
import socket
import stat
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import msgspec
import psutil
import pytest

from plaudit import __version__
from plaudit.config import RlRecipe
from plaudit.errors import ConfigError, EngineLost, RunError
from plaudit.place.engines.engine_server import free_port
from plaudit.place.machines.machine import Leave, generate_for, gpus_of
from plaudit.place.machines.messages import (
    ENDPOINT,
    Accepted,
    Begin,
    CommandStream,
    Done,
    Join,
    Rejected,
    TrainerEndpoint,
)
from plaudit.place.machines.pool import RolloutMachines
from plaudit.place.workers.callback import dial
from plaudit.process.framing import pack
from plaudit.rl.loop import RlTraining
from plaudit.train.run.run import Run
from tests.place.runs import numbers
from tests.place.test_engine_ranks import tiny_run, tokens
from tests.train.rl_world import Silent, recipe
from tests.train.test_ranks import ENV, GRPO, TWO, check_ten, command, steps, written

REMOTE: dict[str, Any] = {"name": "disaggregated"}
ON_MACHINE = {"nodes": 1, "address": "127.0.0.1"}
ENGINE_OF_2 = {**ON_MACHINE, "tensor_parallel": 2}
TEN: dict[str, Any] = {"steps": 10, "eval_every": 5, "show": 4, "checkpoint": {"every": 2}}
Start = Callable[[Sequence[str]], "OnMachine"]
ENDS_WITHIN = 60.0  # whichever process is killed


# In this process, with machines in threads


@contextmanager
def machines_in_threads(run: Path, count: int) -> Iterator[None]:
    """Runs `plaudit rollouts RUN` in the given number of threads. Each ends with the run."""
    threads = [threading.Thread(target=generate_for, args=(run, 60.0, Leave())) for _ in range(count)]
    for thread in threads:
        thread.start()
    yield
    for thread in threads:
        thread.join(60)
        assert not thread.is_alive()


def trained(directory: Path, tree: RlRecipe) -> Silent:
    viewer = Silent()
    with Run(directory, tree) as run, RolloutMachines(tree, directory) as machines:
        endpoint = directory / ENDPOINT
        assert stat.S_IMODE(endpoint.stat().st_mode) == 0o600, "who reads it may generate for the run"
        RlTraining(tree, run, viewer, host=machines).fit()
    assert not endpoint.exists()
    return viewer


def test_engines_on_two_machines_match_the_samples_of_one_process(tmp_path: Path) -> None:
    expected = Silent()
    with Run(tmp_path / "one", tiny_run()) as run:
        RlTraining(tiny_run(), run, expected).fit()
    tree = tiny_run(placement=REMOTE, resources={"rollout": {**ON_MACHINE, "nodes": 2, "processes": 2}})
    with machines_in_threads(tmp_path / "apart", 2):
        actual = trained(tmp_path / "apart", tree)
    assert tokens(tmp_path / "apart") == tokens(tmp_path / "one")
    for mine, theirs in zip(numbers(actual), numbers(expected), strict=True):
        assert mine == pytest.approx(theirs, abs=1e-5)
    assert not actual.warnings


def join(endpoint: TrainerEndpoint, version: str) -> socket.socket:
    sock = dial((endpoint.host, endpoint.port), bytes.fromhex(endpoint.token))
    sock.sendall(pack(Join("other", version)))
    return sock


def test_a_machine_with_another_version_is_rejected_and_the_others_end(tmp_path: Path) -> None:
    tree = tiny_run(placement=REMOTE, resources={"rollout": ON_MACHINE})
    with RolloutMachines(tree, tmp_path) as machines:
        endpoint = msgspec.json.decode((tmp_path / ENDPOINT).read_bytes(), type=TrainerEndpoint)
        with join(endpoint, "0.0.1") as sock:
            report = next(CommandStream().feed(sock.recv(1 << 16)))
        assert report == Rejected(f"other has plaudit 0.0.1, and the trainer {__version__}")
        same = join(endpoint, __version__)
        assert next(CommandStream().feed(same.recv(1 << 16))) == Accepted(str(Path.cwd()))
        assert machines.address == "127.0.0.1"
        assert [machine.name for machine in machines.machines] == ["other"]
    with same:
        assert next(CommandStream().feed(same.recv(1 << 16))) == Done()
        assert not same.recv(1)


def test_waiting_for_machines_and_for_the_trainer_times_out(tmp_path: Path) -> None:
    tree = tiny_run(placement=REMOTE, resources={"rollout": {**ON_MACHINE, "nodes": 2, "processes": 2}})
    with (
        pytest.raises(EngineLost, match=r"0 of 2 rollout machine\(s\) .* connected within 0.1 s: run plaudit rollouts"),
        RolloutMachines(tree, tmp_path, join=0.1) as machines,
    ):
        _ = machines.address
    with pytest.raises(RunError, match=r"no trainer of a run in .* for 0.1 s: start plaudit train with"):
        generate_for(tmp_path, 0.1, Leave())


def test_each_engine_gets_its_own_gpus(monkeypatch: pytest.MonkeyPatch) -> None:
    begin = Begin(7, 1, 4, ("host", 1), b"")
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    assert gpus_of(begin) == {"CUDA_VISIBLE_DEVICES": "4,5,6,7"}
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "7,6,5,4,3,2,1,0")
    assert gpus_of(begin) == {"CUDA_VISIBLE_DEVICES": "3,2,1,0"}
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "0,1,2,3")
    with pytest.raises(ConfigError, match=r"engine 1 of this machine takes the GPUs 4 to 7, and .* has 4"):
        gpus_of(begin)
    assert gpus_of(msgspec.structs.replace(begin, gpus=0)) == {}


@pytest.mark.parametrize(
    ("tables", "rollout", "message"),
    [
        ({"placement": REMOTE}, {"nodes": 2, "processes": 3}, r"engines do not divide evenly over them: 3 / 2 = 1\.5"),
        ({}, {"nodes": 1}, 'placement.name = "colocated" generates where the policy trains'),
        ({"placement": {"name": "hybrid"}}, {"nodes": 1, "processes": 1}, 'placement.name = "hybrid" generates where'),
        ({"placement": {**REMOTE, "channel": "shared"}}, {"nodes": 1}, 'set "collective", "reshard" or "disk"'),
        ({"placement": REMOTE, "ray": "local"}, {"nodes": 1}, 'resources.ray = "local" starts the processes'),
        ({"placement": REMOTE}, {"nodes": 2, "processes": 2, "prefill": 1}, "transfers KV within one machine"),
        ({"placement": REMOTE}, {"nodes": 1, "devices": ["cpu"]}, "are for the trainer's machine: remove them"),
        ({"placement": REMOTE, "engine": {"name": "vllm", "url": "http://a"}}, {"nodes": 1}, "is a server, given by"),
        ({"placement": REMOTE}, {"address": "a"}, r"nodes = 0: set nodes, or remove address"),
    ],
)  # fmt: skip
def test_configurations_unsupported_on_rollout_machines_are_rejected(
    tables: dict[str, Any], rollout: dict[str, Any], message: str
) -> None:
    resources = {"rollout": rollout, **({"ray": tables["ray"]} if "ray" in tables else {})}
    with pytest.raises(ConfigError, match=message):
        recipe(**{key: table for key, table in tables.items() if key != "ray"}, resources=resources)


# On machines connected by a shared directory and TCP; in the tests all are this machine


@dataclass
class OnMachine:
    """A command in its own session, in place of a separate machine."""

    process: subprocess.Popen[str]
    errors: Path

    @property
    def report(self) -> str:
        return self.errors.read_text()

    def ended(self, seconds: float = 300.0) -> int:
        return self.process.wait(seconds)

    def lose(self) -> None:
        """Kills all processes of the machine at once."""
        if self.process.poll() is not None:
            return
        root = psutil.Process(self.process.pid)
        family = [root, *root.children(recursive=True)]
        for strike in (psutil.Process.suspend, psutil.Process.kill):
            for process in family:
                with suppress(psutil.NoSuchProcess):
                    strike(process)
        self.process.wait(10)

    @property
    def engine_ranks(self) -> list[psutil.Process]:
        """The ranks other than rank 0, which is the rollout process."""
        processes = psutil.Process(self.process.pid).children(recursive=True)
        return [process for process in processes if process.name() == "plaudit-rank"]


@pytest.fixture
def start(tmp_path: Path) -> Iterator[Callable[[Sequence[str]], OnMachine]]:
    started: list[OnMachine] = []

    def begin(words: Sequence[str]) -> OnMachine:
        errors = tmp_path / f"machine-{len(started)}.txt"
        with errors.open("w") as file:
            process = subprocess.Popen(words, env=ENV, stderr=file, text=True, start_new_session=True)
        started.append(OnMachine(process, errors))
        return started[-1]

    yield begin
    for each in started:
        each.lose()


def rollouts(run: Path) -> list[str]:
    return [sys.executable, "-m", "plaudit", "rollouts", str(run), "--wait", "120"]


def torchruns(words: Sequence[str]) -> list[list[str]]:
    """One command on each of two machines, with a rank each."""
    port = str(free_port())
    place = ["--nnodes", "2", "--nproc-per-node", "1", "--master-addr", "127.0.0.1", "--master-port", port]
    head = [sys.executable, "-m", "torch.distributed.run", *place]
    return [[*head, "--node-rank", node, *words[1:]] for node in ("0", "1")]


def apart(name: str, channel: str, **rollout: Any) -> list[str]:
    keys = {
        "placement.name": name, "placement.channel": channel, **({"placement.staleness": 0} if name == "async" else {}),
        **{f"resources.rollout.{key}": value for key, value in {**ENGINE_OF_2, **rollout}.items()},
    }  # fmt: skip
    return [word for key, value in keys.items() for word in ("--set", f"{key}={value}")]


def train_words(tmp_path: Path, run: Path, *more: str, shape: tuple[int, ...] = TWO) -> list[str]:
    file = tmp_path / "recipe.toml"
    if not file.exists():
        written(file, GRPO, **TEN)
    return command(file, run, shape, *more)


def first_step(run: Path, trainer: OnMachine) -> None:
    deadline = time.monotonic() + 120
    while not ((run / "events.jsonl").exists() and steps(run)):
        assert trainer.process.poll() is None, trainer.report
        assert time.monotonic() < deadline
        time.sleep(0.05)


@pytest.fixture(scope="module")
def one_process(tmp_path_factory: pytest.TempPathFactory) -> Path:
    run = tmp_path_factory.mktemp("one") / "run"
    tree = recipe(**{**GRPO, "train": {**GRPO["train"], **TEN}})
    with Run(run, tree) as opened:
        RlTraining(tree, opened, Silent()).fit()
    return run


@pytest.mark.slow
@pytest.mark.parametrize(
    ("words", "strike"),
    [
        (apart("disaggregated", "collective"), True),
        (apart("async", "reshard"), False),
        (apart("disaggregated", "disk", tensor_parallel=1, pipeline_parallel=2, nodes=2, processes=2), False),
    ],
    ids=["disaggregated, collective", "async, reshard", "two machines, disk"],
)
def test_a_run_over_machines_matches_one_process(
    words: list[str], strike: bool, one_process: Path, tmp_path: Path, start: Start
) -> None:
    """Including when a rank of the engine is killed after the first step."""
    run = tmp_path / "run"
    engines = [start(rollouts(run)) for _ in range(2 if "resources.rollout.nodes=2" in words else 1)]
    trainers = [start(each) for each in torchruns(train_words(tmp_path, run, *words))]
    if strike:
        first_step(run, trainers[0])
        (rank,) = engines[0].engine_ranks
        rank.kill()
    assert [each.ended() for each in trainers] == [0, 0], trainers[0].report
    assert {each.ended() for each in engines} == {0}
    check_ten(run, one_process)
    if strike:
        assert steps(run)[-1]["rollout/restarts"] == 1


@pytest.mark.slow
def test_a_new_machine_replaces_a_lost_one(one_process: Path, tmp_path: Path, start: Start) -> None:
    run = tmp_path / "run"
    engine = start(rollouts(run))
    trainer = start(train_words(tmp_path, run, *apart("async", "collective"), shape=(1,)))
    first_step(run, trainer)
    other = start(rollouts(run))
    engine.lose()
    assert trainer.ended() == 0, trainer.report
    assert other.ended() == 0
    check_ten(run, one_process)
    assert "was lost with its machine" in trainer.report


@pytest.mark.slow
@pytest.mark.parametrize("victim", ["generates", "trains"])
def test_a_lost_machine_ends_the_run_which_can_be_resumed(
    victim: str, one_process: Path, tmp_path: Path, start: Start
) -> None:
    run = tmp_path / "run"
    words = train_words(tmp_path, run, *apart("disaggregated", "reshard"))
    engine = start(rollouts(run))
    trainers = [start(each) for each in torchruns(words)]
    first_step(run, trainers[0])
    (engine if victim == "generates" else trainers[1]).lose()
    assert trainers[0].ended(ENDS_WITHIN) != 0
    if victim == "generates":
        message = f"in place of a lost one: run plaudit rollouts {run} there, and --resume continues"
        assert message in trainers[0].report
        assert trainers[1].ended(ENDS_WITHIN) != 0
        engine = start(rollouts(run))
    trainers = [start(each) for each in torchruns([*words, "--resume"])]
    assert [each.ended() for each in trainers] == [0, 0], trainers[0].report
    assert engine.ended() == 0
    check_ten(run, one_process)


@pytest.mark.slow
def test_a_machine_that_gets_sigterm_stays_until_the_trainer_has_saved(tmp_path: Path, start: Start) -> None:
    run = tmp_path / "run"
    written(tmp_path / "recipe.toml", GRPO, **{**TEN, "steps": 100_000})
    engine = start(rollouts(run))
    trainer = start(train_words(tmp_path, run, *apart("disaggregated", "collective"), shape=(1,)))
    first_step(run, trainer)
    for machine in (engine, trainer):
        os.kill(machine.process.pid, signal.SIGTERM)
    assert trainer.ended(ENDS_WITHIN) == 2, trainer.report
    assert "stopped by SIGTERM" in trainer.report
    assert engine.ended(ENDS_WITHIN) == 128 + signal.SIGTERM
    assert "is restarted" not in trainer.report
    assert list((run / "checkpoints").glob("step-*"))
