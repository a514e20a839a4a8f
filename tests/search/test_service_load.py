"""32 concurrent clients while workers are killed and clients disconnect: every search is answered once, as if alone."""

from __future__ import annotations

import json
import socket
import threading
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest

from tests.search.test_service import STEPS, events
from tests.serve.process import ServerProcess

pytestmark = pytest.mark.slow
CLIENTS, KILLS = 32, 3
WAIT = 300.0  # seconds to wait for an expected event
QUESTIONS = [f"{a}+{b}+{a + 1}+{9 - b}+7+8=" for a in range(1, 5) for b in range(1, 5)]


@pytest.fixture(scope="module")
def server() -> Iterator[ServerProcess]:
    tree = {"models": {name: {"path": name} for name in ("sums-policy", "sums-steps")}, "search": {"concurrent": 200}}
    with ServerProcess(tree) as server:
        yield server


def body(number: int, **more: Any) -> dict[str, Any]:
    search = {"method": ("rebase", "ets")[number % 2], "width": 8, "steps": STEPS}
    return {"prompt": QUESTIONS[number % len(QUESTIONS)], "seed": number, "search": search, **more}


def search_result(server: ServerProcess, number: int, stream: bool = False) -> dict[str, Any]:
    with server.http.stream("POST", "/v1/search", json=body(number, stream=stream), timeout=WAIT) as reply:
        assert reply.status_code == 200, f"{reply.read()!r}\n{server.log()[-3000:]}"
        if not stream:
            return dict(json.loads(reply.read()))
        stream_events = events(reply)
    assert [each["object"] for each in stream_events] == ["search.progress"] * (len(stream_events) - 1) + ["search"]
    assert [each["round"] for each in stream_events[:-1]] == list(range(1, len(stream_events))), "a round is told once"
    return stream_events[-1]


def leave(server: ServerProcess, stop: threading.Event) -> int:
    """Send searches and disconnect until `stop` is set; returns the number of clients."""
    count = 0
    while not stop.is_set():
        content = json.dumps(body(count)).encode()
        with socket.create_connection(("127.0.0.1", server.port), timeout=WAIT) as connection:
            head = f"POST /v1/search HTTP/1.1\r\nhost: 127.0.0.1\r\ncontent-length: {len(content)}\r\n\r\n"
            connection.sendall(head.encode() + content)
        count += 1
        stop.wait(0.3)
    return count


def kill(server: ServerProcess, stop: threading.Event) -> int:
    """Kill workers of the policy and of the process model in turn, each after the last restart; returns the count."""
    for count in range(KILLS):
        workers = server.workers()
        workers[count % len(workers)].kill()
        deadline = time.monotonic() + WAIT
        while not stop.is_set() and (server.metric("plaudit_worker_restarts_total") <= count or not server.ready()):
            assert time.monotonic() < deadline, "the worker did not come back"
            time.sleep(0.1)
        if stop.wait(0.5):
            return count + 1
    return KILLS


def test_every_search_is_answered_exactly_once(server: ServerProcess) -> None:
    alone = {number: search_result(server, number) for number in range(0, CLIENTS, 4)}
    stop = threading.Event()
    with ThreadPoolExecutor(CLIENTS + 2) as threads:
        leaving, killing = threads.submit(leave, server, stop), threads.submit(kill, server, stop)
        try:
            requests = [threads.submit(search_result, server, number, number % 2 == 1) for number in range(CLIENTS)]
            replies = [each.result(WAIT) for each in requests]
        finally:
            stop.set()
        assert killing.result(WAIT) >= 1
        assert leaving.result(WAIT) >= 1
    assert server.metric("plaudit_worker_restarts_total") >= 1
    assert len({reply["id"] for reply in replies}) == CLIENTS
    assert [reply["seed"] for reply in replies] == list(range(CLIENTS)), "each has its own reply"
    for number, expected in alone.items():
        for name in ("answer", "response", "votes", "usage", "calls", "kv_tokens", "stopped"):
            assert replies[number][name] == expected[name], (number, name)
    again = search_result(server, 1)
    assert (again["response"], again["usage"]) == (replies[1]["response"], replies[1]["usage"])
    deadline = time.monotonic() + WAIT  # searches of disconnected clients end and free their KV cache
    while server.http.get("/stats").json()["models"][0]["held_tokens"]:
        assert time.monotonic() < deadline
        time.sleep(0.1)
