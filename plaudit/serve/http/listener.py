"""uvicorn's HTTP protocol with bounds on what comes before a request is understood: header bytes, headers, seconds."""

from __future__ import annotations

import asyncio
import resource
import secrets
import socket
from http import HTTPStatus
from typing import Any

from uvicorn import Config, Server
from uvicorn.protocols.http.httptools_impl import HttpToolsProtocol

from plaudit.config.serve import LimitsTable
from plaudit.errors import ConfigError
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
