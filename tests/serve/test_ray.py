"""Workers managed by Ray Serve: the same server behaviour, also when replicas or the controller die."""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from types import SimpleNamespace

import psutil
import pytest
import yaml

from plaudit.config.serve import parse_serve
from plaudit.serve.ray.config import serve_config
from tests.serve.process import ServerProcess
from tests.serve.test_chaos import until
from tests.serve.test_replicas import Load, replicas, root

pytest.importorskip("ray.serve")
from plaudit.serve.ray.replica import ByTokens, build

pytestmark = [pytest.mark.slow, pytest.mark.timeout(1800)]
__all__ = ["root"]

SOAK = bool(os.environ.get("PLAUDIT_SOAK"))


@pytest.fixture(scope="module")
def server(root: Path) -> Iterator[ServerProcess]:
    tree = {
        "admin_key": "admin-admin", "model_root": str(root), "ray": "local", "limits": {"cache_bytes": 1 << 20},
        "models": {"sums": {"path": str(root / "one"), "replicas": 2, "kv_bytes": 4 << 20}},
    }  # fmt: skip
    with ServerProcess(tree) as server:
        yield server
        tree_of = psutil.Process(server.process.pid).children(recursive=True)
        assert server.stop(seconds=120) == 0
        assert not psutil.wait_procs(tree_of, timeout=60)[1]


def test_the_configuration_of_a_cluster_builds() -> None:
    models = {"sums": {"path": "sums", "kind": "outcome", "replicas": 2, "max_replicas": 5, "replica_tokens": 1000}}
    config = yaml.safe_load(serve_config(parse_serve({"models": models, "limits": {"load_seconds": 60}}, "x")))
    (application,) = config["applications"]
    assert application["name"] == "plaudit-sums-0"
    deployment = build(application["args"])._bound_deployment
    scaling = deployment._deployment_config.autoscaling_config
    assert (scaling.min_replicas, scaling.max_replicas) == (2, 5)

    def target(*waiting: float) -> int:
        context = SimpleNamespace(
            aggregated_metrics={"waiting": dict(enumerate(waiting))}, capacity_adjusted_min_replicas=2,
            capacity_adjusted_max_replicas=5, policy_state={},
        )  # fmt: skip
        return ByTokens(tokens=1000)(context)[0]  # type: ignore[arg-type]

    assert [target(), target(0, 500), target(2500, 2400), target(90_000)] == [2, 2, 3, 5]


def actors(server: ServerProcess, kind: str) -> list[psutil.Process]:
    processes = []
    for process in psutil.Process(server.process.pid).children(recursive=True):
        try:
            if kind in " ".join(process.cmdline()):
                processes.append(process)
        except psutil.Error:
            continue
    return processes


def both_ready(server: ServerProcess) -> bool:
    return [replica["state"] for replica in replicas(server)] == ["ready"] * 2


def test_replicas_and_the_controller_may_die_under_load(
    server: ServerProcess, record_property: Callable[[str, object], None]
) -> None:
    with Load(server) as load:
        used = server.metric("plaudit_replica_items_total", model="sums")
        for sent_signal in (signal.SIGKILL, signal.SIGSTOP) if SOAK else (signal.SIGKILL,):
            began = time.monotonic()
            victim = actors(server, "ServeReplica:")[0]
            victim.send_signal(sent_signal)
            load.goes_on()
            until("replaced", lambda victim=victim: not victim.is_running() or victim.status() == "zombie", 240)  # type: ignore[misc]
            until("both", lambda: both_ready(server), 240)
            record_property(f"{sent_signal.name}_both_ready_seconds", round(time.monotonic() - began, 1))
        (controller,) = actors(server, "ServeController")
        if SOAK:
            controller.suspend()
            for _ in range(3):
                load.goes_on()
                assert server.ready()  # replicas keep serving without it
            controller.resume()
            load.goes_on()
        began = time.monotonic()
        controller.kill()
        load.goes_on()
        assert server.ready()
        until("another", lambda: any(p.pid != controller.pid for p in actors(server, "ServeController")), 240)
        record_property("another_controller_seconds", round(time.monotonic() - began, 1))
        load.goes_on()
        assert server.metric("plaudit_replica_items_total", model="sums") > used
    load.record(record_property)


def test_a_new_version_under_load(server: ServerProcess, record_property: Callable[[str, object], None]) -> None:
    with Load(server) as load:
        reply = server.http.post(
            "/admin/swap", json={"model": "sums", "path": "two"}, headers={"authorization": "Bearer admin-admin"},
            timeout=300,
        )  # fmt: skip
        assert reply.status_code == 200, reply.text
        load.goes_on()
    assert set(load.versions) == {load.first, reply.json()["version"]}
    load.record(record_property)
