"""Searches whose client disconnects, whose worker exits or whose deadline passes in the middle."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from concurrent.futures import FIRST_COMPLETED, ThreadPoolExecutor, wait
from typing import Any

import httpx
import pytest

from tests.search.test_service import body, post
from tests.serve.faults import Faults
from tests.serve.process import ServerProcess

pytestmark = pytest.mark.slow
WAIT = 120.0


@pytest.fixture(scope="module")
def faults() -> Iterator[Faults]:
    with Faults() as faults:
        yield faults


@pytest.fixture(scope="module")
def server(faults: Faults) -> Iterator[ServerProcess]:
    tree = {"models": {name: {"path": name} for name in ("sums-policy", "sums-steps")}, "search": {"concurrent": 2}}
    with ServerProcess(tree, environment=faults.environment) as server:
        yield server


@pytest.fixture(autouse=True)
def sound(faults: Faults) -> Iterator[None]:
    yield
    faults.clear()


def until(what: str, condition: Callable[[], Any]) -> None:
    deadline = time.monotonic() + WAIT
    while not condition():
        assert time.monotonic() < deadline, what
        time.sleep(0.05)


def disconnect_clients(server: ServerProcess, faults: Faults, count: int) -> None:
    """`count` clients send a search and disconnect in the middle of a step."""
    faults.set(what="hold")
    before = server.metric("plaudit_cancelled_total")
    timeout = httpx.Timeout(1.0)
    for _ in range(count):
        with httpx.Client(base_url=server.url, timeout=timeout) as client, pytest.raises(httpx.ReadTimeout):
            client.post("/v1/search", json=body())
    until("the steps of a search are not cancelled", lambda: server.metric("plaudit_cancelled_total") >= before + count)
    faults.clear()


def test_disconnected_client_cancels_its_search_and_frees_the_slot(server: ServerProcess, faults: Faults) -> None:
    expected = post(server, body())
    disconnect_clients(server, faults, 5)
    with ThreadPoolExecutor(2) as clients:  # both search slots
        results = list(clients.map(lambda _: post(server, body()), range(2)))
    assert [each["response"] for each in results] == [expected["response"]] * 2


def test_search_beyond_the_concurrency_limit_gets_503_with_retry_after(server: ServerProcess, faults: Faults) -> None:
    expected = post(server, body())
    faults.set(what="hold")
    with ThreadPoolExecutor(3) as clients:
        replies = [clients.submit(server.http.post, "/v1/search", json=body()) for _ in range(3)]
        (rejected,) = wait(replies, WAIT, FIRST_COMPLETED).done
        reply = rejected.result()
        assert (reply.status_code, reply.json()["error"]["type"]) == (503, "overloaded")
        assert reply.headers["retry-after"] == "1"
        faults.clear()
        responses = [each.result(WAIT).json()["response"] for each in replies if each is not rejected]
    assert responses == [expected["response"]] * 2


def test_worker_exit_during_a_search_does_not_change_the_result(server: ServerProcess, faults: Faults) -> None:
    expected = post(server, body())
    restarts = server.metric("plaudit_worker_restarts_total")
    faults.set(what="exit", once=True)
    result = post(server, body())
    assert server.metric("plaudit_worker_restarts_total") == restarts + 1
    assert (result["response"], result["usage"], result["votes"]) == (
        expected["response"],
        expected["usage"],
        expected["votes"],
    )


def test_deadline_during_a_search_gives_504(server: ServerProcess, faults: Faults) -> None:
    faults.set(what="hold")
    reply = server.http.post("/v1/search", json=body(), headers={"x-deadline": "0.5"})
    assert (reply.status_code, reply.json()["error"]["type"]) == (504, "deadline")
