"""An HTTP/1.1 connection on asyncio and httptools: parses requests, limits headers and slow or idle clients, and sends
replies in order."""

from __future__ import annotations

import asyncio
import fcntl
import secrets
import socket
import struct
import termios
import time
from array import array
from collections import deque
from http import HTTPStatus
from typing import Any
from urllib.parse import unquote

import httptools

from plaudit.config.serve import LimitsTable
from plaudit.serve.http.exchange import AsgiApp, Exchange, Flow
from plaudit.serve.http.message import Connection, HttpError

KEEP_ALIVE_SECONDS = 75
ASGI = {"version": "3.0", "spec_version": "2.3"}


class HttpConnection(asyncio.Protocol):
    """`among`: the server's open connections, including this one. `tasks`: the tasks that answer their requests."""

    transport: asyncio.Transport
    _flow: Flow

    def __init__(
        self, app: AsgiApp, limits: LimitsTable, among: set[HttpConnection], tasks: set[asyncio.Task[None]]
    ) -> None:  # fmt: skip
        self._app = app
        self._limits = limits
        self._among = among
        self._tasks = tasks
        self._loop = asyncio.get_running_loop()
        self._parser: Any = _new_parser(self)
        self._client = Connection()
        self._waiting: deque[Exchange] = deque()  # pipelined requests; the first one is being handled
        self._parsed: Exchange | None = None  # the request whose body is being received
        self._in_headers = True
        self._url = b""
        self._headers: list[tuple[bytes, bytes]] = []
        self._expects_continue = self._upgrading = False
        self._header_bytes = self._header_count = self._raw_bytes = 0
        self.waiting_since = time.monotonic()  # for a request, or for the end of its headers
        self._stalled = (0, 0.0, 0.0)  # unread bytes of the client; since when this many, since when any

    # Callbacks of the transport

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        self.transport = transport
        self._flow = Flow(transport)
        self._server = _address(transport.get_extra_info("sockname"))
        self._peer = _address(transport.get_extra_info("peername"))
        self._scheme = "http" if transport.get_extra_info("sslcontext") is None else "https"
        self._among.add(self)
        if len(self._among) > self._limits.connections:
            _close_idle(self._among, self)

    def connection_lost(self, exc: Exception | None) -> None:
        self._among.discard(self)
        self._client.lose()
        for exchange in self._waiting:
            exchange.lose()
        self._flow.resume_writing()
        self._parser = None

    def pause_writing(self) -> None:
        self._flow.pause_writing()

    def resume_writing(self) -> None:
        self._flow.resume_writing()

    def data_received(self, data: bytes) -> None:
        # A header or trailer without an end triggers no callback, so the bytes since the last callback are counted.
        self._raw_bytes += len(data)
        try:
            try:
                self._parser.feed_data(data)
            except httptools.HttpParserUpgrade as offer:
                self._decline(data[offer.args[0] :])
        except (httptools.HttpParserError, httptools.HttpParserUpgrade):
            self._refuse(HttpError(400, "bad_http", "this is not HTTP/1.1: the request could not be parsed"))
            return
        if self._raw_bytes > self._limits.header_bytes:
            self._refuse(_headers_too_large(self._limits))

    def _decline(self, rest: bytes) -> None:
        """Parses a request that offers another protocol (`Upgrade: h2c`) again without the offer: only HTTP/1.1 is
        supported, and the parser treats what follows such a head as the other protocol."""
        method = self._parser.get_method()
        if method == b"CONNECT":
            raise httptools.HttpParserError("not a proxy")
        head = [b"%s %s HTTP/1.1" % (method, self._url)]
        head += [b"%s: %s" % header for header in self._headers if header[0] not in (b"upgrade", b"connection")]
        self._parser = _new_parser(self)
        self._upgrading = False
        self._parser.feed_data(b"\r\n".join([*head, b"", b""]) + rest)

    # Callbacks of the parser

    def on_message_begin(self) -> None:
        self._parsed = None
        self._url, self._headers = b"", []
        self._expects_continue = False
        self._header_bytes = self._header_count = 0
        if not self._in_headers:
            self._in_headers = True
            self.waiting_since = time.monotonic()

    def on_url(self, url: bytes) -> None:
        self._url += url
        self._header_bytes += len(url)

    def on_header(self, name: bytes, value: bytes) -> None:
        if not self._in_headers:
            return  # a trailer; admission was decided without it
        self._header_bytes += len(name) + len(value)
        self._header_count += 1
        if self._header_bytes <= self._limits.header_bytes and self._header_count <= self._limits.headers:
            name = name.lower()
            if name == b"expect" and value.lower() == b"100-continue":
                self._expects_continue = True
            self._headers.append((name, value))

    def on_headers_complete(self) -> None:
        if self._parser.should_upgrade():
            self._upgrading = True
            return
        self._in_headers = False
        self._raw_bytes = 0
        if self._header_bytes > self._limits.header_bytes or self._header_count > self._limits.headers:
            self._refuse(_headers_too_large(self._limits))
        elif len(self._among) > self._limits.connections:
            message = f"{self._limits.connections} connections are busy, which is the limit; try again in 1 s"
            self._refuse(HttpError(503, "too_many_connections", message, retry_after=1))
        else:
            self._begin()

    def on_body(self, body: bytes) -> None:
        self._raw_bytes = 0
        if self._parsed is not None:
            self._parsed.feed(body)

    def on_message_complete(self) -> None:
        if self._upgrading:
            return
        self._raw_bytes = 0
        if self._parsed is not None:
            self._parsed.scope["arrived"] = True
            self._parsed.end()

    # Requests and replies

    def _begin(self) -> None:
        version = self._parser.get_http_version()
        path, query = _target(self._url)
        scope = {
            "type": "http", "asgi": ASGI, "http_version": version, "server": self._server, "client": self._peer,
            "scheme": self._scheme, "method": self._parser.get_method().decode("ascii"), "root_path": "",
            "path": unquote(path.decode("ascii")) if b"%" in path else path.decode("ascii"), "raw_path": path,
            "query_string": query, "headers": self._headers, "connection": self._client,
        }  # fmt: skip
        keep_alive = version != "1.0" and self._parser.should_keep_alive()
        exchange = self._parsed = Exchange(self._flow, scope, keep_alive, self._expects_continue, self._replied)
        self._waiting.append(exchange)
        if len(self._waiting) == 1:
            self._run(exchange)
        else:
            self._flow.pause_reading()  # backpressure on a client that does not wait for its replies

    def _run(self, exchange: Exchange) -> None:
        task = self._loop.create_task(exchange.run(self._app))
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)

    def _replied(self, exchange: Exchange) -> None:
        self._waiting.remove(exchange)
        if not self._in_headers:
            self.waiting_since = time.monotonic()
        if not exchange.keep_alive:
            self.transport.close()
        if self.transport.is_closing():
            return
        self._flow.resume_reading()
        if self._waiting:
            self._run(self._waiting[0])

    # Called by the listener

    @property
    def known(self) -> bool:
        return self._client.known

    @property
    def idle(self) -> bool:
        """Whether no request is being handled: it is between requests, or slow to begin one."""
        return not self._waiting

    def leave(self) -> None:
        """Accept no more requests after those in progress."""
        if self.idle:
            self.transport.close()
        for exchange in self._waiting:
            exchange.keep_alive = False

    def unwritten(self) -> int:
        """Bytes of replies that the client has not read yet."""
        return self.transport.get_write_buffer_size()

    def watch(self, now: float) -> None:
        """Called every second: close a connection that is slow with its headers or idle for too long, and one whose
        client reads nothing of its reply for `write_seconds`, or not all of it within `request_seconds`."""
        most = self._limits.header_seconds if self._in_headers else KEEP_ALIVE_SECONDS
        if (self._in_headers or self.idle) and now - self.waiting_since > most and not self.transport.is_closing():
            self.transport.close()
        size, (before, since, first) = self.unwritten(), self._stalled
        if size:  # including what the kernel buffers, which changes long before it accepts more from us
            size += _unacknowledged(self.transport.get_extra_info("socket"))
        since, first = now if size != before else since, first if before else now
        self._stalled = (size, since, first)
        if size and (now - since > self._limits.write_seconds or now - first > self._limits.request_seconds):
            self._drop()

    def _drop(self) -> None:
        """Close at once and discard what the kernel has buffered for the client."""
        self.transport.get_extra_info("socket").setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
        self.transport.abort()

    def _refuse(self, error: HttpError) -> None:
        if not self.transport.is_closing():
            self.transport.write(_written(error))
            self.transport.close()


