"""From a connection to a handler: bounds on what comes before a request is understood, how much work is let in, and the
ASGI application, which finds the route, lets the caller in, answers and counts. Nothing here runs a model.

It speaks ASGI itself and uses no framework: what a request may cost (bytes, seconds, items) is bounded here and in
`message.py` before anything reads it, and a route's access is decided in one place that nothing can go around.

Work is counted in tokens and bytes: what would only wait is refused at once, with a time to come back. The last share
is kept for API keys that hold less than theirs, so that one key cannot shut out the others.
"""

from __future__ import annotations

import asyncio
import itertools
import math
import resource
import secrets
import socket
import time
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from http import HTTPStatus
from typing import Any

from uvicorn import Config, Server
from uvicorn.protocols.http.httptools_impl import HttpToolsProtocol

from plaudit.config.serve import LimitsTable
from plaudit.errors import ConfigError
from plaudit.serve.http.message import (
    Connection,
    Endpoint,
    ErrorWriter,
    HttpError,
    Keys,
    Limits,
    Receive,
    Reply,
    Request,
    Route,
    Routes,
    Scope,
    Send,
    send_reply,
)  # fmt: skip
from plaudit.serve.logs import Log
from plaudit.serve.metrics import Metrics

KEEP_ALIVE_SECONDS = 75
SPARE_FILES = 256  # beside the connections: workers, pipes, logs
PACE_SECONDS = 10.0  # over which the pace of answering is estimated
LONGEST_WAIT = 30


class GuardedProtocol(HttpToolsProtocol):
    limits: LimitsTable

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        super().connection_made(transport)
        self.transport = _Gathering(transport, self.loop)  # type: ignore[assignment]
        self._timer: asyncio.TimerHandle | None = None
        self._connection = Connection()
        self._in_headers = True
        self._header_bytes = self._header_count = self._raw_bytes = 0
        self._arm()

    def connection_lost(self, exc: Exception | None) -> None:
        self._disarm()
        self._connection.lose()
        super().connection_lost(exc)
        # uvicorn forgets this after an error, and the timer would keep all of the connection for its time.
        self._unset_keepalive_if_required()

    def data_received(self, data: bytes) -> None:
        super().data_received(data)
        if self._in_headers:
            # A header that never ends reaches no callback; only its bytes can be counted.
            self._raw_bytes += len(data)
            if self._raw_bytes > self.limits.header_bytes:
                self._refuse(_headers_too_large(self.limits))
            elif self._timer is None:
                self._arm()

    def on_message_begin(self) -> None:
        super().on_message_begin()
        self.scope["connection"] = self._connection  # type: ignore[typeddict-unknown-key]
        self._in_headers = True
        self._header_bytes = self._header_count = self._raw_bytes = 0

    def on_url(self, url: bytes) -> None:
        super().on_url(url)
        self._header_bytes += len(url)

    def on_header(self, name: bytes, value: bytes) -> None:
        self._header_bytes += len(name) + len(value)
        self._header_count += 1
        if self._header_bytes <= self.limits.header_bytes and self._header_count <= self.limits.headers:
            super().on_header(name, value)

    def on_headers_complete(self) -> None:
        self._in_headers = False
        self._disarm()
        if self._header_bytes > self.limits.header_bytes or self._header_count > self.limits.headers:
            self._refuse(_headers_too_large(self.limits))
        elif len(self.connections) > self.limits.connections:
            message = f"{self.limits.connections} connections are open, which is the most; try again in 1 s"
            self._refuse(HttpError(503, "too_many_connections", message, retry_after=1))
        else:
            super().on_headers_complete()

    def on_body(self, body: bytes) -> None:
        if self.cycle is not None:
            super().on_body(body)

    def on_message_complete(self) -> None:
        if self.cycle is not None:
            self.scope["arrived"] = True  # type: ignore[typeddict-unknown-key]
            super().on_message_complete()

    def send_400_response(self, msg: str) -> None:
        self._refuse(HttpError(400, "bad_http", "this is not HTTP/1.1: the request could not be parsed"))

    def _refuse(self, error: HttpError) -> None:
        if not self.transport.is_closing():
            self.transport.write(_written(error))
            self.transport.close()

    def _arm(self) -> None:
        self._timer = self.loop.call_later(self.limits.header_seconds, self._too_slow)

    def _disarm(self) -> None:
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None

    def _too_slow(self) -> None:
        self._timer = None
        if self._in_headers and not self.transport.is_closing():
            self.transport.close()


def guarded(limits: LimitsTable) -> type[asyncio.Protocol]:
    """The protocol with these limits: uvicorn takes a class."""
    return type("LimitedProtocol", (GuardedProtocol,), {"limits": limits})


def _headers_too_large(limits: LimitsTable) -> HttpError:
    most = f"at most {limits.headers} headers of {limits.header_bytes} bytes together are taken"
    return HttpError(431, "headers_too_large", f"{most}; send fewer")


