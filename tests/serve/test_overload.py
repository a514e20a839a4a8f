"""More load than the server can handle, from clients that are impatient, greedy or disconnected.

The model is blocked or slowed down, so that the result depends on the server and not on this machine. Orders and
delays are counted in steps of the model and not in seconds.
"""

from __future__ import annotations

import json
import socket
import statistics
import time
from collections.abc import Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import suppress
from itertools import count, islice
from typing import Any

import httpx
import pytest

from tests.serve.faults import Faults
from tests.serve.process import ServerProcess

BUDGET = 512  # tokens per step
WINDOW = 4 * BUDGET  # tokens that the worker may have in flight
MOST = 8000  # tokens in the server
KEYS = {"alice": "key-of-alice", "bob": "key-of-bob"}
_numbers = count()


def items(how_many: int, length: int) -> list[dict[str, Any]]:
    """Items that no earlier request contained."""
    return [{"tokens": [5 + (n >> bit) % 2 for bit in range(length)]} for n in islice(_numbers, how_many)]


def post(
    server: ServerProcess, content: list[dict[str, Any]], key: str = "alice", headers: dict[str, str] | None = None,
    **fields: Any,
) -> httpx.Response:  # fmt: skip
    return server.http.post(
        "/v1/rewards",
        json={"items": content, **fields},
        headers={"authorization": f"Bearer {KEYS[key]}", **(headers or {})},
    )


def scores(reply: httpx.Response) -> list[float]:
    assert reply.status_code == 200, reply.text
    return [item["scores"][0] for item in reply.json()["items"]]


def opened(server: ServerProcess, content: list[dict[str, Any]]) -> socket.socket:
    """Send a request without reading its reply."""
    body = json.dumps({"items": content}).encode()
    sock = socket.create_connection(("127.0.0.1", server.port))
    head = f"POST /v1/rewards HTTP/1.1\r\nhost: x\r\nauthorization: Bearer {KEYS['bob']}\r\n"
    sock.sendall(f"{head}content-type: application/json\r\ncontent-length: {len(body)}\r\n\r\n".encode() + body)
    return sock


def stats(server: ServerProcess) -> dict[str, Any]:
    content: dict[str, Any] = server.http.get("/stats").json()
    return {**content, **content["models"][0]}


def worked(server: ServerProcess) -> float:
    """Tokens that the model has processed."""
    return sum(server.metric("plaudit_tokens_total", kind=kind) for kind in ("computed", "prefix"))


def until(what: str, condition: Any, seconds: float = 30) -> None:
    end = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < end, f"not {what} within {seconds} s"
        time.sleep(0.01)


def idle(server: ServerProcess) -> bool:
    now = stats(server)
    return not (now["open_tokens"] or now["queue_tokens"] or now["held_tokens"])


def settled(server: ServerProcess, replies: list[Future[httpx.Response]], tokens: int) -> bool:
    """Whether all requests, of `tokens` tokens each, are in the server or answered."""
    return stats(server)["open_tokens"] == tokens * sum(not reply.done() for reply in replies)


@pytest.fixture(scope="module")
def faults() -> Iterator[Faults]:
    with Faults() as faults:
        yield faults


@pytest.fixture(scope="module")
def threads() -> Iterator[ThreadPoolExecutor]:
    with ThreadPoolExecutor(64) as threads:
        yield threads


@pytest.fixture(scope="module")
def starting(faults: Faults) -> Iterator[ServerProcess]:
    tree = {
        "models": {"sums": {"path": "sums", "budget": BUDGET}}, "api_keys": KEYS,
        "limits": {"queued_tokens": MOST},
    }  # fmt: skip
    with ServerProcess(tree, environment=faults.environment, wait=False) as server:
        server.http.headers["authorization"] = f"Bearer {KEYS['alice']}"
        yield server


@pytest.fixture(scope="module")
def server(starting: ServerProcess) -> ServerProcess:
    starting.wait_ready()
    return starting


@pytest.fixture(autouse=True)
def _calm(starting: ServerProcess, faults: Faults) -> Iterator[None]:
    yield
    faults.clear()
    until("idle", lambda: idle(starting))


