"""Several workers of one model: routing, and what happens when one dies, joins or leaves."""

from __future__ import annotations

import asyncio
import os
import signal
import time
from collections import Counter
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from shutil import copytree
from typing import Any

import httpx
import psutil
import pytest
from safetensors.numpy import load_file, save_file

import plaudit
from plaudit.serve.workers.autoscale import DOWN_SECONDS, UP_SECONDS, Autoscale
from plaudit.serve.workers.deployment import Deployment
from plaudit.serve.workers.link import Link
from plaudit.serve.workers.routing import Affinity
from tests.serve.fake_worker import deployed
from tests.serve.process import ServerProcess
from tests.serve.test_chaos import content, until
from tests.serve.test_link import outcome, work

SOAK = bool(os.environ.get("PLAUDIT_SOAK"))
CLIENTS = 64 if SOAK else 8
PATIENCE = pytest.mark.timeout(1200 if SOAK else 300)  # 64 clients leave little of two cores to a starting worker


@dataclass
class Seat:
    number: int
    in_flight_tokens: int = 0
    budget: int = 100


def test_works_with_the_same_prefix_go_to_the_same_replica() -> None:
    affinity, seats = Affinity(), [Seat(0), Seat(1), Seat(2)]
    prompts = [[n] * 40 for n in range(6)]
    first = []
    for prompt in prompts:
        seat = affinity.choose(prompt, "", seats)
        seat.in_flight_tokens += 10
        first.append(seat.number)
    assert sorted(first) == [0, 0, 1, 1, 2, 2]
    for n, prompt in enumerate(prompts):
        assert affinity.choose([*prompt[:33], 7, 8], "", seats).number == first[n]
        assert affinity.choose([*prompt, 1, 2, 3], "", seats).number == first[n]


def test_the_longest_prefix_decides_and_keys_do_not_share_prefixes() -> None:
    affinity, seats = Affinity(), [Seat(0), Seat(1)]
    system, a, b = [1] * 16, [2] * 32, [3] * 32
    assert affinity.choose(system + a, "", seats).number == 0
    seats[0].in_flight_tokens = 150  # more than a budget above the other: the prefix moves with the work
    assert affinity.choose(system + b, "", seats).number == 1
    seats[0].in_flight_tokens = 0
    assert affinity.choose(system + a + [9], "", seats).number == 0
    assert affinity.choose(system + b + [9], "", seats).number == 1
    seats[1].in_flight_tokens = 50
    assert affinity.choose(system + b, "somebody else", seats).number == 0


def test_balance_wins_over_a_cached_prefix() -> None:
    affinity, seats = Affinity(), [Seat(0), Seat(1)]
    prompt = [5] * 64
    assert affinity.choose(prompt, "", seats).number == 0
    seats[0].in_flight_tokens = 100
    assert affinity.choose(prompt, "", seats).number == 0  # one budget more is still worth the cached prefix
    seats[0].in_flight_tokens = 101
    assert affinity.choose(prompt, "", seats).number == 1
    assert affinity.choose(prompt, "", [seats[0]]).number == 0  # the other is not a candidate


