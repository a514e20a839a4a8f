"""Long stress test of one server. A tenth of it by default, all of it with PLAUDIT_SOAK (`make soak`)."""

from __future__ import annotations

import http.client
import json
import os
import random
import socket
import threading
import time
from collections import Counter
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from pathlib import Path
from shutil import copytree, ignore_patterns
from typing import Any

import psutil
import pytest
from safetensors.numpy import load_file, save_file

import plaudit
from plaudit.process.spawn import FORKS
from tests.serve.faults import Faults
from tests.serve.process import ServerProcess

pytestmark = [pytest.mark.slow, pytest.mark.timeout(3600)]

SOAK = bool(os.environ.get("PLAUDIT_SOAK"))
PARTS = 10 if SOAK else 1
REQUESTS = 2000 * PARTS
KILLS = 2 * PARTS
CLIENTS = 8
GROWTH = 1.05 if SOAK else 1.2  # of memory: after few requests the allocator may still be growing
MALFORMED = (
    b"", b"{", b"[]", b'{"items": 5}', b'{"items": []}', b'{"items": [{"text": 5}]}', b"\xff\xfe", b"[" * 5000,
    b'{"items": [{"tokens": [-1]}]}', b'{"items": [{"tokens": [99999999]}]}',
    b'{"model": "none", "items": [{"text": "x"}]}',
)  # fmt: skip


def content(number: int) -> list[dict[str, Any]]:
    """One of 500 distinct requests."""
    chosen = random.Random(number % 500)
    return [
        {"tokens": [chosen.randrange(4, 12) for _ in range(chosen.randrange(5, 200))]}
        for _ in range(chosen.randrange(1, 5))
    ]


def body(number: int) -> bytes:
    return json.dumps({"items": content(number), "cache": number % 2 == 0}).encode()


HEAD = "POST /v1/rewards HTTP/1.1\r\nhost: localhost\r\ncontent-type: application/json\r\ncontent-length: {}\r\n\r\n"


