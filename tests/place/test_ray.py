"""Runs on Ray: two raylets on this machine with one CPU each, so that every second process runs on another node.

Real actors, real signals. Ray is an extra: `make slow` installs it.
"""

from __future__ import annotations

import os
import signal
import socket
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import psutil
import pytest
import torch

from plaudit.config import RlRecipe, to_toml
from plaudit.errors import ConfigError
from plaudit.events import read_events
from plaudit.place.ray import launch as ray_launch
from plaudit.place.ray.cluster import QUIET, check, pools
from plaudit.place.ray.launch import launch_on_ray
from plaudit.rl.loop import RlTraining
from plaudit.train.run.run import Run
from tests.place.runs import GRPO, OWN_AFFAIRS, samples, small
from tests.place.test_async import first_prompts, prompts_of
from tests.train.rl_world import Silent, weights

SECONDS = 240.0
EVERY = {"train": {"checkpoint": {"every": 1, "keep": 9}}}


@pytest.fixture(scope="module")
def cluster() -> Iterator[Any]:
    os.environ.update(QUIET)
    pytest.importorskip("ray", reason="Ray is not installed: pip install 'plaudit[ray]'")
    from ray.cluster_utils import Cluster

    node = {"num_cpus": 1, "object_store_memory": 80 << 20, "include_dashboard": False}
    cluster = Cluster(initialize_head=True, head_node_args=node)
    cluster.add_node(num_cpus=1, object_store_memory=80 << 20)
    yield cluster
    cluster.shutdown()