def test_the_server_is_ready_only_after_warm_up(starting: ServerProcess, faults: Faults) -> None:
    """B35: the server is not ready and accepts nothing before the model has computed steps of every size."""
    faults.set("sleep", seconds=0.3)
    statuses: set[int] = set()
    end = time.monotonic() + 240
    while 200 not in statuses:
        assert time.monotonic() < end, starting.log()
        computed = faults.steps()  # read before the request, so these steps were computed before the reply
        with suppress(httpx.TransportError):
            statuses.add(starting.http.get("/health/ready").status_code)
            if 200 not in statuses:
                assert post(starting, items(1, 8)).status_code in (200, 503)
        time.sleep(0.05)
    assert 503 in statuses
    assert computed >= 4
    assert stats(starting)["max_tokens"] == 256
    faults.clear()
    scores(post(starting, items(8, 200)))


def test_a_full_queue_rejects_at_once_and_answers_accepted_requests(
    server: ServerProcess, faults: Faults, threads: ThreadPoolExecutor
) -> None:
    """B27: rejected with 503 and Retry-After while the model computes nothing; open tokens never exceed the limit; the
    other requests finish."""
    batches = [items(4, 250) for _ in range(20)]
    expected = [scores(post(server, content, cache=False)) for content in batches]
    faults.set("hold")
    replies = [threads.submit(post, server, content, cache=False) for content in batches]
    until("taken or refused", lambda: settled(server, replies, 1000))
    assert 0 < stats(server)["open_tokens"] <= MOST
    refused = [reply.result() for reply in replies if reply.done()]
    faults.clear()
    for reply in refused:
        assert reply.status_code == 503
        assert reply.json()["error"]["type"] == "overloaded"
        assert reply.json()["error"]["retryable"] is True
        assert int(reply.headers["retry-after"]) >= 1
    for reply, expected_scores in zip(replies, expected, strict=True):
        if reply.result() not in refused:
            assert scores(reply.result()) == pytest.approx(expected_scores, abs=5e-5)
    assert server.metric("plaudit_rejected_total", reason="overload") >= len(refused)


