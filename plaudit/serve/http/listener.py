"""Connections: bounds on what comes before a request is understood, on slow and idle clients, and the listener.

uvicorn's server and its protocol on httptools, which leave the rest to `app.py`.
"""

from __future__ import annotations

import asyncio
import fcntl
import resource
import secrets
import socket
import ssl
import struct
import termios
import time
from array import array
from http import HTTPStatus
from typing import Any

import httptools
from uvicorn import Config, Server
from uvicorn.protocols.http.httptools_impl import HttpToolsProtocol

from plaudit.config.serve import LimitsTable
from plaudit.serve.http.message import Connection, HttpError

KEEP_ALIVE_SECONDS = 75
SPARE_FILES = 256  # beside the connections: workers, pipes, logs


class GuardedProtocol(HttpToolsProtocol):
    limits: LimitsTable

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        super().connection_made(transport)
        self.transport = _Gathering(transport, self.loop)  # type: ignore[assignment]
        self._timer: asyncio.TimerHandle | None = None
        self._connection = Connection()
        self._in_headers = True
        self._header_bytes = self._header_count = self._raw_bytes = 0
        self._upgrading = False
        self.waiting_since = self.loop.time()  # for a request
        self._stalled = (0, 0.0, 0.0)  # bytes that the client does not take; since when these, since when any
        self._arm()
        if len(self.connections) > self.limits.connections:
            _close_idle(self.connections, self)

    def connection_lost(self, exc: Exception | None) -> None:
        self._disarm()
        self._connection.lose()
        super().connection_lost(exc)
        # uvicorn forgets this after an error, and the timer would keep all of the connection for its time.
        self._unset_keepalive_if_required()

    @property
    def known(self) -> bool:
        return self._connection.known

    @property
    def idle(self) -> bool:
        """Whether nobody works for it: it is between requests, or slow to begin one."""
        return self.cycle is None or self.cycle.response_complete

    def data_received(self, data: bytes) -> None:
        self._unset_keepalive_if_required()
        # A header or trailer that never ends reaches no callback: only the bytes since the last one can be counted.
        self._raw_bytes += len(data)
        try:
            try:
                self.parser.feed_data(data)
            except httptools.HttpParserUpgrade as offer:
                self._decline(data[offer.args[0] :])
        except (httptools.HttpParserError, httptools.HttpParserUpgrade):
            self.send_400_response("")
            return
        if self._raw_bytes > self.limits.header_bytes:
            self._refuse(_headers_too_large(self.limits))
        elif self._in_headers and self._timer is None:
            self._arm()

    def _decline(self, rest: bytes) -> None:
        """A request that offers another protocol (`Upgrade: h2c`) is read again without the offer: we speak HTTP/1.1,
        and the parser takes what follows such a head for the other protocol's."""
        method = self.parser.get_method()
        if method == b"CONNECT":
            raise httptools.HttpParserError("this is no proxy")
        head = [b"%s %s HTTP/1.1" % (method, self.url)]
        head += [b"%s: %s" % header for header in self.headers if header[0] not in (b"upgrade", b"connection")]
        self.parser = httptools.HttpRequestParser(self)
        self._upgrading = False
        self.parser.feed_data(b"\r\n".join([*head, b"", b""]) + rest)

    def on_message_begin(self) -> None:
        super().on_message_begin()
        self.scope["connection"] = self._connection  # type: ignore[typeddict-unknown-key]
        self._in_headers = True
        self._header_bytes = self._header_count = 0

    def on_url(self, url: bytes) -> None:
        super().on_url(url)
        self._header_bytes += len(url)

    def on_header(self, name: bytes, value: bytes) -> None:
        if not self._in_headers:
            return  # of a trailer; what it says was not there when the request was let in
        self._header_bytes += len(name) + len(value)
        self._header_count += 1
        if self._header_bytes <= self.limits.header_bytes and self._header_count <= self.limits.headers:
            super().on_header(name, value)

    def on_headers_complete(self) -> None:
        if self.parser.should_upgrade():
            self._upgrading = True
            return
        self._in_headers = False
        self._raw_bytes = 0
        self._disarm()
        if self._header_bytes > self.limits.header_bytes or self._header_count > self.limits.headers:
            self._refuse(_headers_too_large(self.limits))
        elif len(self.connections) > self.limits.connections:
            message = f"{self.limits.connections} connections are busy, which is the most; try again in 1 s"
            self._refuse(HttpError(503, "too_many_connections", message, retry_after=1))
        else:
            super().on_headers_complete()

    def on_body(self, body: bytes) -> None:
        self._raw_bytes = 0
        if self.cycle is not None:
            super().on_body(body)

    def on_message_complete(self) -> None:
        if self._upgrading:
            return
        self._raw_bytes = 0
        if self.cycle is not None:
            self.scope["arrived"] = True  # type: ignore[typeddict-unknown-key]
            super().on_message_complete()

    def on_response_complete(self) -> None:
        self.waiting_since = self.loop.time()
        super().on_response_complete()

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

    def unwritten(self) -> int:
        """Bytes of replies that the client has not taken yet."""
        return self.transport.get_write_buffer_size()

    def watch(self, now: float) -> None:
        """Every second: end a connection whose client takes nothing of its reply for `write_seconds`, or not all of it
        in `request_seconds`."""
        size, (before, since, first) = self.unwritten(), self._stalled
        if size:  # and what the kernel holds, which moves long before it takes more from us
            size += _unacknowledged(self.transport.get_extra_info("socket"))
        since, first = now if size != before else since, first if before else now
        self._stalled = (size, since, first)
        if size and (now - since > self.limits.write_seconds or now - first > self.limits.request_seconds):
            self._drop()

    def _drop(self) -> None:
        """At once, with all that the kernel holds for the client."""
        self.transport.get_extra_info("socket").setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
        self.transport.abort()