def _written(error: HttpError) -> bytes:
    """The reply to what never became a request."""
    request_id = secrets.token_hex(8)
    reply = error.reply(request_id)
    lines = [
        f"HTTP/1.1 {error.status} {HTTPStatus(error.status).phrase}".encode(), b"content-type: " + reply.content_type,
        f"content-length: {len(reply.body)}".encode(), f"x-request-id: {request_id}".encode(), b"connection: close",
        *(name + b": " + value for name, value in reply.headers),
    ]  # fmt: skip
    return b"\r\n".join(lines) + b"\r\n\r\n" + reply.body


class _Gathering:
    """A transport that writes once per turn of the event loop: uvicorn writes head and body of a reply apart, and a
    system call for each costs as much as all the rest of a small request."""

    def __init__(self, transport: asyncio.Transport, loop: asyncio.AbstractEventLoop) -> None:
        self._transport = transport
        self._loop = loop
        self._waiting: list[bytes] = []

    def __getattr__(self, name: str) -> Any:
        return getattr(self._transport, name)

    def write(self, data: bytes) -> None:
        if not self._waiting:
            self._loop.call_soon(self._flush)
        self._waiting.append(data)

    def close(self) -> None:
        self._flush()
        self._transport.close()

    def _flush(self) -> None:
        if self._waiting:
            data = b"".join(self._waiting)
            self._waiting.clear()
            self._transport.write(data)


class Listener(Server):
    """uvicorn's server, which leaves signals to us: on SIGTERM it must go on listening while it drains."""

    def __init__(self, app: Any, limits: LimitsTable) -> None:
        _raise_file_limit(limits.connections + SPARE_FILES)
        super().__init__(
            Config(
                app, http=guarded(limits), ws="none", lifespan="off", log_config=None, access_log=False,
                proxy_headers=False, server_header=False, date_header=False, timeout_keep_alive=KEEP_ALIVE_SECONDS,
                timeout_graceful_shutdown=1,
                log_level="error",  # what is not HTTP is the sender's error, and would fill the log
            )
        )  # fmt: skip

    async def serve(self, sockets: list[socket.socket] | None = None) -> None:
        await self._serve(sockets)


