"""Failures of a step, the worker, the event loop, the disk, the start and the shutdown."""

from __future__ import annotations

import ast
import signal
import socket
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from itertools import count, islice
from pathlib import Path
from shutil import copytree
from typing import Any

import httpx
import numpy as np
import psutil
import pytest
from safetensors.numpy import load_file, save_file

import plaudit.serve
from tests.forked import run_forked
from tests.serve.faults import Faults
from tests.serve.process import ServerProcess, free_port

SUMS = Path(plaudit.__path__[0]) / "embedded" / "sums"
ADMIN = "key-of-the-admin"
BUDGET = 1024
_numbers = count()


def items(how_many: int, length: int = 40) -> list[dict[str, Any]]:
    """Items that no earlier request contained."""
    return [{"tokens": [5 + (n >> bit) % 2 for bit in range(length)]} for n in islice(_numbers, how_many)]


def answers(reply: httpx.Response) -> list[dict[str, Any]]:
    assert reply.status_code == 200, reply.text
    results: list[dict[str, Any]] = reply.json()["items"]
    return results


def scores(reply: httpx.Response) -> list[float]:
    return [item["scores"][0] for item in answers(reply)]


def request_scores(server: ServerProcess, content: list[dict[str, Any]]) -> httpx.Response:
    return server.rewards(content, cache=False)


def until(what: str, condition: Any, seconds: float = 120) -> None:
    end = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < end, f"not {what} within {seconds} s"
        time.sleep(0.02)


def model(server: ServerProcess) -> dict[str, Any]:
    stats: dict[str, Any] = server.http.get("/stats").json()["models"][0]
    return stats


def descendants(server: ServerProcess) -> list[psutil.Process]:
    return psutil.Process(server.process.pid).children(recursive=True)


def exited(processes: list[psutil.Process]) -> bool:
    return not psutil.wait_procs(processes, timeout=30)[1]


@pytest.fixture(scope="module")
def faults() -> Iterator[Faults]:
    with Faults() as faults:
        yield faults


@pytest.fixture(scope="module")
def threads() -> Iterator[ThreadPoolExecutor]:
    with ThreadPoolExecutor(16) as threads:
        yield threads


