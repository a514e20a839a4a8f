"""HTTP/1.1 connections as bytes on a socket, and the same application under another ASGI server."""

from __future__ import annotations

import asyncio
import re
import socket
import struct
import threading
import time
from collections.abc import AsyncGenerator, Awaitable, Callable, Iterator
from contextlib import ExitStack, contextmanager, suppress
from pathlib import Path
from typing import Any

import pytest
import uvicorn
import uvloop

from plaudit.config.serve import LimitsTable
from plaudit.serve.http.address import BACKLOG, bind
from plaudit.serve.http.app import Admission, App
from plaudit.serve.http.exchange import AsgiApp
from plaudit.serve.http.keys import Keys
from plaudit.serve.http.listener import Listener
from plaudit.serve.http.message import Limits, Reply, Request, Route, Routes
from plaudit.serve.logs import Log
from plaudit.serve.metrics import Metrics

SECONDS = 20.0  # longer than anything here takes unless it hangs
DATE = re.compile(rb"\r\ndate: \w{3}, \d\d \w{3} \d{4} \d\d:\d\d:\d\d GMT\r\n")
PARTS = [b"one", b"", b"three" * 10]


@contextmanager
def serving(app: AsgiApp, sock: socket.socket | None = None, **limits: Any) -> Iterator[int]:
    """Serve the application in a separate thread; yields the port."""
    sock = sock or bind("127.0.0.1", 0)
    loop, stop, ready = uvloop.new_event_loop(), asyncio.Event(), threading.Event()

    async def run() -> None:
        listener = Listener(app, LimitsTable(**limits))
        await listener.start([sock])
        ready.set()
        await stop.wait()
        await listener.stop()

    thread = threading.Thread(target=loop.run_until_complete, args=(run(),))
    thread.start()
    try:
        assert ready.wait(SECONDS)
        yield sock.getsockname()[1]
    finally:
        loop.call_soon_threadsafe(stop.set)
        thread.join(SECONDS)
        assert not thread.is_alive()
        loop.close()


def connected(port: int) -> socket.socket:
    return socket.create_connection(("127.0.0.1", port), timeout=SECONDS)


def exchanged(port: int, *pieces: bytes) -> bytes:
    """Send the pieces; return everything received until the server closes the connection."""
    with connected(port) as sock:
        for piece in pieces:
            sock.sendall(piece)
            time.sleep(0.01 if len(pieces) > 1 else 0)
        return b"".join(iter(lambda: sock.recv(65536), b""))


def undated(answered: bytes) -> bytes:
    """Without the Date of each reply, which must be there."""
    rest, count = DATE.subn(b"\r\n", answered)
    assert count == 1, answered
    return rest


def request(path: str = "/", *headers: str, body: bytes = b"", method: str = "POST", version: str = "1.1") -> bytes:
    lines = [f"{method} {path} HTTP/{version}", "Host: localhost", *headers, f"Content-Length: {len(body)}"]
    return "\r\n".join([*lines, "", ""]).encode() + body


async def echo(scope: Any, receive: Any, send: Any) -> None:
    """Reply with the method, path and query, followed by the body."""
    body, more = f"{scope['method']} {scope['path']}?{scope['query_string'].decode()} ".encode(), True
    while more:
        message = await receive()
        body, more = body + message["body"], message["more_body"]
    await send({"type": "http.response.start", "status": 200, "headers": [(b"content-length", b"%d" % len(body))]})
    await send({"type": "http.response.body", "body": body})


async def streamed(scope: Any, receive: Any, send: Any) -> None:
    await send({"type": "http.response.start", "status": 200, "headers": []})
    for part in PARTS:
        await send({"type": "http.response.body", "body": part, "more_body": True})
    await send({"type": "http.response.body", "body": b""})


def test_requests_of_a_connection_are_answered_in_order() -> None:
    slow = asyncio.Event()

    async def first_waits(scope: Any, receive: Any, send: Any) -> None:
        if scope["path"] == "/0":
            asyncio.get_running_loop().call_later(0.05, slow.set)
            await slow.wait()
        await echo(scope, receive, send)

    with serving(first_waits) as port:
        sent = [request(f"/{n}", body=b"%d" % n) for n in range(50)]
        last = request("/last?a=%20b", "Connection: close", body=b"x")
        answered = exchanged(port, b"".join(sent) + last)
    bodies = [each.partition(b"\r\n\r\n")[2] for each in answered.split(b"HTTP/1.1 200 OK\r\n")[1:]]
    assert bodies == [*(b"POST /%d? %d" % (n, n) for n in range(50)), b"POST /last?a=%20b x"]


