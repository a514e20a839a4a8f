"""A critic over HTTP: the run equals that with a local critic, also when resumed, and no update is applied twice."""

from __future__ import annotations

import json
import time
from collections.abc import Iterator
from pathlib import Path
from subprocess import CompletedProcess
from typing import Any

import pytest
import torch

from plaudit.config import to_toml
from plaudit.config.rl import CriticTable
from plaudit.errors import ConfigError
from plaudit.events import read_events
from plaudit.records import Sample
from plaudit.train.optim.optimizer import NotFinite
from plaudit.train.policy.experience import Experience
from plaudit.train.policy.remote_critic import CriticFailed, RemoteCritic
from tests.command import plaudit_here
from tests.serve.critic_process import CriticProcess
from tests.serve.process import free_port

LR = 2e-3
VOCABULARY = 18


def recipe(directory: Path, critic: dict[str, object], **train: object) -> Path:
    file = directory / "ppo.toml"
    tree = {
        "task": "rl", "seed": 3, "model": {"path": "sums-policy"}, "data": {"world": "sums", "eval_items": 20},
        "reward": {"path": "sums"}, "algorithm": {"name": "ppo", "kl": {"coef": 0.02}}, "critic": critic,
        "train": {
            "steps": 4, "prompts_per_step": 24, "minibatches": 2, "epochs": 2, "lr": 1e-3, "threads": 1,
            "micro_batch_tokens": 300, "checkpoint": {"every": 2}, **train,
        },
        "sampling": {"max_tokens": 48},
    }  # fmt: skip
    file.write_text(to_toml(tree))
    return file


def plaudit_train(file: Path, run: Path, *arguments: str) -> CompletedProcess[str]:
    return plaudit_here("train", str(file), "--out", str(run), *arguments)


def figures(run: Path) -> dict[str, list[float]]:
    """The metrics of every step that depend on the critic."""
    names = ("value/loss", "value/mean", "value/grad_norm", "value/clip", "policy/loss", "return/mean", "advantage/max")
    steps = {e["step"]: e["values"] for e in read_events(run) if e["kind"] == "metric" and "value/loss" in e["values"]}
    return {name: [steps[step][name] for step in sorted(steps)] for name in names}


@pytest.fixture(scope="module")
def local(tmp_path_factory: pytest.TempPathFactory) -> dict[str, list[float]]:
    directory = tmp_path_factory.mktemp("local")
    done = plaudit_train(recipe(directory, {"lr": LR}), directory / "run")
    assert done.returncode == 0, done.stderr
    return figures(directory / "run")


def assert_same(actual: dict[str, list[float]], expected: dict[str, list[float]]) -> None:
    for name, values in expected.items():
        assert actual[name] == pytest.approx(values, abs=1e-5), name


SERVER = {"lr": LR, "micro_batch_tokens": 300}


@pytest.fixture(scope="module")
def shared() -> Iterator[CriticProcess]:
    with CriticProcess({**SERVER, "keep": 100}) as process:
        process.save()
        yield process


@pytest.fixture
def server(shared: CriticProcess) -> CriticProcess:
    """The shared server, restored to its initial state."""
    assert shared.load("step-000001").json()["updates"] == 0
    return shared


@pytest.mark.slow
def test_losses_equal_those_with_a_local_critic(
    server: CriticProcess, local: dict[str, list[float]], tmp_path: Path
) -> None:
    done = plaudit_train(recipe(tmp_path, {"url": server.url}), tmp_path / "run")
    assert done.returncode == 0, done.stderr
    assert server.state()["updates"] == 16
    metrics = figures(tmp_path / "run")
    assert len(metrics["value/loss"]) == 4
    assert metrics["value/loss"][0] > 0
    assert_same(metrics, local)


@pytest.mark.slow
def test_a_resumed_run_restores_the_critic(local: dict[str, list[float]], tmp_path: Path) -> None:
    run, saves = tmp_path / "run", tmp_path / "saves"
    with CriticProcess(SERVER, save_dir=saves) as server:
        done = plaudit_train(recipe(tmp_path, {"url": server.url}, steps=3), run)
        assert done.returncode == 0, done.stderr
        assert server.state()["updates"] == 12, "a step more than the checkpoint has"
        saved_critic = json.loads((run / "checkpoints/step-000002/critic.json").read_text())
        assert saved_critic == {"url": server.url, "save": "step-000001", "updates": 8}
        # The same server, which is ahead of the checkpoint.
        done = plaudit_train(recipe(tmp_path, {"url": server.url}), run, "--resume")
        assert done.returncode == 0, done.stderr
        assert_same(figures(run), local)
        server.kill()
    # Another server, on another port, that has the saves.
    with CriticProcess(SERVER, "--resume", save_dir=saves) as server:
        done = plaudit_train(recipe(tmp_path, {"url": server.url}, steps=5), run, "--resume")
        assert done.returncode == 0, done.stderr
        assert server.state()["updates"] == 20
    # A server that does not have the saves.
    with CriticProcess(SERVER) as server:
        done = plaudit_train(recipe(tmp_path, {"url": server.url}, steps=6), run, "--resume")
        assert done.returncode == 2
        assert "step-00000" in done.stderr