@pytest.fixture(scope="module")
def root(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Models to swap in: one with other weights, one with truncated weights, and a copy."""
    root = tmp_path_factory.mktemp("models")
    other_model(root / "other")
    cut_model(root / "cut")
    copytree(SUMS, root / "same")
    return root


def other_model(path: Path) -> None:
    copytree(SUMS, path)
    file = path / "model.safetensors"
    weights = load_file(file)
    weights["score.weight"] = -weights["score.weight"]
    save_file(weights, file, metadata={"format": "pt"})


def cut_model(path: Path) -> None:
    copytree(SUMS, path)
    file = path / "model.safetensors"
    file.write_bytes(file.read_bytes()[:20_000])


@pytest.fixture(scope="module")
def server(faults: Faults, root: Path) -> Iterator[ServerProcess]:
    tree = {
        "models": {"sums": {"path": "sums", "budget": BUDGET}}, "admin_key": ADMIN, "model_root": str(root),
        "health_port": free_port(), "overload_status": 429, "limits": {"queued_tokens": 20_000},
    }  # fmt: skip
    with ServerProcess(tree, environment=faults.environment) as server:
        server.health_port = tree["health_port"]  # type: ignore[attr-defined]
        yield server


@pytest.fixture(autouse=True)
def _mended(faults: Faults) -> Iterator[None]:
    yield
    faults.clear()


def test_items_of_a_failed_step_are_computed_again(server: ServerProcess, faults: Faults) -> None:
    """C37: the items are computed again, one by one, and no client sees an error."""
    batch = items(6)
    expected = scores(request_scores(server, batch))
    faults.set("raise", once=True)
    assert scores(request_scores(server, batch)) == pytest.approx(expected, abs=5e-5)
    assert faults.met
    assert model(server)["restarts"] == 0


def test_only_an_item_that_always_fails_gets_an_error(
    server: ServerProcess, faults: Faults, threads: ThreadPoolExecutor
) -> None:
    """C38: only this item gets an error, which discloses no internals; the others get their scores, also while other
    work keeps arriving."""
    batch = items(12)
    expected = scores(request_scores(server, batch))
    faults.set("raise", tokens=batch[5]["tokens"])
    busy = True

    def others() -> None:
        while busy:
            scores(request_scores(server, items(4)))

    other = threads.submit(others)
    replies = list(threads.map(lambda _: answers(request_scores(server, batch)), range(3)))
    busy = False
    other.result()
    for reply in replies:
        error = reply[5]["error"]
        assert error["type"] == "compute_failed"
        assert not any(word in error["message"] for word in ("Traceback", ".py", "0x"))
        assert reply[5].get("scores") in (None, [None])
        rest = [item["scores"][0] for i, item in enumerate(reply) if i != 5]
        assert rest == pytest.approx(expected[:5] + expected[6:], abs=5e-5)
    faults.clear()
    assert scores(request_scores(server, batch)) == pytest.approx(expected, abs=5e-5)


def test_out_of_memory_splits_the_batch_and_halves_the_budget(server: ServerProcess, faults: Faults) -> None:
    """C39: the batch is split, the budget of a step is halved (once, however many items), and all get their scores."""
    batch = items(20)
    expected = scores(request_scores(server, batch))
    faults.set("memory", once=True)
    assert scores(request_scores(server, batch)) == pytest.approx(expected, abs=5e-5)
    assert faults.met
    assert model(server)["budget"] == BUDGET // 2
    assert model(server)["restarts"] == 0


def test_overload_is_rejected_with_the_configured_status_429(
    server: ServerProcess, faults: Faults, threads: ThreadPoolExecutor
) -> None:
    """B27: with `overload_status = 429` overload is rejected with this status."""
    faults.set("hold")
    replies = [threads.submit(request_scores, server, items(30, 250)) for _ in range(5)]
    until("refused", lambda: sum(reply.done() for reply in replies) == 3)
    refused = [reply.result() for reply in replies if reply.done()]
    faults.clear()
    assert {reply.status_code for reply in refused} == {429}
    assert all(int(reply.headers["retry-after"]) >= 1 for reply in refused)
    assert sorted(reply.result().status_code for reply in replies) == [200] * 2 + [429] * 3


@pytest.mark.slow
def test_a_blocked_event_loop_is_reported_and_the_health_port_answers(server: ServerProcess, faults: Faults) -> None:
    """C44: the second health port keeps answering; the log and a metric report the blocked loop."""
    faults.set("block", seconds=6, once=True)
    until("blocked", lambda: faults.met)
    reply = httpx.get(f"http://127.0.0.1:{server.health_port}/health/live", timeout=5)  # type: ignore[attr-defined]
    assert reply.json() == {"status": "live"}
    with pytest.raises(httpx.TimeoutException):
        server.http.get("/health/live", timeout=1)
    until("logged", lambda: any(e["event"] == "loop_blocked" and e["seconds"] > 2 for e in server.events()))
    slow = server.metric("plaudit_loop_lag_seconds_count") - server.metric("plaudit_loop_lag_seconds_bucket", le="2.5")
    assert slow >= 1
    scores(request_scores(server, items(1)))


@pytest.mark.slow
def test_a_stopped_worker_resumes_and_answers_waiting_requests(
    server: ServerProcess, threads: ThreadPoolExecutor
) -> None:
    """C42: unready after 10 s of silence, live all the time; when the worker resumes, waiting requests are answered."""
    batch = items(4)
    expected = scores(request_scores(server, batch))
    (worker,) = server.workers()
    worker.suspend()
    try:
        waiting = threads.submit(request_scores, server, batch)
        until("not ready", lambda: not server.ready(), 25)  # a worker is replaced after 30
        assert server.http.get("/health/live").status_code == 200
    finally:
        worker.resume()
    assert scores(waiting.result()) == pytest.approx(expected, abs=5e-5)
    until("ready", server.ready, 30)
    assert server.workers()[0].pid == worker.pid


def test_a_worker_with_a_lost_device_is_replaced(server: ServerProcess, faults: Faults) -> None:
    """C40: the worker exits, and another one replaces it and answers its items."""
    batch = items(6)
    expected = scores(request_scores(server, batch))
    (worker,) = server.workers()
    faults.set("sticky", once=True)
    assert scores(request_scores(server, batch)) == pytest.approx(expected, abs=5e-5)
    assert server.workers()[0].pid != worker.pid
    assert any(e["event"] == "model" and "exited with code 3" in e["reason"] for e in server.events())


def test_a_killed_worker_is_replaced_and_every_item_is_answered(
    server: ServerProcess, faults: Faults, threads: ThreadPoolExecutor
) -> None:
    """C41: unready until another worker has loaded; every item is answered, with the same scores."""
    batches = [items(6) for _ in range(4)]
    expected = [scores(request_scores(server, content)) for content in batches]
    restarts = model(server)["restarts"]
    faults.set("hold")
    replies = [threads.submit(request_scores, server, content) for content in batches]
    until("held", lambda: model(server)["held_tokens"] > 0)
    server.workers()[0].kill()
    faults.clear()
    until("not ready", lambda: not server.ready())
    for reply, expected_scores in zip(replies, expected, strict=True):
        assert scores(reply.result()) == pytest.approx(expected_scores, abs=5e-5)
    assert model(server)["restarts"] == restarts + 1
    assert server.ready()


@pytest.mark.timeout(600)  # three workers are restarted, one after the other
def test_an_item_that_kills_the_worker(server: ServerProcess, faults: Faults, threads: ThreadPoolExecutor) -> None:
    """C41, C43: only this item gets `worker_crash`, the others get their scores, and the model stays in service."""
    batch = items(6)
    expected = scores(request_scores(server, batch))
    faults.set("exit", tokens=batch[2]["tokens"])

    def patient(content: list[dict[str, Any]]) -> httpx.Response:
        return server.http.post("/v1/rewards", json={"items": content, "cache": False}, timeout=240)

    other = threads.submit(patient, items(5))  # it waits for the same workers
    reply = answers(patient(batch))
    assert reply[2]["error"]["type"] == "worker_crash"
    rest = [item["scores"][0] for i, item in enumerate(reply) if i != 2]
    assert rest == pytest.approx(expected[:2] + expected[3:], abs=5e-5)
    scores(other.result())
    faults.clear()
    assert scores(request_scores(server, batch)) == pytest.approx(expected, abs=5e-5)
    assert server.ready()


def test_replies_during_a_swap_have_one_version_each(server: ServerProcess, threads: ThreadPoolExecutor) -> None:
    """C51: every reply names its version and has only scores of that version, from the cache too; a failed swap changes
    nothing."""
    batch = items(16)
    old = np.array(scores(server.rewards(batch)))
    swapping = True
    replies: list[tuple[str, np.ndarray]] = []

    def traffic(cache: bool) -> None:
        while swapping:
            reply = server.rewards(batch, cache=cache)
            replies.append((reply.json()["version"], np.array(scores(reply))))
            time.sleep(0.05)  # the new version's worker needs a processor too

    def swap(path: str) -> httpx.Response:
        headers = {"authorization": f"Bearer {ADMIN}"}
        return server.http.post("/admin/swap", json={"model": "sums", "path": path}, headers=headers, timeout=240)

    traffics = [threads.submit(traffic, cache) for cache in (True, False, False)]
    first = model(server)["version"]
    failed = swap("cut")
    assert failed.status_code == 400
    assert "nothing has changed" in failed.text
    assert model(server)["version"] == first
    second = swap("other").json()["version"]
    until("answered by the new one", lambda: any(version == second for version, _ in replies))
    swapping = False
    for done in traffics:
        done.result()
    assert {version for version, _ in replies} == {first, second}
    for version, values in replies:
        assert values == pytest.approx(old if version == first else -old, abs=1e-4)
    assert np.abs(old).max() > 0.1
    until("retired", lambda: len(server.workers()) == 1)
    assert server.metric("plaudit_model_info", version=second) == 1
    assert server.metric("plaudit_model_info", version=first) == 0


def refused(server: ServerProcess) -> bool:
    """Whether a new connection is refused."""
    try:
        socket.create_connection(("127.0.0.1", server.port), 5).close()
    except ConnectionRefusedError:
        return True
    except TimeoutError:
        return False
    return False


def test_sigterm_drains_open_requests(server: ServerProcess, faults: Faults, threads: ThreadPoolExecutor) -> None:
    """C45: unready at once, no new connections, accepted requests are answered and their connections closed, also a
    request that comes during the drain on a connection from before; exit code 0, no process is left. The module's
    server ends here."""
    faults.set("hold")
    waiting = threads.submit(request_scores, server, items(20))
    until("held", lambda: model(server)["held_tokens"] > 0)
    processes = descendants(server)
    with httpx.Client(base_url=server.url, timeout=120) as before:
        assert "connection" not in before.get("/health/live").headers
        server.process.send_signal(signal.SIGTERM)
        until("draining", lambda: any(event["event"] == "draining" for event in server.events()), 30)
        until("refused", lambda: refused(server), 30)
        late = threads.submit(before.post, "/v1/rewards", json={"model": "sums", "items": items(2)})
        assert not waiting.done()
        faults.clear()
        assert len(scores(waiting.result())) == 20
        assert late.result().headers["connection"] == "close"
        assert len(scores(late.result())) == 2
    assert server.process.wait(60) == 0
    assert exited(processes)


def test_a_full_disk_is_survived_and_a_second_signal_ends_the_drain(
    faults: Faults, threads: ThreadPoolExecutor
) -> None:
    """C49, C46: without disk space for its log the server keeps running and counts the failures; a second signal ends
    it at once."""
    tree = {"models": {"sums": {"path": "sums"}}, "log": "requests"}
    environment = {**faults.environment, "PLAUDIT_FULL_DISK": "1"}
    with ServerProcess(tree, environment=environment) as server:
        expected = scores(server.rewards(items(3)))
        assert len(expected) == 3
        until("counted", lambda: server.metric("plaudit_log_failures_total") > 3, 60)
        faults.set("hold")
        waiting = threads.submit(request_scores, server, items(1))
        until("held", lambda: model(server)["held_tokens"] > 0)
        processes = descendants(server)
        server.process.send_signal(signal.SIGTERM)
        until("draining", lambda: not server.ready(), 30)
        server.process.send_signal(signal.SIGTERM)
        assert server.process.wait(20) == 1  # not the 30 s that one signal waits for open requests
        assert exited(processes)
        with pytest.raises(httpx.TransportError):
            waiting.result()


@pytest.mark.slow
def test_a_model_fails_after_three_worker_deaths_in_a_row(faults: Faults, threads: ThreadPoolExecutor) -> None:
    """C43: after three deaths in a row the model fails: waiting requests get an error and the server exits with 1."""
    with ServerProcess({"models": {"sums": {"path": "sums"}}}, environment=faults.environment) as server:
        faults.set("start")
        processes = descendants(server)
        server.workers()[0].kill()
        until("not ready", lambda: not server.ready(), 60)
        waiting = threads.submit(request_scores, server, items(2))
        assert server.process.wait(120) == 1
        assert exited(processes)
        try:
            reply = waiting.result()
        except httpx.TransportError:
            pass  # it arrived after the port was closed
        else:
            assert reply.status_code == 503 or all(i["error"]["type"] == "model_failed" for i in answers(reply))
        assert "3 times in a row without a result" in server.log()
        assert "Traceback" not in server.log()


def test_sigterm_while_the_model_loads_ends_at_once() -> None:
    """C47: the server exits at once and leaves no process."""
    with ServerProcess({"models": {"sums": {"path": "sums"}}}, wait=False) as server:
        until("started", lambda: server.workers(), 60)
        processes = descendants(server)
        assert server.stop(seconds=20) == 0
        assert exited(processes)
        assert "Traceback" not in server.log()


def start(*arguments: str) -> tuple[int, str]:
    """Run a server that cannot start; return its exit code and its output without the log."""
    result = run_forked("serve", *arguments)
    return result.returncode, result.stdout + "".join(
        line for line in result.stderr.splitlines(keepends=True) if not line.startswith("{")
    )


def wide_head(path: Path) -> None:
    copytree(SUMS, path)
    file = path / "model.safetensors"
    weights = load_file(file)
    weights["score.weight"] = np.zeros((3, weights["score.weight"].shape[1]), np.float32)
    save_file(weights, file, metadata={"format": "pt"})


def without_weights(path: Path) -> None:
    copytree(SUMS, path)
    (path / "model.safetensors").unlink()


@pytest.mark.parametrize(
    "broken",
    [
        cut_model,
        pytest.param(wide_head, marks=pytest.mark.slow),
        pytest.param(without_weights, marks=pytest.mark.slow),
    ],
)
def test_a_model_that_cannot_be_loaded_is_reported_in_one_line(broken: Any, tmp_path: Path) -> None:
    """C48: truncated, misshapen and missing weights: exit code 2 with one line, and the port is closed."""
    broken(tmp_path / "model")
    port = free_port()
    code, output = start("--model", str(tmp_path / "model"), "--port", str(port))
    assert code == 2, output
    loading, reason = output.splitlines()
    assert loading.startswith("plaudit serve: loading")
    assert reason.startswith("plaudit: ")
    assert "model" in reason
    with pytest.raises(ConnectionRefusedError):
        socket.create_connection(("127.0.0.1", port))


def test_a_configuration_that_cannot_be_served_is_reported_in_one_line(tmp_path: Path) -> None:
    """C48: a port in use and a bad configuration: exit code 2 with one line."""
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        listener.listen()
        port = listener.getsockname()[1]
        code, output = start("--port", str(port))
        loading, reason = output.splitlines()
        assert code == 2
        assert loading.startswith("plaudit serve: loading")
        assert f"127.0.0.1:{port}" in reason
    bad = tmp_path / "serve.toml"
    bad.write_text('[models.sums]\npath = "sums"\n[limits]\nqueued_token = 5\n')
    code, output = start("--config", str(bad))
    assert (code, output.count("\n")) == (2, 1), output
    assert "queued_token" in output


def test_no_deadline_depends_on_the_wall_clock() -> None:
    """C52: `time.time()` is only written out (log, page, `created` of a protocol), never stored, compared or computed
    with, so a clock that jumps moves no deadline. Excluded are traces, whose spans begin and end in wall-clock time."""
    here = Path(plaudit.serve.__path__[0])
    calls, computed = 0, set()
    for file in set(here.rglob("*.py")) - {here / "http" / "traces.py"}:
        tree = ast.parse(file.read_text())
        for parent in ast.walk(tree):
            assert not (isinstance(parent, ast.ImportFrom) and parent.module in ("time", "datetime")), file.name
            for child in ast.iter_child_nodes(parent):
                if isinstance(child, ast.Call) and ast.unparse(child.func) in ("time.time", "time.time_ns"):
                    calls += 1
                    if not isinstance(parent, ast.Call | ast.Dict | ast.keyword):
                        computed.add(f"{file.name}:{child.lineno}")
    assert calls > 0
    assert not computed