def _unacknowledged(sock: Any) -> int:
    count = array("i", [0])
    fcntl.ioctl(sock.fileno(), termios.TIOCOUTQ, count)
    return count[0]


def _close_idle(connections: set[Any], fresh: GuardedProtocol) -> None:
    """Make room: of the connections that nobody works for the one that waits longest, and first of those that have not
    shown a key."""
    idle = [each for each in connections if each.idle and each is not fresh and not each.transport.is_closing()]
    if idle:
        longest = min(idle, key=lambda each: (each.known, each.waiting_since))
        connections.discard(longest)  # now: its end is told in the next turn of the loop
        longest.transport.abort()


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

    def get_write_buffer_size(self) -> int:
        return self._transport.get_write_buffer_size() + sum(map(len, self._waiting))

    def _flush(self) -> None:
        if self._waiting:
            data = b"".join(self._waiting)
            self._waiting.clear()
            self._transport.write(data)


class Listener(Server):
    """uvicorn's server, which leaves signals to us: on SIGTERM it must go on listening while it drains."""

    def __init__(self, app: Any, limits: LimitsTable, tls: ssl.SSLContext | None = None) -> None:
        # A connection that has not finished its handshake is none of ours yet, and has a descriptor.
        _raise_file_limit(limits.connections * (1 if tls is None else 2) + SPARE_FILES)
        self._tls = tls
        self._handshake_seconds = None if tls is None else limits.header_seconds
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

    async def startup(self, sockets: list[socket.socket] | None = None) -> None:
        """As uvicorn's for sockets, and for unix sockets too; with a limit on the time of a handshake."""
        loop, config = asyncio.get_running_loop(), self.config

        def connect() -> asyncio.Protocol:
            return config.http_protocol_class(  # type: ignore[call-arg]
                config=config, server_state=self.server_state, app_state=self.lifespan.state, _loop=loop
            )  # fmt: skip

        self.servers = []
        for sock in sockets or ():
            if sock.family == socket.AF_UNIX:
                self.servers.append(await loop.create_unix_server(connect, sock=sock))
            else:
                server = loop.create_server(
                    connect, sock=sock, ssl=self._tls, ssl_handshake_timeout=self._handshake_seconds
                )
                self.servers.append(await server)
        self.started = True

    def tick(self) -> None:
        """Every second."""
        now = time.monotonic()
        for connection in self._connections():
            connection.watch(now)

    def unwritten(self) -> int:
        """Bytes of replies that clients have not taken yet."""
        return sum(connection.unwritten() for connection in self._connections())

    def _connections(self) -> list[GuardedProtocol]:
        return [each for each in self.server_state.connections if isinstance(each, GuardedProtocol)]


def _raise_file_limit(needed: int) -> None:
    """Shells give a process 1024 open files, which is fewer than the connections it should take."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    most = needed if hard == resource.RLIM_INFINITY else min(needed, hard)
    if soft != resource.RLIM_INFINITY and soft < most:
        resource.setrlimit(resource.RLIMIT_NOFILE, (most, hard))