@pytest.mark.parametrize("size", [1, 7, 1000])
def test_a_request_may_arrive_in_pieces_of_any_size(size: int) -> None:
    data = request("/p", "Connection: close", body=b"body")
    with serving(echo) as port:
        answered = exchanged(port, *(data[start : start + size] for start in range(0, len(data), size)))
    assert answered.endswith(b"\r\n\r\nPOST /p? body")


OFFER = ("Connection: Upgrade, HTTP2-Settings", "Upgrade: h2c", "HTTP2-Settings: AAMAAABk")
SMUGGLED = b"GET /smuggled HTTP/1.1\r\nHost: localhost\r\n\r\n"


def statuses(answered: bytes) -> list[int]:
    return [int(each) for each in re.findall(rb"HTTP/1\.[01] (\d+)", answered)]


@pytest.mark.parametrize("framing", ["length", "chunked"])
@pytest.mark.parametrize("offer", [OFFER, ("Connection: upgrade", "Upgrade: websocket"), ()], ids=["h2c", "ws", "none"])
def test_the_body_of_a_request_that_offers_an_upgrade_is_no_second_request(offer: Any, framing: str) -> None:
    data = request("/first", *offer, body=SMUGGLED)
    if framing == "chunked":
        chunks = b"%x\r\n%b\r\n0\r\n\r\n" % (len(SMUGGLED), SMUGGLED)
        data = request("/first", *offer, "Transfer-Encoding: chunked").replace(b"\r\nContent-Length: 0", b"") + chunks
    with serving(echo) as port:
        answered = exchanged(port, data + data + request("/last", "Connection: close"))
    bodies = [each.partition(b"\r\n\r\n")[2] for each in answered.split(b"HTTP/1.1 200 OK\r\n")[1:]]
    assert bodies == [b"POST /first? " + SMUGGLED] * 2 + [b"POST /last? "]


@pytest.mark.parametrize("offer", [OFFER, ()], ids=["upgrade", "none"])
def test_limits_close_and_versions_hold_for_a_request_that_offers_an_upgrade(offer: Any) -> None:
    many = [f"X-{n}: 1" for n in range(120)]
    with serving(echo) as port:
        for headers in ((*many, *offer), (*offer, *many)):
            assert statuses(exchanged(port, request("/", *headers, body=SMUGGLED))) == [431]
        assert statuses(exchanged(port, request("/", *offer, "Connection: close") + request("/2"))) == [200]
        old = exchanged(port, request("/", *offer, version="1.0") + request("/2"))
        assert statuses(old) == [200]
        assert b"connection: close" in old


def test_garbage_behind_a_request_is_answered_after_it() -> None:
    async def slow(scope: Any, receive: Any, send: Any) -> None:
        await asyncio.sleep(0.05)
        await echo(scope, receive, send)

    with serving(slow) as port:
        for garbage in (b"garbage\r\n\r\n", b"GET / HTTP/1.1\r\n\r\n", b"GET / HTTP/1.1\r\nX: " + b"x" * 70_000):
            answered = exchanged(port, request("/1", body=b"a") + request("/2", body=b"b") + garbage)
            assert statuses(answered) == [200, 200, 431 if b"xx" in garbage else 400]
        chunks = b"3\r\nabc\r\n!\r\n"
        bad = request("/2", "Transfer-Encoding: chunked").replace(b"\r\nContent-Length: 0", b"") + chunks
        assert statuses(exchanged(port, request("/1") + bad)) == [200, 400]


@pytest.mark.parametrize(
    ("lines", "status"),
    [
        (("Host: a",), 200), (("Host: a:80",), 200), (("Host: [::1]:80",), 200), (("Host:",), 200),
        ((), 400), (("Host: a", "Host: a"), 400), (("Host: a", "host: b"), 400), (("Host: a b",), 400),
        (("Host: a/b",), 400), (("Host: a@b",), 400), (("Host: a, b",), 400),
    ],
)  # fmt: skip
def test_a_request_has_one_host(lines: tuple[str, ...], status: int) -> None:
    data = "\r\n".join(["GET / HTTP/1.1", *lines, "Connection: close", "", ""]).encode()
    with serving(echo) as port:
        assert statuses(exchanged(port, data)) == [status]
        assert statuses(exchanged(port, b"GET / HTTP/1.0\r\n\r\n")) == [200]