def _raise_file_limit(needed: int) -> None:
    """Shells give a process 1024 open files, which is fewer than the connections it should take."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    most = needed if hard == resource.RLIM_INFINITY else min(needed, hard)
    if soft != resource.RLIM_INFINITY and soft < most:
        resource.setrlimit(resource.RLIMIT_NOFILE, (most, hard))


def bind(host: str, port: int) -> socket.socket:
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    sock = socket.socket(family, socket.SOCK_STREAM)
    sock.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    try:
        sock.bind((host, port))
        sock.listen(1024)
    except OSError as error:
        sock.close()
        raise ConfigError(f"cannot listen on {host}:{port}: {error.strerror or error}; choose another --port") from None
    sock.setblocking(False)
    return sock


class Quota:
    """`limit` of something, shared by a number of API keys."""

    def __init__(self, limit: int, keys: int) -> None:
        self.limit = limit
        self.in_use = 0
        self._share = limit // max(1, keys)
        self._by_tenant: Counter[str] = Counter()

    @property
    def most(self) -> int:
        """That one key can have at a time, when nobody else has any."""
        return max(self._share, self.limit - self._share)

    def fits(self, tenant: str, count: int) -> bool:
        within_share = self._by_tenant[tenant] + count <= self._share
        return self.in_use + count <= (self.limit if within_share else self.limit - self._share)

    @contextmanager
    def holding(self, tenant: str, count: int) -> Iterator[None]:
        self.in_use += count
        self._by_tenant[tenant] += count
        try:
            yield
        finally:
            self.in_use -= count
            self._by_tenant[tenant] -= count


class Admission:
    """draining lets nothing more in."""

    def __init__(
        self, queued_tokens: int, buffered_bytes: int, keys: int, overload_status: int, metrics: Metrics
    ) -> None:
        self.open_requests = 0
        self.draining = False
        self._tokens = Quota(queued_tokens, keys)
        self._bytes = Quota(buffered_bytes, keys)
        self._status = overload_status
        self._metrics = metrics
        self._answered = 0
        self._pace = 0.0  # tokens answered in a second, while there is something to answer

    @property
    def open_tokens(self) -> int:
        """Accepted and not yet answered."""
        return self._tokens.in_use

    @property
    def most_tokens(self) -> int:
        return self._tokens.limit

    @contextmanager
    def request(self, tenant: str, content_length: int) -> Iterator[None]:
        """Before anything of the request is read."""
        if self.draining:
            self._metrics.rejected.labels("draining").inc()
            raise HttpError(503, "draining", "the server is shutting down; try another", retry_after=1)
        # A single request is held to the limit of its own size, and is let in when there is no other.
        if not self._bytes.fits(tenant, content_length) and self._bytes.in_use:
            raise self._overload(f"{self._bytes.in_use} bytes of requests are handled, at most {self._bytes.limit}")
        if not self._tokens.fits(tenant, 1):
            raise self._overload(f"{self.open_tokens} tokens wait, at most {self.most_tokens}")
        self.open_requests += 1
        try:
            with self._bytes.holding(tenant, content_length):
                yield
        finally:
            self.open_requests -= 1

    @contextmanager
    def tokens(self, tenant: str, count: int) -> Iterator[None]:
        """Before the works of a request are queued."""
        if count > self._tokens.most:
            raise HttpError(
                422, "too_many_tokens", f"the request has {count} tokens, at most {self._tokens.most} fit; split it"
            )
        if not self._tokens.fits(tenant, count):
            raise self._overload(f"{self.open_tokens} tokens wait, and {count} more would pass {self.most_tokens}")
        try:
            with self._tokens.holding(tenant, count):
                yield
        finally:
            self._answered += count

    def _overload(self, why: str) -> HttpError:
        self._metrics.rejected.labels("overload").inc()
        wait = self.retry_after()
        return HttpError(self._status, "overloaded", f"{why}; try again in {wait} s", retry_after=wait)

    def retry_after(self) -> int:
        """Seconds until about half of what waits is answered, at the present pace."""
        if self._pace <= 0:
            return 1
        return max(1, min(LONGEST_WAIT, math.ceil(self.open_tokens / 2 / self._pace)))

    def tick(self, seconds: float) -> None:
        """Called about every second, with the time since the last call."""
        answered, self._answered = self._answered, 0
        if answered or self.open_tokens:
            weight = min(1.0, seconds / PACE_SECONDS) if self._pace else 1.0
            self._pace += weight * (answered / seconds - self._pace)


class App:
    def __init__(
        self, routes: Routes, keys: Keys, admission: Admission, limits: Limits, metrics: Metrics, log: Log, *,
        log_requests: bool,
    ) -> None:  # fmt: skip
        self.routes = routes
        self.keys = keys
        self.admission = admission
        self.limits = limits
        self.metrics = metrics
        self.log = log
        self.log_requests = log_requests
        self._ids = itertools.count()
        self._prefix = secrets.token_hex(4)

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            if scope["type"] == "websocket":
                await send({"type": "websocket.close", "code": 1008})
            return
        began = time.perf_counter()
        request = Request(scope, receive, self.limits, f"{self._prefix}-{next(self._ids)}")
        try:
            reply: Reply | None = await self._answer(self.routes.find(request.method, request.path), request)
        except HttpError as error:
            reply = self._errors(request)(error, request.id)
            self._count_error(error.type, str(error), request)
        except Exception as error:
            # A bug of ours. The client learns nothing of its insides; the log has the place.
            self.log("bug", request_id=request.id, path=request.path[:200], error=_where(error))
            hidden = HttpError(500, "internal", "an internal error; the server's log has it")
            reply = self._errors(request)(hidden, request.id)
            self._count_error("internal", _where(error), request)
        if reply is None:
            return  # the client has gone
        await send_reply(send, reply, request)
        seconds = time.perf_counter() - began
        protocol = "native" if request.route is None else request.route.protocol
        self.metrics.requests.labels(protocol, reply.status).inc()
        self.metrics.request_seconds.labels(protocol).observe(seconds)
        if self.log_requests:
            self.log(
                "request", request_id=request.id, method=request.method, path=request.path[:200], status=reply.status,
                tenant=request.tenant, ms=round(seconds * 1000, 2),
            )  # fmt: skip

    def _errors(self, request: Request) -> ErrorWriter:
        return self.routes.errors(request.path) if request.route is None else request.route.errors

    async def _answer(self, place: Endpoint, request: Request) -> Reply | None:
        route = request.route = place.last
        request.tenant = self.keys.tenant(route.access, place.protocols, request.credential())
        if not route.work:
            return await route.handler(request)
        length = request.headers.get(b"content-length", b"0")
        request.take_deadline()
        began = time.perf_counter()
        size = min(int(length), self.limits.body_bytes) if length.isdigit() else 0
        with self.admission.request(request.tenant, size):
            body = await request.body()
            request.content = body
            request.route = place.choose(request)
            reply = await self._unless_gone(request.route, request)
        self.metrics.history.requests += 1
        self.metrics.history.latencies.append(time.perf_counter() - began)
        return reply

    async def _unless_gone(self, route: Route, request: Request) -> Reply | None:
        """The handler's reply; None, and the handler stopped, if the client goes away first."""
        task, connection = asyncio.current_task(), request.connection
        assert task is not None
        try:
            return await route.handler(request) if connection.enter(task) else None
        except asyncio.CancelledError:
            if not connection.lost:
                raise
            task.uncancel()
            return None
        finally:
            connection.working.discard(task)

    def _count_error(self, type: str, message: str, request: Request) -> None:
        self.metrics.errors.labels(type).inc()
        self.metrics.history.error(type, message, "", request.id)


def _where(error: BaseException) -> str:
    """The kind of error and the line of ours it came from: enough to find it, and nothing that a user wrote."""
    place = error.__traceback__
    while place is not None and place.tb_next is not None:
        place = place.tb_next
    at = "" if place is None else f" at {place.tb_frame.f_code.co_filename.rpartition('/')[2]}:{place.tb_lineno}"
    return f"{type(error).__name__}{at}"
