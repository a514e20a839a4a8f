"""Attempts to stall, fill or bypass a server, each within the limits of a request; against one real server."""

from __future__ import annotations

import gzip
import json
import resource
import select
import signal
import socket
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, suppress
from pathlib import Path
from typing import Any

import httpx
import pytest

from .hostile import KNOWN, Target, clean_error, read_answer
from .process import ServerProcess

ANN, BOB, ADMIN = "ann-key-123", "bob-key-123", "admin-key-123"
CONNECTIONS, BUFFERED, HEADER_BYTES, VALUES = 24, 2 << 20, 16 << 10, 300_000
LIMITS = {
    "connections": CONNECTIONS, "buffered_bytes": BUFFERED, "body_bytes": 16 << 20, "header_bytes": HEADER_BYTES,
    "queued_tokens": VALUES, "items": 100_000, "write_seconds": 2.0, "body_seconds": 20.0,
}  # fmt: skip


@pytest.fixture(scope="module")
def target() -> Iterator[Target]:
    tree = {
        "models": {"sums": {"path": "sums", "threads": 1}}, "api_keys": {"ann": ANN, "bob": BOB}, "admin_key": ADMIN,
        "limits": LIMITS, "drain_delay": 3.0,
    }  # fmt: skip
    with ServerProcess(tree) as server:
        yield Target(server, ANN)


def until(what: str, condition: Callable[[], bool], seconds: float = 120) -> None:
    end = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < end, f"not {what} within {seconds} s"
        time.sleep(0.05)


def bearer(key: str) -> dict[str, str]:
    return {"authorization": f"Bearer {key}"}


def chunk(data: bytes) -> bytes:
    return b"%x\r\n%s\r\n" % (len(data), data)


def body(**fields: Any) -> bytes:
    return json.dumps({"items": [KNOWN], **fields}).encode()


def test_trailer_fields_are_not_read_as_headers(target: Target) -> None:
    head = b"POST /v1/rewards HTTP/1.1\r\nHost: localhost\r\nTransfer-Encoding: chunked\r\n\r\n"
    trailer = f"0\r\nAuthorization: Bearer {ANN}\r\n\r\n".encode()
    target.refused(target.raw(head + chunk(body()) + trailer), 401, "unauthorized")
    keyed = target.head("Transfer-Encoding: chunked") + b"\r\n"
    assert target.raw(keyed + chunk(body()) + b"0\r\nX-Deadline: -1\r\nX-Other: 1\r\n\r\n").status == 200


@pytest.mark.parametrize("line", [b"x" * 4096, b"x: y\r\n" * 512])
def test_an_endless_trailer_is_cut_off(target: Target, line: bytes) -> None:
    """With a valid key, so that nothing else ends the request: one endless line, and endlessly many lines."""
    with target.connect() as sock:
        sock.sendall(target.head("Transfer-Encoding: chunked") + b"\r\n" + chunk(body()) + b"0\r\nX: ")
        sent, answer = 0, b""
        with suppress(BrokenPipeError, ConnectionResetError):
            while sent < 64 * HEADER_BYTES and not answer:
                sock.sendall(line)
                sent += len(line)
                if select.select([sock], [], [], 0.02)[0]:
                    answer = sock.recv(65536)
        assert sent < 64 * HEADER_BYTES
    target.sound()


def test_too_many_small_json_values_are_rejected_before_allocation(target: Target) -> None:
    """15 MB of empty lists take 400 MB of memory and 20 kB on the wire."""
    before = target.peak_bytes()
    for start in (b'{"items": [', b'{"model": "sums", "input": ['):
        packed = gzip.compress(start + b"[]," * (5 << 20) + b"1]}")
        assert len(packed) < 100_000
        for path in ("/v1/rewards", "/classify", "/pooling", "/get_reward", "/v2/models/sums/infer"):
            reply = target.server.http.post(
                path, content=packed, headers={"content-type": "application/json", "content-encoding": "gzip"}
            )
            assert reply.status_code in (413, 400), path  # Triton has no 413
            assert f"more than {VALUES} JSON values" in reply.text
    assert target.peak_bytes() - before < 120 << 20
    target.sound()


def test_health_answers_while_a_large_body_is_read(target: Target) -> None:
    """The largest accepted body of numbers is parsed outside the event loop."""
    numbers = b'{"items": [{"tokens": [' + b"1," * (VALUES - 100) + b"1]}]}"
    with target.connect() as sock:
        sock.sendall(target.head(f"Content-Length: {len(numbers)}") + b"\r\n" + numbers)
        assert httpx.get(f"{target.server.url}/health/live", timeout=30).status_code == 200
        assert read_answer(sock).status == 200
    target.sound()