@pytest.fixture(scope="module")
def straight(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The same run without Ray, in this process."""
    directory = tmp_path_factory.mktemp("straight") / "run"
    tree = small(5, GRPO)
    with Run(directory, tree) as run:
        RlTraining(tree, run, Silent()).fit()
    return directory


def on_ray(directory: Path, tree: RlRecipe, while_it_runs: Callable[[], None] | None = None) -> int:
    file = directory.parent / "recipe.toml"
    file.write_text(to_toml(tree))
    thread = threading.Thread(target=while_it_runs)
    if while_it_runs is not None:
        thread.start()
    code = launch_on_ray(tree, ["train", str(file), "--out", str(directory)], directory)
    if while_it_runs is not None:
        thread.join()
    return code


def numbers(directory: Path) -> dict[int, dict[str, float]]:
    by_step: dict[int, dict[str, float]] = {}
    for event in read_events(directory):
        if event["kind"] == "metric":
            values = {k: v for k, v in event["values"].items() if not k.startswith(OWN_AFFAIRS)}
            by_step.setdefault(event["step"], {}).update(values)
    return by_step


def assert_same(actual: Path, expected: Path) -> None:
    assert samples(actual) == samples(expected)
    assert numbers(actual) == numbers(expected)
    actual_weights, expected_weights = weights(actual), weights(expected)
    assert all(torch.equal(actual_weights[name], expected_weights[name]) for name in expected_weights)


def wait_for(condition: Callable[[], Any]) -> Any:
    deadline = time.monotonic() + SECONDS
    while time.monotonic() < deadline:
        if value := condition():
            return value
        time.sleep(0.01)
    raise AssertionError("it did not come")


def actors(cluster: Any) -> list[psutil.Process]:
    children = [child for pid in raylets(cluster) for child in psutil.Process(pid).children(recursive=True)]
    return [child for child in children if _titled(child, "Actor")]


def kill(name: str, under: list[int], number: int = signal.SIGKILL) -> None:
    """Kills the newest process with that title among the descendants of the given processes."""
    processes = [
        child for pid in under for child in psutil.Process(pid).children(recursive=True) if _titled(child, name)
    ]
    os.kill(max(processes, key=lambda process: process.create_time()).pid, number)


def _titled(process: psutil.Process, name: str) -> bool:
    try:
        return name in " ".join(process.cmdline()[:1]) or name == process.name()
    except psutil.Error:
        return False


def raylets(cluster: Any) -> list[int]:
    return [node.all_processes["raylet"][0].process.pid for node in cluster.list_all_nodes()]


def saved(directory: Path, step: int) -> bool:
    return (directory / "checkpoints" / f"step-{step:06d}").exists()


@pytest.mark.slow
def test_two_nodes_give_the_same_trajectory_also_when_a_rollout_actor_is_killed(
    tmp_path: Path, cluster: Any, straight: Path
) -> None:
    run = tmp_path / "run"
    tree = small(
        5, {**GRPO, **EVERY}, placement={"name": "disaggregated"}, resources={"ray": cluster.address}
    )  # fmt: skip

    def strike() -> None:
        wait_for(lambda: saved(run, 2))
        kill("ray::RolloutActor", raylets(cluster))

    assert on_ray(run, tree, strike) == 0
    assert_same(run, straight)
    last = [e["values"] for e in read_events(run) if e["kind"] == "metric" and "rollout/restarts" in e["values"]][-1]
    assert last["rollout/restarts"] == 1
    assert last["publish/bytes"] > 0


@pytest.mark.slow
def test_a_killed_rank_is_replaced_and_the_run_resumes_from_its_checkpoint(
    tmp_path: Path, cluster: Any, capfd: pytest.CaptureFixture[str]
) -> None:
    run = tmp_path / "run"
    tree = small(5, {**GRPO, **EVERY}, resources={"ray": cluster.address, "data_parallel": 2})

    def strike() -> None:
        wait_for(lambda: saved(run, 2))
        kill("ray::RankActor", raylets(cluster))

    assert on_ray(run, tree, strike) == 0
    assert prompts_of(run) == first_prompts(tree, 40), "no prompt lost, none twice"
    output = capfd.readouterr()
    assert "has died" in output.err
    assert "it resumes from step-" in output.err
    assert "5 steps in" in output.out


@pytest.mark.slow
def test_rewards_in_an_actor_match_also_when_it_is_killed(tmp_path: Path, cluster: Any, straight: Path) -> None:
    run = tmp_path / "run"
    resources = {"ray": cluster.address, "reward": {"processes": 1}}

    def strike() -> None:
        wait_for(lambda: saved(run, 2))
        kill("ray::RewardActor", raylets(cluster))

    assert on_ray(run, small(5, {**GRPO, **EVERY}, resources=resources), strike) == 0
    assert_same(run, straight)


@pytest.mark.slow
def test_stopped_actors_are_killed_and_the_run_continues(
    tmp_path: Path, cluster: Any, capfd: pytest.CaptureFixture[str]
) -> None:
    """A reward actor is stopped, later a rank, and then the driver of the next attempt."""
    run = tmp_path / "run"
    resources = {"ray": cluster.address, "reward": {"processes": 1}}
    tree = small(9, {**GRPO, **EVERY}, resources=resources)

    def strike() -> None:
        wait_for(lambda: saved(run, 2))
        kill("ray::RewardActor", raylets(cluster), signal.SIGSTOP)
        wait_for(lambda: saved(run, 4))
        kill("ray::RankActor", raylets(cluster), signal.SIGSTOP)
        wait_for(lambda: saved(run, 6))
        driver = [each for each in psutil.Process().children() if "plaudit.place.ray.ranks" in each.cmdline()]
        driver[0].suspend()

    assert on_ray(run, tree, strike) == 0
    assert prompts_of(run) == first_prompts(tree, 72), "no prompt lost, none twice"
    output = capfd.readouterr()
    assert "plaudit: rank 0 (pid " in output.out
    assert "was stopped (SIGSTOP) for 10 s and was ended" in output.out
    assert "plaudit: the driver (pid " in output.err
    assert output.err.count("it resumes from step-") == 2
    wait_for(lambda: not actors(cluster))  # Ray ends them once it notices that their driver has ended


@pytest.mark.slow
def test_a_local_ray_that_is_killed_is_started_again(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    pytest.importorskip("ray", reason="Ray is not installed: pip install 'plaudit[ray]'")
    run = tmp_path / "run"
    # Long enough that the run cannot finish before its rank notices that Ray has ended.
    often = {"steps": 300, "eval_every": 300, "checkpoint": {"every": 20}}
    tree = small(300, {**GRPO, "train": often}, resources={"ray": "local"})

    def strike() -> None:
        wait_for(lambda: saved(run, 20))
        for name in ("gcs_server", "raylet"):
            kill(name, [os.getpid()])

    assert on_ray(run, tree, strike) == 0
    assert prompts_of(run) == first_prompts(tree, 2400), "no prompt lost, none twice"
    assert "the run on Ray was lost" in capfd.readouterr().err


@pytest.mark.slow
def test_a_missing_cluster_is_reported_at_once(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    pytest.importorskip("ray", reason="Ray is not installed: pip install 'plaudit[ray]'")
    with socket.create_server(("127.0.0.1", 0)) as server:
        address = f"127.0.0.1:{server.getsockname()[1]}"
    assert on_ray(tmp_path / "run", small(1, GRPO, resources={"ray": address})) == 2
    assert f'resources.ray = "{address}": no Ray there' in capfd.readouterr().err


@pytest.mark.slow
def test_requesting_more_cpus_than_the_cluster_has_is_rejected(
    tmp_path: Path, cluster: Any, capfd: pytest.CaptureFixture[str]
) -> None:
    tree = small(1, GRPO, placement={"name": "disaggregated"}, resources={"ray": cluster.address, "data_parallel": 2})
    assert on_ray(tmp_path / "run", tree) == 2
    assert "2 ranks × 1 + 1 rollout × 1 = 3 CPUs, and the Ray cluster has 2" in capfd.readouterr().err


def test_the_resource_arithmetic_lists_every_pool() -> None:
    tree = small(
        1, {**GRPO, "train": {"threads": 2}}, placement={"name": "async"},
        resources={"ray": "auto", "rollout": {"processes": 3}, "reward": {"processes": 2, "gpus": 0.5}},
    )  # fmt: skip
    with pytest.raises(ConfigError, match=r"1 rank × 2 \+ 3 rollouts × 2 \+ 2 rewards × 1 = 10 CPUs, .* has 8"):
        check(pools(tree, gpus=False), {"CPU": 8.0})
    with pytest.raises(ConfigError, match=r"1 rank × 1 \+ 3 rollouts × 1 \+ 2 rewards × 0.5 = 5 GPUs, .* has 4"):
        check(pools(tree, gpus=True), {"CPU": 16.0, "GPU": 4.0})
    check(pools(tree, gpus=False), {"CPU": 10.0, "GPU": 1.0})


def test_a_run_that_is_lost_four_times_without_progress_fails(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(ray_launch, "COMMAND", ("-c", "import sys; print(sys.argv[2:]); sys.exit(75)"))
    assert launch_on_ray(small(1, GRPO, resources={"ray": "local"}), ["train", "--fresh"], tmp_path) == 1
    output = capfd.readouterr()
    assert output.out.splitlines() == ["['train', '--fresh']"] + ["['train', '--resume']"] * 3
    assert "lost 4 times in a row without a new checkpoint" in output.err


@pytest.mark.parametrize(
    ("tables", "message"),
    [
        ({"resources": {"reward": {"processes": 2}}}, r"are Ray actors: set resources\.ray"),
        ({"resources": {"ray": "auto", "cores": [0]}}, r"resources\.cores = \[0\] is for this machine"),
        (
            {"placement": {"name": "hybrid"}, "resources": {"ray": "auto", "rollout": {"processes": 1}}},
            "would map the learner's memory",
        ),
    ],
)
def test_configurations_unsupported_on_ray_are_rejected(tables: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        small(1, GRPO, **tables)