def remote(server: CriticProcess, **options: Any) -> RemoteCritic:
    return RemoteCritic(CriticTable(url=server.url, **options), 0.2, VOCABULARY)


def experience(returns: float = 1.0) -> Experience:
    rows = [((1, 7, 14, 7, 15), (7, 14, 7, 16)), ((1, 8, 14), (9, 15, 12, 2, 5, 6))]
    samples = tuple(
        Sample(p, t, "", (0.0,) * len(t), (0.0,) * len(t), (0,) * len(t), (1,) * len(t), "stop") for p, t in rows
    )
    zeros = torch.zeros(10)
    mask = torch.ones(10, dtype=torch.bool)
    return Experience(samples, mask, zeros, zeros, values=torch.zeros(10), returns=torch.full((10,), returns))


def test_values_are_read_before_each_token_and_after_the_last(server: CriticProcess) -> None:
    with remote(server) as critic:
        data = experience()
        for _ in range(3):
            critic.update(data, 0)
        before, after = critic.values(data.samples)
        expected = server.values([sample.prompt_ids + sample.token_ids for sample in data.samples])
        assert before.tolist() == pytest.approx([*expected[0, 4:8], *expected[1, 2:8]], abs=1e-6)
        assert after.tolist() == pytest.approx([expected[0, 8], expected[1, 8]], abs=1e-6)


def test_killed_worker_causes_a_retry_or_ends_the_run(server: CriticProcess, tmp_path: Path) -> None:
    with remote(server, patience=90.0) as critic:
        critic.update(experience(), 0)
        critic.save(tmp_path)
        server.workers()[0].kill()
        critic.update(experience(), 0)  # nothing was unsaved: retried until the next worker accepts it
        assert server.state()["updates"] == critic.updates == 2
        server.workers()[0].kill()
        time.sleep(0.5)
        with pytest.raises(CriticFailed, match=r"1 unsaved updates are lost.*--resume"):
            critic.update(experience(), 0)
        critic.load(tmp_path)
        assert critic.updates == 1
        critic.update(experience(), 0)


def test_server_errors_are_reported_to_the_run(server: CriticProcess) -> None:
    table = CriticTable(url=server.url)
    with pytest.raises(ConfigError, match=r"--clip 0\.5"):
        RemoteCritic(table, 0.5, VOCABULARY)
    with pytest.raises(ConfigError, match="vocabulary"):
        RemoteCritic(table, 0.2, 10_000)
    with remote(server) as first, remote(server) as second:
        with pytest.raises(NotFinite):
            first.update(experience(1e30), 0)
        first.update(experience(), 0)
        with pytest.raises(CriticFailed, match="another client trains it"):
            second.update(experience(), 0)
        empty = experience()
        empty.mask[:] = False
        assert first.update(empty, 0).metrics() == {}
    started = time.monotonic()
    with pytest.raises(CriticFailed, match=r"critic\.patience"):
        RemoteCritic(CriticTable(url=f"http://127.0.0.1:{free_port()}", patience=1.0), 0.2, VOCABULARY)
    assert time.monotonic() - started < 30
    with pytest.raises(ValueError, match="set it on the server"):
        CriticTable(url="http://127.0.0.1:1", lr=1.0)
    with pytest.raises(ConfigError, match="NO_SUCH_KEY"):
        RemoteCritic(CriticTable(url=server.url, key_env="NO_SUCH_KEY"), 0.2, VOCABULARY)


def test_api_key_is_sent(monkeypatch: pytest.MonkeyPatch) -> None:
    tree = {**SERVER, "api_keys": {"caller": "caller-key"}, "admin_key": "admin-key-1"}
    with CriticProcess(tree) as server:
        monkeypatch.setenv("CRITIC_KEY", "admin-key-1")
        with remote(server, key_env="CRITIC_KEY") as critic:
            critic.update(experience(), 0)
        monkeypatch.setenv("CRITIC_KEY", "caller-key")
        with remote(server, key_env="CRITIC_KEY") as caller:
            assert caller.values(experience().samples)[0].isfinite().all()
            with pytest.raises(CriticFailed, match="admin key"):
                caller.update(experience(), 0)
