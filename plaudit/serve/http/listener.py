"""Serves an ASGI application on sockets and keeps track of the connections."""

from __future__ import annotations

import asyncio
import resource
import socket
import ssl
import time
from collections.abc import Sequence

from plaudit.config.serve import LimitsTable
from plaudit.serve.http.connection import HttpConnection
from plaudit.serve.http.exchange import AsgiApp

SPARE_FILES = 256  # descriptors besides the connections: workers, pipes, logs
WATCH_SECONDS = 1.0
LAST_SECONDS = 1.0  # for requests in progress when it stops


class Listener:
    """Installs no signal handlers: the server decides when it stops listening, and when it stops."""

    def __init__(self, app: AsgiApp, limits: LimitsTable, tls: ssl.SSLContext | None = None) -> None:
        # A connection in its TLS handshake does not count as a connection yet, but uses a descriptor.
        _raise_file_limit(limits.connections * (1 if tls is None else 2) + SPARE_FILES)
        self._app = app
        self._limits = limits
        self._tls = tls
        self._connections: set[HttpConnection] = set()
        self._tasks: set[asyncio.Task[None]] = set()
        self._servers: list[asyncio.AbstractServer] = []
        self._watching: asyncio.Task[None] | None = None

    async def start(self, sockets: Sequence[socket.socket]) -> None:
        loop = asyncio.get_running_loop()

        def connect() -> HttpConnection:
            return HttpConnection(self._app, self._limits, self._connections, self._tasks)

        for sock in sockets:
            if sock.family == socket.AF_UNIX:
                self._servers.append(await loop.create_unix_server(connect, sock=sock))
            else:
                seconds = None if self._tls is None else self._limits.header_seconds
                server = loop.create_server(connect, sock=sock, ssl=self._tls, ssl_handshake_timeout=seconds)
                self._servers.append(await server)
        self._watching = asyncio.create_task(self._watch())

    def refuse(self) -> None:
        """Accept no more connections; the accepted ones stay."""
        for server in self._servers:
            server.close()

    def in_use(self, seconds: float) -> bool:
        """Whether a connection has a request, or had one within `seconds` and is likely to send another."""
        since = time.monotonic() - seconds
        return any(not each.idle or each.waiting_since > since for each in self._connections)

    async def stop(self) -> None:
        """Stop; requests in progress get LAST_SECONDS to finish."""
        if self._watching is not None:
            self._watching.cancel()
        self.refuse()
        for connection in list(self._connections):
            connection.leave()
        until = time.monotonic() + LAST_SECONDS
        while (self._connections or self._tasks) and time.monotonic() < until:
            await asyncio.sleep(0.02)
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)
        for connection in list(self._connections):
            connection.transport.abort()
        while self._connections and time.monotonic() < until + LAST_SECONDS:
            await asyncio.sleep(0)

    def unwritten(self) -> int:
        """Bytes of replies that clients have not read yet."""
        return sum(connection.unwritten() for connection in self._connections)

    async def _watch(self) -> None:
        while True:
            await asyncio.sleep(WATCH_SECONDS)
            now = time.monotonic()
            for connection in list(self._connections):
                connection.watch(now)


def _raise_file_limit(needed: int) -> None:
    """Shells often limit a process to 1024 open files, fewer than the connections it should accept."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    most = needed if hard == resource.RLIM_INFINITY else min(needed, hard)
    if soft != resource.RLIM_INFINITY and soft < most:
        resource.setrlimit(resource.RLIMIT_NOFILE, (most, hard))
