"""Searches that lose their client or worker, or run out of time, in the middle."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from concurrent.futures import FIRST_COMPLETED, ThreadPoolExecutor, wait
from typing import Any

import httpx
import pytest

from tests.search.test_service import asked, body
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
    end = time.monotonic() + WAIT
    while not condition():
        assert time.monotonic() < end, what
        time.sleep(0.05)


def left(server: ServerProcess, faults: Faults, count: int) -> None:
    """As many clients as that ask, and go away in the middle of a step."""
    faults.set(what="hold")
    before = server.metric("plaudit_cancelled_total")
    held = httpx.Timeout(1.0)
    for _ in range(count):
        with httpx.Client(base_url=server.url, timeout=held) as client, pytest.raises(httpx.ReadTimeout):
            client.post("/v1/search", json=body())
    until("the steps of a search are not cancelled", lambda: server.metric("plaudit_cancelled_total") >= before + count)
    faults.clear()


def test_a_client_that_leaves_ends_its_search_and_frees_its_place(server: ServerProcess, faults: Faults) -> None:
    whole = asked(server, body())
    left(server, faults, 5)
    with ThreadPoolExecutor(2) as clients:  # both of the two places
        found = list(clients.map(lambda _: asked(server, body()), range(2)))
    assert [each["response"] for each in found] == [whole["response"]] * 2


def test_more_searches_than_places_are_told_to_come_again(server: ServerProcess, faults: Faults) -> None:
    whole = asked(server, body())
    faults.set(what="hold")
    with ThreadPoolExecutor(3) as clients:
        replies = [clients.submit(server.http.post, "/v1/search", json=body()) for _ in range(3)]
        (refused,) = wait(replies, WAIT, FIRST_COMPLETED).done
        reply = refused.result()
        assert (reply.status_code, reply.json()["error"]["type"]) == (503, "overloaded")
        assert reply.headers["retry-after"] == "1"
        faults.clear()
        held = [each.result(WAIT).json()["response"] for each in replies if each is not refused]
    assert held == [whole["response"]] * 2


def test_a_worker_that_dies_in_the_middle_changes_nothing(server: ServerProcess, faults: Faults) -> None:
    whole = asked(server, body())
    restarts = server.metric("plaudit_worker_restarts_total")
    faults.set(what="exit", once=True)
    found = asked(server, body())
    assert server.metric("plaudit_worker_restarts_total") == restarts + 1
    assert (found["response"], found["usage"], found["votes"]) == (whole["response"], whole["usage"], whole["votes"])


def test_a_deadline_in_the_middle(server: ServerProcess, faults: Faults) -> None:
    faults.set(what="hold")
    reply = server.http.post("/v1/search", json=body(), headers={"x-deadline": "0.5"})
    assert (reply.status_code, reply.json()["error"]["type"]) == (504, "deadline")