def test_pipelined_requests_are_not_parsed_before_their_turn() -> None:
    """Sixty clients that pipeline requests and read nothing must not keep others waiting."""
    handled = 0

    async def large(scope: Any, receive: Any, send: Any) -> None:
        nonlocal handled
        handled += scope["path"] == "/large"
        body = b" " * (1 << 16 if scope["path"] == "/large" else 1)
        await send({"type": "http.response.start", "status": 200, "headers": [(b"content-length", b"%d" % len(body))]})
        await send({"type": "http.response.body", "body": body})

    many = request("/large", method="GET") * 10_000
    with serving(large) as port, ExitStack() as stack:
        for _ in range(20):
            sock = stack.enter_context(socket.socket())
            sock.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 1 << 16)
            sock.connect(("127.0.0.1", port))
            sock.setblocking(False)
            with suppress(BlockingIOError):
                while True:
                    sock.sendall(many)
        counts = [-1]
        while handled != counts[-1]:
            counts.append(handled)
            assert statuses(exchanged(port, request("/", "Connection: close"))) == [200]
            time.sleep(0.2)
    assert 20 <= handled < 20 * 200, "what the sockets take, and no more"


def test_each_connection_over_the_limit_closes_the_longest_idle_one() -> None:
    """... without a search through all of them."""
    with serving(echo, connections=50) as port, ExitStack() as stack:
        socks = [stack.enter_context(connected(port)) for _ in range(50)]
        for sock in (*socks[10:], *socks[:10]):
            sock.sendall(request())
            assert sock.recv(1000)
        for _ in range(20):
            fresh = stack.enter_context(connected(port))
            fresh.sendall(request())
            assert statuses(fresh.recv(1000)) == [200]
        for number, sock in enumerate(socks):
            sock.sendall(request())
            with suppress(ConnectionError):
                assert bool(sock.recv(1000)) == (not 10 <= number < 30)


def test_a_thousand_connections_may_wait_to_be_accepted() -> None:
    sock = bind("127.0.0.1", 0)
    with serving(echo, sock), sock.dup() as watched:
        information = struct.unpack("8B6I", watched.getsockopt(socket.IPPROTO_TCP, socket.TCP_INFO, 32))
        waiting_at_most = information[-1]  # for a listening socket; net.core.somaxconn may be lower
        most = int(Path("/proc/sys/net/core/somaxconn").read_text())
        assert waiting_at_most == min(BACKLOG, most) == min(1024, most)


def test_head_has_the_headers_of_the_reply_and_no_body() -> None:
    with serving(echo) as port:
        answered = exchanged(port, request(method="HEAD") + request("/2", "Connection: close"))
    first, second = answered.split(b"HTTP/1.1 200 OK\r\n")[1:]
    assert undated(first) == b"content-length: 8\r\n\r\n"
    assert second.endswith(b"POST /2? ")


def test_replies_of_unknown_length_are_chunked_or_end_the_connection() -> None:
    with serving(streamed) as port:
        assert undated(exchanged(port, request("/", "Connection: close"))) == (
            b"HTTP/1.1 200 OK\r\ntransfer-encoding: chunked\r\nconnection: close\r\n\r\n"
            b"3\r\none\r\n32\r\n" + PARTS[2] + b"\r\n0\r\n\r\n"
        )
        # HTTP/1.0 has no chunks: the reply ends with the connection.
        assert undated(exchanged(port, request(version="1.0"))) == (
            b"HTTP/1.1 200 OK\r\nconnection: close\r\n\r\n" + b"".join(PARTS)
        )


def test_expect_100_continue_is_answered_before_the_body() -> None:
    with serving(echo) as port, connected(port) as sock:
        data = request("/", "Expect: 100-continue", "Connection: close", body=b"body")
        sock.sendall(data[:-4])
        assert sock.recv(100) == b"HTTP/1.1 100 Continue\r\n\r\n"
        sock.sendall(data[-4:])
        assert b"".join(iter(lambda: sock.recv(65536), b"")).endswith(b"POST /? body")