def test_admission_counts_tokens(server: ServerProcess, faults: Faults, threads: ThreadPoolExecutor) -> None:
    """B28: forty tiny requests fit where eight giant ones do not; one that could never fit gets 422."""
    faults.set("hold")
    tiny = [threads.submit(post, server, items(1, 16)) for _ in range(40)]
    until("taken", lambda: settled(server, tiny, 16))
    faults.clear()
    assert {reply.result().status_code for reply in tiny} == {200}
    faults.set("hold")
    giant = [threads.submit(post, server, items(8, 250)) for _ in range(8)]
    until("taken or refused", lambda: settled(server, giant, 2000))
    faults.clear()
    assert {reply.result().status_code for reply in giant} == {200, 503}
    never = post(server, items(MOST // 250 + 1, 250))
    assert never.status_code == 422
    assert never.json()["error"]["type"] == "too_many_tokens"


def test_an_expired_deadline_is_answered_504_without_submitting(server: ServerProcess) -> None:
    """B29: answered 504 without a token submitted; a deadline that is not a number is a client error, 400."""
    before = server.metric("plaudit_tokens_total", kind="submitted")
    for deadline, status in (("0", 504), ("-3.5", 504), ("soon", 400), ("nan", 400)):
        reply = post(server, items(1, 20), headers={"x-deadline": deadline})
        assert reply.status_code == status
        assert reply.json()["error"]["type"] == ("deadline" if status == 504 else "bad_deadline")
    assert server.metric("plaudit_tokens_total", kind="submitted") == before
    assert server.metric("plaudit_errors_total", type="deadline") >= 2


def test_a_deadline_that_expires_in_the_queue_is_answered_504(
    server: ServerProcess, faults: Faults, threads: ThreadPoolExecutor
) -> None:
    """B30: 504 at the deadline; items not yet sent to the worker are never computed."""
    before = worked(server)
    expired = server.metric("plaudit_expired_before_batch_total")
    faults.set("hold")
    ahead = threads.submit(post, server, items(14, 250), cache=False)
    until("held", lambda: stats(server)["queue_tokens"] > 0)
    late = post(server, items(3, 100), "bob", {"x-deadline": "1"})
    assert late.status_code == 504
    assert late.json()["error"]["type"] == "deadline"
    faults.clear()
    scores(ahead.result())
    assert server.metric("plaudit_expired_before_batch_total") == expired + 3
    assert worked(server) - before == 14 * 250


def test_items_of_a_disconnected_client_are_cancelled(
    server: ServerProcess, faults: Faults, threads: ThreadPoolExecutor
) -> None:
    """B31: waiting items are never computed, running ones free their tokens, and neither counts as an error."""
    errors = server.metric("plaudit_errors_total")
    cancelled = server.metric("plaudit_cancelled_total")
    before = worked(server)
    faults.set("hold")
    ahead = threads.submit(post, server, items(14, 250), cache=False)
    until("held", lambda: stats(server)["queue_tokens"] > 0)
    waiting = stats(server)["queue_items"]
    dropped = opened(server, items(3, 100))
    until("queued", lambda: stats(server)["queue_items"] >= waiting + 3)
    dropped.close()
    until("cancelled", lambda: server.metric("plaudit_cancelled_total") == cancelled + 3)
    faults.clear()
    scores(ahead.result())
    assert worked(server) - before == 14 * 250
    until("idle", lambda: idle(server))
    for times in (1, 2, 3):  # more than the window in total: disconnected clients must not leak capacity
        faults.set("hold")
        dropped = opened(server, items(7, 250))
        until("held", lambda: stats(server)["held_tokens"] > 0)
        dropped.close()
        total_dropped = cancelled + 3 + 7 * times
        until("cancelled", lambda dropped=total_dropped: server.metric("plaudit_cancelled_total") == dropped)
        faults.clear()
        until("idle", lambda: idle(server))
    scores(post(server, items(8, 250)))
    assert server.metric("plaudit_errors_total") == errors


@pytest.mark.slow
def test_immediate_retries_do_not_reduce_the_step_size(
    server: ServerProcess, faults: Faults, threads: ThreadPoolExecutor
) -> None:
    """B33: while most requests are rejected and retried at once, the model keeps computing full steps."""
    faults.set("sleep", seconds=0.1)

    def insist(seconds: float) -> int:
        answered, end = 0, time.monotonic() + seconds
        while time.monotonic() < end:
            answered += post(server, items(4, 250), cache=False).status_code == 200
        return answered

    def tokens_per_step(clients: int) -> float:
        tokens, steps = worked(server), faults.steps()
        assert sum(threads.map(insist, [3.0] * clients)) > 0
        return (worked(server) - tokens) / (faults.steps() - steps)

    calm = tokens_per_step(3)
    refused = server.metric("plaudit_rejected_total", reason="overload")
    storm = tokens_per_step(32)
    assert server.metric("plaudit_rejected_total", reason="overload") > refused + 32
    assert storm >= 0.8 * calm, (calm, storm)


@pytest.mark.slow
def test_a_flooding_key_does_not_delay_another_key(
    server: ServerProcess, faults: Faults, threads: ThreadPoolExecutor
) -> None:
    """B34: the other key is never rejected and waits only for items at the worker, not for the flooding key's queue."""
    faults.set("sleep", seconds=0.05)
    flooding = True

    def flood(_: int) -> None:
        while flooding:
            post(server, items(8, 125), "alice", cache=False)

    floods = [threads.submit(flood, n) for n in range(12)]
    until("flooded", lambda: stats(server)["open_tokens"] > MOST // 4)
    steps = []
    for _ in range(10):
        before = faults.steps()
        scores(post(server, items(2, 100), "bob"))
        steps.append(faults.steps() - before)
    flooding = False
    for done in floods:
        done.result()
    # The median, not the maximum: this process may wait for a CPU between two reads of the count.
    assert statistics.median(steps) <= WINDOW // BUDGET + 4, steps


def test_a_short_request_overtakes_a_long_one_of_the_same_key(
    server: ServerProcess, faults: Faults, threads: ThreadPoolExecutor
) -> None:
    """B36: an item of 16 tokens overtakes the queue of another request of the same key."""
    faults.set("hold")
    long = threads.submit(post, server, items(15, 250), cache=False)
    until("held", lambda: stats(server)["queue_tokens"] > 0)
    ahead = stats(server)["queue_items"]
    short = threads.submit(post, server, items(1, 16))
    until("queued", lambda: stats(server)["queue_items"] > ahead)
    before = faults.steps()
    faults.set("sleep", seconds=0.4)
    scores(short.result())
    assert faults.steps() - before <= WINDOW // BUDGET + 2
    assert not long.done()
    faults.clear()
    scores(long.result())