class Client:
    """Sends requests of every kind; `expected` are the scores of the 500 distinct requests."""

    def __init__(self, server: ServerProcess, expected: list[list[float]]) -> None:
        self._port = server.port
        self._expected = expected
        self.kinds: Counter[str] = Counter()
        self._connection = http.client.HTTPConnection("127.0.0.1", server.port, timeout=60)

    def send(self, number: int) -> None:
        kind = random.Random(number * 7919).choices(("valid", "slow", "malformed", "gone"), (40, 10, 25, 25))[0]
        self.kinds[kind] += 1
        match kind:
            case "valid":
                status, reply = self._post(body(number))
                assert status == 200, reply
                scores = [item["scores"][0] for item in json.loads(reply)["items"]]
                assert scores == pytest.approx(self._expected[number % 500], abs=1e-4)
            case "slow":
                self._dribble(number)
            case "malformed":
                status, reply = self._post(MALFORMED[number % len(MALFORMED)])
                failed = status == 200 and "error" in json.loads(reply)["items"][0]
                assert 400 <= status < 500 or failed, (status, reply)
            case "gone":
                self._leave(number)

    def _post(self, content: bytes) -> tuple[int, bytes]:
        try:
            self._connection.request("POST", "/v1/rewards", content, {"content-type": "application/json"})
            reply = self._connection.getresponse()
            return reply.status, reply.read()
        except (http.client.HTTPException, ConnectionError):
            self._connection.close()
            raise

    def _dribble(self, number: int) -> None:
        data = body(number)
        with socket.create_connection(("127.0.0.1", self._port), timeout=60) as sock:
            sock.sendall(HEAD.format(len(data)).encode())
            for at in range(0, len(data), len(data) // 4 + 1):
                time.sleep(0.01)
                sock.sendall(data[at : at + len(data) // 4 + 1])
            assert sock.recv(100).startswith(b"HTTP/1.1 200")

    def _leave(self, number: int) -> None:
        """Disconnect before the body, in the middle of it or before the reply."""
        data = body(number)
        with suppress(ConnectionError), socket.create_connection(("127.0.0.1", self._port), timeout=60) as sock:
            sock.sendall(HEAD.format(len(data)).encode() + data[: (0, len(data) // 2, len(data))[number % 3]])
            time.sleep((number % 5) * 0.002)

    def close(self) -> None:
        self._connection.close()


def resources(server: ServerProcess) -> dict[str, tuple[int, int]]:
    """Resident bytes and open files of both processes."""
    processes = {"front": psutil.Process(server.process.pid), "worker": server.workers()[0]}
    return {name: (process.memory_info().rss, process.num_fds()) for name, process in processes.items()}


def until(what: str, condition: Any, seconds: float = 120) -> None:
    end = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < end, f"not {what} within {seconds} s"
        time.sleep(0.02)


def loads_ended(server: ServerProcess) -> list[float]:
    """The times at which its model finished loading, from the log."""
    return [e["time"] for e in server.events() if e["event"] == "model" and e["state"] == "ready"]


def quiet(server: ServerProcess) -> bool:
    stats = server.http.get("/stats").json()
    model = stats["models"][0]
    return not (stats["open_requests"] or stats["open_tokens"] or model["queue_tokens"] or model["held_tokens"])


@pytest.fixture(scope="module")
def faults() -> Iterator[Faults]:
    with Faults() as faults:
        yield faults


@pytest.fixture(scope="module")
def server(faults: Faults) -> Iterator[ServerProcess]:
    tree = {"models": {"sums": {"path": "sums", "kv_bytes": 4 << 20}}, "limits": {"cache_bytes": 1 << 20}}
    with ServerProcess(tree, environment=faults.environment) as server:
        yield server


@pytest.fixture(scope="module")
def expected(server: ServerProcess) -> list[list[float]]:
    replies = [server.rewards(content(number)) for number in range(500)]
    return [[item["scores"][0] for item in reply.json()["items"]] for reply in replies]


def test_scores_memory_and_open_files_survive_mixed_requests(
    server: ServerProcess, expected: list[list[float]]
) -> None:
    """B32: valid, slow, malformed and abandoned requests; afterwards scores, memory and open files are as before.
    20,000 of them in a soak, a tenth by default."""
    numbers = iter(range(REQUESTS + REQUESTS // 10))
    lock = threading.Lock()

    def work(share: int) -> Counter[str]:
        client = Client(server, expected)
        for _ in range(share):
            with lock:
                number = next(numbers)
            client.send(number)
        client.close()
        return client.kinds

    with ThreadPoolExecutor(CLIENTS) as threads:
        list(threads.map(work, [REQUESTS // 10 // CLIENTS] * CLIENTS))
        until("quiet", lambda: quiet(server))
        before = resources(server)
        kinds = sum(threads.map(work, [REQUESTS // CLIENTS] * CLIENTS), Counter[str]())
    assert min(kinds.values()) > REQUESTS // 20, kinds
    until("quiet", lambda: quiet(server))
    for number in (0, 7, 123):
        reply = server.rewards(content(number), cache=False).json()
        assert [item["scores"][0] for item in reply["items"]] == pytest.approx(expected[number], abs=5e-5)
    until("closed", lambda: resources(server)["front"][1] <= before["front"][1], 90)
    after = resources(server)
    for name, (memory, files) in after.items():
        assert memory <= before[name][0] * GROWTH, (name, before, after)
        assert files <= before[name][1], (name, before, after)
    assert server.http.get("/stats").json()["models"][0]["restarts"] == 0
    assert not any(event["event"] == "bug" for event in server.events())


def test_requests_succeed_while_the_worker_is_killed_repeatedly(
    server: ServerProcess, faults: Faults, expected: list[list[float]]
) -> None:
    """C41: every accepted request gets the right scores while workers are killed."""
    running = True
    answered: Counter[int] = Counter()

    def load(client: int) -> None:
        number = client
        while running:
            number += CLIENTS
            reply = server.http.post("/v1/rewards", json={"items": content(number), "cache": False}, timeout=300)
            assert reply.status_code == 200, reply.text
            scores = [item["scores"][0] for item in reply.json()["items"]]
            assert scores == pytest.approx(expected[number % 500], abs=1e-4)
            answered[client] += 1

    seconds = []
    with ThreadPoolExecutor(CLIENTS) as threads:
        loads = [threads.submit(load, client) for client in range(CLIENTS)]
        try:
            for _ in range(KILLS):
                faults.set("sleep", seconds=0.3)
                until("held", lambda: server.http.get("/stats").json()["models"][0]["held_tokens"] > 0)
                done = sum(answered.values())
                before = len(loads_ended(server))
                server.workers()[0].kill()
                faults.clear()
                until("not ready", lambda: not server.ready())
                until("ready", server.ready)
                ready_at = time.time()
                until("logged", lambda before=before: len(loads_ended(server)) > before)  # type: ignore[misc]
                seconds.append(ready_at - loads_ended(server)[-1])
                until("at work", lambda done=done: sum(answered.values()) > done + CLIENTS)  # type: ignore[misc]
        finally:
            running = False
            faults.clear()
        for task in loads:
            task.result()
    assert server.metric("plaudit_worker_restarts_total") == KILLS
    assert max(seconds) < 30, seconds  # from the end of loading to the first answer that the server is ready


def test_a_worker_that_stays_stopped_is_replaced(server: ServerProcess, expected: list[list[float]]) -> None:
    """C42: the server becomes unready after 10 s of silence; then another worker replaces it and answers its items."""
    (worker,) = server.workers()
    worker.suspend()
    with ThreadPoolExecutor(1) as threads:
        waiting = threads.submit(
            server.http.post, "/v1/rewards", json={"items": content(3), "cache": False}, timeout=300
        )
        until("not ready", lambda: not server.ready(), 25)  # it is replaced after 30
        reply = waiting.result()
    assert [item["scores"][0] for item in reply.json()["items"]] == pytest.approx(expected[3], abs=1e-4)
    until("ready", server.ready, 30)
    assert server.workers()[0].pid != worker.pid
    assert not worker.is_running()


def test_killing_the_http_process_leaves_no_worker(server: ServerProcess) -> None:
    """C41: kill -9 of the HTTP process. The module's server ends here."""
    (worker,) = server.workers()
    server.process.kill()
    server.process.wait()
    assert not psutil.wait_procs([worker], timeout=60)[1]


def test_weights_that_change_on_disk_are_not_served_under_the_old_version(faults: Faults, tmp_path: Path) -> None:
    """C51: a restarted worker that loads other weights is not put in service: its scores would have the old version,
    and the cache would mix both."""
    file = copytree(Path(plaudit.__path__[0]) / "embedded" / "sums", tmp_path / "model") / "model.safetensors"
    tree = {"models": {"sums": {"path": str(tmp_path / "model")}}}
    with ServerProcess(tree, environment=faults.environment) as server:
        weights = load_file(file)
        weights["score.weight"] = -weights["score.weight"]
        save_file(weights, file, metadata={"format": "pt"})
        server.workers()[0].kill()
        assert server.process.wait(240) == 1
        assert "its files, or the code that reads them, have changed on disk" in server.log()


@pytest.mark.skipif(not FORKS, reason="workers are new processes here, which read the newer code")
def test_workers_restart_after_the_code_on_disk_changes(tmp_path: Path) -> None:
    """C51: they are forked from a process that has imported the old code, and compute with it, under its version."""
    copy = copytree(Path(plaudit.__path__[0]), tmp_path / "plaudit", ignore=ignore_patterns("__pycache__"))
    environment = {"PYTHONPATH": str(tmp_path), "PYTHONSAFEPATH": "1"}
    with ServerProcess({"models": {"sums": {"path": "sums"}}}, environment=environment, launcher=["-P"]) as server:
        before = server.rewards([{"prompt": "2+3=", "responses": ["5"]}]).json()
        with (copy / "core" / "engine.py").open("a") as source:
            source.write("# newer\n")
        server.workers()[0].kill()
        until("restarted", lambda: server.metric("plaudit_worker_restarts_total") == 1)
        until("ready", server.ready)
        after = server.rewards([{"prompt": "2+3=", "responses": ["5"]}], cache=False)
        assert after.status_code == 200, server.log()
        assert after.json()["items"] == before["items"]
        assert after.json()["version"] == before["version"]