@pytest.mark.parametrize(
    ("headers", "bodies"),
    [
        ([(b"content-length", b"5")], [b"1234"]),
        ([(b"content-length", b"3")], [b"1234"]),
        ([(b"x-name", b"a\r\nb: c")], [b""]),
        ([(b"x-name", b"a\x00b")], [b""]),
        (None, []),
    ],
    ids=["short", "long", "line break", "control character", "no reply"],
)
def test_an_invalid_reply_closes_the_connection(headers: Any, bodies: list[bytes]) -> None:
    async def wrong(scope: Any, receive: Any, send: Any) -> None:
        if headers is not None:
            await send({"type": "http.response.start", "status": 200, "headers": headers})
        for body in bodies:
            await send({"type": "http.response.body", "body": body})

    with serving(wrong) as port:
        assert exchanged(port, request()) == b""


def test_a_client_that_does_not_read_stops_the_sender() -> None:
    written = []
    disconnected = threading.Event()

    async def endless(scope: Any, receive: Any, send: Any) -> None:
        await send({"type": "http.response.start", "status": 200, "headers": []})
        while not disconnected.is_set():
            await send({"type": "http.response.body", "body": b" " * 65536, "more_body": True})
            written.append(65536)
            if (await asyncio.wait_for(receive(), SECONDS))["type"] == "http.disconnect":
                disconnected.set()

    async def endless_without_reading(scope: Any, receive: Any, send: Any) -> None:
        await send({"type": "http.response.start", "status": 200, "headers": []})
        for _ in range(10_000):
            await send({"type": "http.response.body", "body": b" " * 65536, "more_body": True})
            written.append(65536)
            await asyncio.sleep(0)

    with serving(endless_without_reading, write_seconds=60) as port, connected(port) as sock:
        sock.sendall(request())
        count, deadline = -1, time.monotonic() + SECONDS
        while (not written or len(written) != count) and time.monotonic() < deadline:
            count = len(written)
            time.sleep(0.3)
        assert 0 < sum(written) < 40 << 20, "what the kernel and one buffer take, and no more"
    written.clear()
    with serving(endless) as port:
        with connected(port) as sock:
            sock.sendall(request())
            assert sock.recv(100)
        assert disconnected.wait(SECONDS)


def application(handler: Callable[[Request], Awaitable[Reply]]) -> App:
    limits, metrics = LimitsTable(), Metrics()
    return App(
        Routes([Route("POST", "/work", "key", handler, work=True)]), Keys({}, keyless=True, allow_open=frozenset()),
        Admission(limits.queued_tokens, limits.buffered_bytes, 1, 429, metrics),
        Limits(limits.body_bytes, limits.body_seconds, limits.request_seconds), metrics, Log(metrics.log_failures.inc),
        log_requests=False,
    )  # fmt: skip


@contextmanager
def under_uvicorn(app: AsgiApp, **settings: Any) -> Iterator[int]:
    server = uvicorn.Server(uvicorn.Config(app, lifespan="off", **{"log_level": "error", **settings}))
    sock = socket.create_server(("127.0.0.1", 0))
    thread = threading.Thread(target=server.run, args=([sock],))
    thread.start()
    try:
        yield sock.getsockname()[1]
    finally:
        server.should_exit = True
        thread.join(SECONDS)
        assert not thread.is_alive()


@pytest.mark.parametrize("server", [serving, under_uvicorn], ids=["listener", "uvicorn"])
def test_the_application_runs_under_the_listener_and_uvicorn(server: Any) -> None:
    begun, cancelled = threading.Event(), threading.Event()

    async def parts() -> AsyncGenerator[bytes, None]:
        for part in PARTS:
            yield part

    async def handler(request: Request) -> Reply:
        if request.content == b"wait":
            begun.set()
            try:
                await asyncio.sleep(SECONDS)
            except asyncio.CancelledError:
                cancelled.set()
                raise
        return Reply(200, b"", parts=parts()) if request.content == b"parts" else Reply(200, request.content[::-1])

    with server(application(handler)) as port:
        assert exchanged(port, request("/work", "Connection: close", body=b"abc")).endswith(b"\r\n\r\ncba")
        assert b"three" * 10 in exchanged(port, request("/work", "Connection: close", body=b"parts"))
        assert exchanged(port, request("/else", "Connection: close")).startswith(b"HTTP/1.1 404")
        with connected(port) as sock:
            sock.sendall(request("/work", body=b"wait"))
            assert begun.wait(SECONDS)
        assert cancelled.wait(SECONDS), "a client that has gone ends its work"