@pytest.mark.parametrize("coding", ["chunks", "gzip"])
def test_chunked_and_gzip_bodies_count_against_the_buffer_limit(target: Target, coding: str) -> None:
    """One request is always admitted; others get only what is left of the buffer."""
    most = BUFFERED * 3 // 4
    with target.connect() as first:
        first.sendall(target.head("Transfer-Encoding: chunked") + b"\r\n")
        first.sendall(chunk(b" " * most))
        packed = gzip.compress(b" " * most)
        lines = (
            f"Content-Encoding: gzip\r\nContent-Length: {len(packed)}"
            if coding == "gzip"
            else "Transfer-Encoding: chunked"
        )

        def refused() -> bool:
            second_try = target.connect()
            with second_try:
                data = packed if coding == "gzip" else chunk(b" " * most)
                with suppress(BrokenPipeError, ConnectionResetError):
                    second_try.sendall(target.head(lines) + b"\r\n" + data)
                    if coding == "chunks":
                        second_try.sendall(b"0\r\n\r\n")
                answer = read_answer(second_try)
            return answer.status == 503 and clean_error(answer)["type"] == "overloaded"

        until("refused", refused, 30)
        first.sendall(b"0\r\n\r\n")
        assert read_answer(first).status == 400  # not JSON
    target.sound()


def test_http_upgrade_offers_are_declined(target: Target) -> None:
    for offer in ("h2c", "websocket"):
        head = target.head(
            "Connection: Upgrade, HTTP2-Settings",
            f"Upgrade: {offer}",
            "HTTP2-Settings: AAMAAABk",
            f"Content-Length: {len(body())}",
        )
        with target.connect() as sock:
            sock.sendall(head + b"\r\n" + body()[:10])
            time.sleep(0.05)
            sock.sendall(body()[10:] + target.head("Content-Length: 0", method="GET", path="/v1/models") + b"\r\n")
            assert read_answer(sock).json()["items"][0]["scores"] == [pytest.approx(target.known, abs=5e-5)]
    target.sound()


def test_health_routes_answer_head_requests(target: Target) -> None:
    for path in ("/health/live", "/health/ready", "/health"):
        reply = httpx.head(target.server.url + path, timeout=30)
        assert (reply.status_code, reply.content) == (200, b"")


def test_stats_show_errors_only_to_their_own_key_and_the_admin(target: Target) -> None:
    http = target.server.http
    mark = "nobodys-business"
    http.post("/v1/rewards", json={"items": [KNOWN], "model": mark}, headers=bearer(ANN))

    def errors(key: str) -> str:
        return json.dumps(http.get("/stats", headers=bearer(key)).json()["errors"])

    assert mark in errors(ANN)
    assert mark in errors(ADMIN)
    assert mark not in errors(BOB)


def test_idle_connections_without_a_key_are_closed_at_the_connection_limit(target: Target) -> None:
    probe = b"GET /health/live HTTP/1.1\r\nHost: localhost\r\n\r\n"
    with ExitStack() as stack:
        for _ in range(2 * CONNECTIONS):
            sock = stack.enter_context(target.connect())
            sock.sendall(probe)
            assert read_answer(sock).status == 200
        assert target.raw(target.head(f"Content-Length: {len(body())}") + b"\r\n" + body()).status == 200
    target.sound()


@pytest.mark.slow
def test_clients_that_do_not_read_the_reply_are_disconnected(target: Target) -> None:
    with socket.socket() as sock:
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
        sock.settimeout(20)
        sock.connect(("127.0.0.1", target.server.port))
        sock.sendall(large_request(target))
        poll = select.poll()
        poll.register(sock, select.POLLHUP | select.POLLERR)
        assert poll.poll(100_000), "the connection is still there"
    target.sound()


def large_request(target: Target) -> bytes:
    """A request whose reply is larger than the kernel's socket buffers."""
    many = b'{"items": [' + b",".join([b'{"tokens":[-1]}'] * 70_000) + b"]}"
    return target.head(f"Content-Length: {len(many)}") + b"\r\n" + many


def test_a_worker_restarts_when_file_descriptors_are_available_again(target: Target) -> None:
    server = target.server
    pid = server.process.pid
    soft, hard = resource.prlimit(pid, resource.RLIMIT_NOFILE)
    open_files = len(list(Path(f"/proc/{pid}/fd").iterdir()))
    resource.prlimit(pid, resource.RLIMIT_NOFILE, (open_files - 2, hard))
    try:
        server.workers()[0].kill()
        until("told", lambda: "cannot be started" in server.log())
    finally:
        resource.prlimit(pid, resource.RLIMIT_NOFILE, (soft, hard))
    server.wait_ready()
    target.sound()


@pytest.mark.slow
def test_the_drain_waits_until_clients_have_read_their_replies(target: Target) -> None:
    """With SIGHUP, as when a terminal closes. The module's server ends here."""
    server = target.server
    with socket.socket() as sock:
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
        sock.settimeout(60)
        sock.connect(("127.0.0.1", server.port))
        sock.sendall(large_request(target))
        data = sock.recv(1024)
        assert b" 200 " in data

        def logged(event: str) -> bool:
            nonlocal data
            data += sock.recv(1 << 14)  # slowly, but the client does read
            return any(each["event"] == event for each in server.events())

        server.process.send_signal(signal.SIGHUP)
        until("leaving", lambda: logged("leaving"), 30)
        assert server.http.get("/health/ready").json()["reasons"] == ["the server is shutting down"]
        assert server.rewards([KNOWN]).status_code == 200
        until("draining", lambda: logged("draining"), 60)
        while part := sock.recv(1 << 20):
            data += part
    head, _, content = data.partition(b"\r\n\r\n")
    assert f"content-length: {len(content)}".encode() in head
    assert len(content) > 4 << 20
    assert server.process.wait(60) == 0