def _new_parser(connection: HttpConnection) -> Any:
    parser = httptools.HttpRequestParser(connection)
    # A client may send `Connection: close` followed by more data: its first request is still answered.
    parser.set_dangerous_leniencies(lenient_data_after_close=True)
    return parser


def _target(url: bytes) -> tuple[bytes, bytes]:
    """Path and query of a request target."""
    if url[:1] == b"/" and b"#" not in url:
        path, _, query = url.partition(b"?")
        return path, query
    parsed = httptools.parse_url(url)
    return parsed.path or b"/", parsed.query or b""


def _address(name: Any) -> tuple[str, int | None] | None:
    """Host and port, or the path of a unix socket."""
    if isinstance(name, tuple):
        return str(name[0]), int(name[1])
    return (name, None) if isinstance(name, str) else None


def _unacknowledged(sock: Any) -> int:
    count = array("i", [0])
    fcntl.ioctl(sock.fileno(), termios.TIOCOUTQ, count)
    return count[0]


def _close_idle(connections: set[HttpConnection], fresh: HttpConnection) -> None:
    """Make room for a new connection: close the connection that has been idle longest, preferring those that have not
    sent an API key."""
    idle = [each for each in connections if each.idle and each is not fresh and not each.transport.is_closing()]
    if idle:
        longest = min(idle, key=lambda each: (each.known, each.waiting_since))
        connections.discard(longest)  # now: its connection_lost comes in the next iteration of the event loop
        longest.transport.abort()


def _headers_too_large(limits: LimitsTable) -> HttpError:
    most = f"at most {limits.headers} headers of {limits.header_bytes} bytes in total are accepted"
    return HttpError(431, "headers_too_large", f"{most}; send fewer")


def _written(error: HttpError) -> bytes:
    """The reply to input that could not be parsed as a request."""
    request_id = secrets.token_hex(8)
    reply = error.reply(request_id)
    lines = [
        f"HTTP/1.1 {error.status} {HTTPStatus(error.status).phrase}".encode(), b"content-type: " + reply.content_type,
        f"content-length: {len(reply.body)}".encode(), f"x-request-id: {request_id}".encode(), b"connection: close",
        *(name + b": " + value for name, value in reply.headers),
    ]  # fmt: skip
    return b"\r\n".join(lines) + b"\r\n\r\n" + reply.body