def test_autoscaling_follows_the_waiting_tokens() -> None:
    rule = Autoscale(1, 4, 1000)
    assert [rule.wanted(1, 2500, 1.0) for _ in range(int(UP_SECONDS))] == [1] * (int(UP_SECONDS) - 1) + [3]
    assert rule.wanted(3, 100_000, UP_SECONDS) == 4
    assert [rule.wanted(4, 0, 10.0) for _ in range(int(DOWN_SECONDS) // 10)] == [4, 4, 4, 4, 4, 3]
    assert rule.wanted(3, 2500, 10.0) == 3
    assert rule.wanted(1, 0, DOWN_SECONDS) == 1


def process(deployment: Deployment, number: int) -> psutil.Process:
    link = deployment.replicas[number].wire
    assert isinstance(link, Link)
    assert link._process is not None
    return psutil.Process(link._process.pid)


async def until_true(condition: Any) -> None:
    async with asyncio.timeout(60):
        while not condition():
            await asyncio.sleep(0.01)


def test_works_of_a_dead_replica_are_computed_by_the_other() -> None:
    async def use(deployment: Deployment) -> None:
        process(deployment, 0).suspend()
        ticket = deployment.submit([work(n) for n in range(300)], tenant="a")
        await until_true(lambda: deployment.replicas[0].in_flight and not deployment.replicas[1].in_flight)
        process(deployment, 0).kill()
        await asyncio.wait_for(ticket.done, 60)
        assert [outcome(answer) for answer in ticket.answers] == list(range(300))
        await until_true(lambda: deployment.restarts)  # the other one may answer before the death is counted
        assert (deployment.restarts, deployment.in_flight_tokens, len(deployment._jobs_by_key)) == (1, 0, 0)

    deployed(use, [], 2)


def test_a_crashing_work_is_isolated_among_several_replicas() -> None:
    async def use(deployment: Deployment) -> None:
        ticket = deployment.submit([work(n) for n in range(50)], tenant="a")
        await asyncio.wait_for(ticket.done, 60)
        results = [outcome(answer) for answer in ticket.answers]
        assert results == [n if n != 7 else "worker_crash" for n in range(50)]

    deployed(use, [7], 2)


def test_replicas_are_added_and_removed_while_works_wait() -> None:
    async def use(deployment: Deployment) -> None:
        async def load() -> None:
            for _ in range(200):
                ticket = deployment.submit([work(n) for n in range(20)], tenant="a", cached=False)
                await asyncio.wait_for(ticket.done, 60)
                assert [outcome(answer) for answer in ticket.answers] == list(range(20))

        loads = [asyncio.create_task(load()) for _ in range(3)]
        deployment.scale(3)
        await until_true(lambda: sum(replica.ready for replica in deployment.replicas) == 3)
        deployment.scale(1)
        await until_true(lambda: len(deployment.replicas) == 1)
        await asyncio.gather(*loads)
        assert deployment.restarts == 0

    deployed(use, [])


@pytest.fixture(scope="module")
def root(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Two versions of a model: the second gives the negative scores of the first."""
    root = tmp_path_factory.mktemp("models")
    for name in ("one", "two"):
        copytree(Path(plaudit.__path__[0]) / "embedded" / "sums", root / name)
    weights = load_file(root / "two" / "model.safetensors")
    weights["score.weight"] = -weights["score.weight"]
    save_file(weights, root / "two" / "model.safetensors", metadata={"format": "pt"})
    return root


@pytest.fixture(scope="module")
def server(root: Path) -> Iterator[ServerProcess]:
    tree = {
        "admin_key": "admin-admin", "model_root": str(root), "limits": {"cache_bytes": 1 << 20},
        "models": {"sums": {"path": str(root / "one"), "replicas": 2, "kv_bytes": 4 << 20}},
    }  # fmt: skip
    with ServerProcess(tree) as server:
        yield server


class Load:
    """Clients that check every score against the version that the reply names."""

    def __init__(self, server: ServerProcess) -> None:
        self.server = server
        self.scores: dict[int, list[float]] = {}
        for number in range(20):
            items = server.rewards(content(number), cache=False).json()["items"]
            self.scores[number] = [item["scores"][0] for item in items]
        self.first = server.http.get("/v1/models").json()["data"][0]["version"]
        self.versions: Counter[str] = Counter()
        self.going = True

    def ask(self, client: int) -> None:
        # Each client has its own pool: a shared pool may close a connection that another thread is about to use.
        with httpx.Client(base_url=self.server.url, timeout=300) as http:
            self.keep_asking(http, client)

    def keep_asking(self, http: httpx.Client, number: int) -> None:
        while self.going:
            number = (number + CLIENTS) % 20
            reply = http.post("/v1/rewards", json={"items": content(number), "cache": False})
            assert reply.status_code == 200, reply.text
            version = reply.json()["version"]
            sign = 1 if version == self.first else -1
            actual = [sign * item["scores"][0] for item in reply.json()["items"]]
            assert actual == pytest.approx(self.scores[number], abs=5e-5)
            self.versions[version] += 1

    def __enter__(self) -> Load:
        self.threads = ThreadPoolExecutor(CLIENTS)
        self.tasks = [self.threads.submit(self.ask, client) for client in range(CLIENTS)]
        self.goes_on()
        return self

    def goes_on(self) -> None:
        done = self.versions.total()
        until("at work", lambda: self.versions.total() > done + 2 * CLIENTS)

    def record(self, property: Callable[[str, object], None]) -> None:
        property("clients", CLIENTS)
        property("answered", self.versions.total())

    def __exit__(self, *_: object) -> None:
        self.going = False
        self.threads.shutdown()
        for task in self.tasks:
            task.result()


def replicas(server: ServerProcess) -> list[dict[str, Any]]:
    states: list[dict[str, Any]] = server.http.get("/stats").json()["models"][0]["replicas"]
    return states


@PATIENCE
@pytest.mark.slow
def test_a_third_replica_takes_traffic_and_a_killed_or_stopped_one_costs_nothing(
    server: ServerProcess, record_property: Callable[[str, object], None]
) -> None:
    with Load(server) as load:
        reply = server.http.post(
            "/admin/scale", json={"model": "sums", "replicas": 3}, headers={"authorization": "Bearer admin-admin"}
        )
        assert reply.status_code == 200, reply.text
        until("three", lambda: [r["state"] for r in replicas(server)] == ["ready"] * 3, 240)
        load.goes_on()
        until("used", lambda: server.metric("plaudit_replica_items_total", replica="2") > 0)
        for sent_signal in (signal.SIGKILL, signal.SIGSTOP) if SOAK else (signal.SIGKILL,):
            began = time.monotonic()
            before = sum(replica["restarts"] for replica in replicas(server))
            server.workers()[0].send_signal(sent_signal)
            load.goes_on()
            assert server.ready()  # the others serve
            until("back", lambda before=before: sum(r["restarts"] for r in replicas(server)) > before)  # type: ignore[misc]
            until("three", lambda: [r["state"] for r in replicas(server)] == ["ready"] * 3, 240)
            record_property(f"{sent_signal.name}_all_ready_seconds", round(time.monotonic() - began, 1))
    load.record(record_property)


@PATIENCE
@pytest.mark.slow
def test_a_new_version_under_load(
    server: ServerProcess, record_property: Callable[[str, object], None]
) -> None:  # fmt: skip
    """No error, and every reply has exactly one version."""
    with Load(server) as load:
        reply = server.http.post(
            "/admin/swap", json={"model": "sums", "path": "two"}, headers={"authorization": "Bearer admin-admin"},
            timeout=300,
        )  # fmt: skip
        assert reply.status_code == 200, reply.text
        load.goes_on()
    assert set(load.versions) == {load.first, reply.json()["version"]}
    load.record(record_property)
