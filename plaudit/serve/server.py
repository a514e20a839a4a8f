"""`plaudit serve` and other servers: start, serve, drain, stop.

exit 0   drained after a signal          exit 1   stopped without draining, or no working model is left
exit 2   could not start; the reason is printed
"""

from __future__ import annotations

import asyncio
import contextlib
import gc
import os
import signal
import socket
import sys
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import TYPE_CHECKING, Any, Protocol, TypeVar

import uvloop

from plaudit.config.keys import KeyTable
from plaudit.config.serve import ListenTable, ServeTable
from plaudit.errors import ConfigError, one_line
from plaudit.serve.http.address import Tls, begin_no_connection, leave, listen
from plaudit.serve.http.app import Admission, App
from plaudit.serve.http.key_file import KeySource
from plaudit.serve.http.keys import Keys
from plaudit.serve.http.listener import Listener
from plaudit.serve.http.message import Limits, Route, Routes
from plaudit.serve.http.traces import Traces, traces_of
from plaudit.serve.logs import Log
from plaudit.serve.metrics import ADMIN, Metrics
from plaudit.serve.protocols.table import check_names, protocol_routes
from plaudit.serve.registry import Models
from plaudit.serve.scoring import ScoringService
from plaudit.serve.state import restored

if TYPE_CHECKING:
    from plaudit.serve.grpc.server import GrpcServer

FILES_SECONDS = 1.0  # interval between checks of the key and certificate files
T = TypeVar("T")
VALUES_PER_ITEM = 64  # non-numeric values per item in a large JSON body: about twenty messages
BEGUN_SECONDS = 0.25  # for connections that have begun when the server stops listening; some round trips
IDLE_SECONDS = 1.0  # a connection that was used within this time before the end is expected to be used again
LAG_WARNING = 1.0  # seconds of event loop delay above which it is logged


class ServerBackend(Protocol):
    """The models behind the routes. `changed` is set when a model is added, removed or fails."""

    changed: asyncio.Event

    async def open(self) -> None: ...

    async def close(self) -> None: ...

    def kill(self) -> None: ...

    def tick(self) -> None:
        """Every second."""

    def describe(self) -> list[dict[str, Any]]: ...

    def failed(self) -> list[str]:
        """Models that have failed permanently."""

    def recoverable(self) -> bool:
        """Whether a model is left that serves or may recover."""


Build = Callable[[Admission, Metrics, Log], tuple[ServerBackend, Routes]]


def serve(table: ServeTable, more: Callable[[ScoringService], Sequence[Route]] | None = None) -> int:
    """Serves until a signal or until no model is left; returns the exit code. `more`: routes of higher layers."""
    check_names(table.allow_open, "allow_open")
    check_names(table.protocols or (), "protocols")
    if table.grpc_port is not None and table.protocols is not None and "triton" not in table.protocols:
        raise ConfigError(
            "grpc_port needs the protocol triton, which protocols does not list; add it, or remove grpc_port"
        )
    restored(table)  # raises errors before anything is bound

    def build(admission: Admission, metrics: Metrics, log: Log) -> tuple[ServerBackend, Routes]:
        models = Models(table, admission, metrics, log)
        several = len(table.api_keys) > 1 or table.api_key_file is not None
        scoring = ScoringService(models, table.aliases, table.limits.items, salted=several)
        return models, protocol_routes(scoring, table.protocols, () if more is None else more(scoring))

    return run_server(table, build, "serve", "page at /, documentation at /docs")


def run_server(table: ListenTable, build: Build, command: str, note: str) -> int:
    """`build` is called after the address is bound. `note` is appended to the line that prints the address."""
    check_open(table)
    source, tls = KeySource(table), Tls.of(table)
    sock = listen(table)
    code = uvloop.run(_Server(table, build, command, note, source, tls).run(sock))
    if code:
        os._exit(code)  # does not wait for threads that could not be drained
    return code


def check_open(table: ListenTable) -> None:
    """Raises ConfigError if others can reach the server without a key and this is not configured explicitly."""
    if not table.private and not table.has_keys and not table.allow_open:
        raise ConfigError(
            f"host {table.host} is reachable by others, but no API key is set: set --api-key or --api-key-file, or "
            "list with --allow-open the protocols that need no key"
        )


class _Server:
    def __init__(
        self, table: ListenTable, build: Build, command: str, note: str, source: KeySource, tls: Tls | None
    ) -> None:
        self.table = table
        self.build = build
        self.command = command
        self.note = note
        self.source = source
        self.tls = tls
        self._stop = asyncio.Event()
        self._read_again = asyncio.Event()
        self._signals = 0
        self.metrics = Metrics()
        self.log = Log(self.metrics.log_failures.inc)
        self.traces: Traces | None = traces_of(os.environ, self.log)

    async def run(self, sock: socket.socket) -> int:
        table, limits = self.table, self.table.limits
        address = table.address(0 if table.uds is not None else sock.getsockname()[1])
        live = None if table.health_port is None else _LiveThread(table.host, table.health_port)
        admission = Admission(limits.queued_tokens, limits.buffered_bytes, 1, table.overload_status, self.metrics)
        keyless = table.private and not table.has_keys
        keys = Keys({}, keyless=keyless, allow_open=frozenset(table.allow_open))
        self._use_keys(self.source.tables, keys, admission)
        models, routes = self.build(admission, self.metrics, self.log)
        if live is not None:
            live.failed = models.failed
        app = App(
            routes, keys, admission,
            Limits(
                limits.body_bytes, limits.body_seconds, limits.request_seconds, limits.queued_tokens,
                VALUES_PER_ITEM * limits.items,
            ),
            self.metrics, self.log,
            log_requests=table.log == "requests", traces=self.traces,
        )  # fmt: skip
        grpc = None if table.grpc_port is None else _grpc(app, table, self.tls)
        listener = Listener(app, limits, None if self.tls is None else self.tls.context)
        servers = _Servers(sock, listener, grpc, self.log)
        if table.listen == "start":
            await servers.start()
        self._listen(models)
        beside = [self._tick(models, admission), self._follow_files(keys, admission)]
        tasks = [asyncio.create_task(each) for each in beside]
        code = 0
        try:
            code = await self._until_stopped(models, admission, servers, address)
        finally:
            for task in tasks:
                task.cancel()
            await servers.stop()
            leave(table)
            app.readers.close()
            await models.close()
            if live is not None:
                live.shutdown()
            if self.traces is not None:
                await asyncio.to_thread(self.traces.close)
            self.log("stopped", code=code)
            self.log.close()
        return code

    async def _until_stopped(
        self, models: ServerBackend, admission: Admission, servers: _Servers, address: str
    ) -> int:  # fmt: skip
        opening = asyncio.create_task(models.open())
        stopping = asyncio.create_task(self._stop.wait())
        await asyncio.wait({opening, stopping}, return_when=asyncio.FIRST_COMPLETED)
        if not opening.done():
            opening.cancel()
            return 0
        opening.result()
        if self.table.listen == "ready":
            await servers.start()
        self._listen(models)  # again: Ray replaces signal handlers when it starts
        self._freeze_heap()
        self._announce(models, address)
        watching = asyncio.create_task(self._watch(models))
        await stopping
        watching.cancel()
        if not self._signals:
            return 1
        admission.leaving = True
        if self.table.drain_delay:
            self.log("leaving", seconds=self.table.drain_delay)
            await asyncio.sleep(self.table.drain_delay)
        admission.draining = True
        self.log("draining", open_requests=admission.open_requests)
        until = time.monotonic() + self.table.drain_seconds
        await servers.refuse(self.table.drain_seconds)
        while (unfinished := admission.open_requests or servers.unwritten()) or servers.in_use():
            if time.monotonic() > until:
                break
            await asyncio.sleep(0.02)
        return 1 if unfinished else 0

    def _listen(self, models: ServerBackend) -> None:
        loop = asyncio.get_running_loop()
        for number in (signal.SIGTERM, signal.SIGINT, signal.SIGHUP):
            loop.remove_signal_handler(number)
            loop.add_signal_handler(number, self._signalled, models)
        if self.source.file is not None or self.tls is not None:
            loop.add_signal_handler(signal.SIGHUP, self._read_again.set)

    def _use_keys(self, tables: Mapping[str, KeyTable], keys: Keys, admission: Admission) -> None:
        keys.replace(tables)
        holders = len(tables.keys() - {ADMIN}) + bool(self.table.allow_open)
        admission.share_among(holders, keys.meters)

    async def _follow_files(self, keys: Keys, admission: Admission) -> None:
        """Reload keys and certificates when their files have changed, or on SIGHUP."""
        source, tls = self.source, self.tls
        while source.file is not None or tls is not None:
            with contextlib.suppress(TimeoutError):
                await asyncio.wait_for(self._read_again.wait(), FILES_SECONDS)
            requested = self._read_again.is_set()
            self._read_again.clear()
            if source.file is not None and (await asyncio.to_thread(source.watch.changed) or requested):
                await self._renew("keys", source.read, lambda tables: self._use_keys(tables, keys, admission))
            if tls is not None and (await asyncio.to_thread(tls.watch.changed) or requested):
                await self._renew("tls", tls.read, lambda _, tls=tls: tls.use())  # type: ignore[misc]

    async def _renew(self, what: str, read: Callable[[], T], use: Callable[[T], None]) -> None:
        """Reload files; invalid files are logged and change nothing."""
        try:
            use(await asyncio.to_thread(read))
        except Exception as error:
            self.log(f"{what}_refused", reason=f"{one_line(error)}; the previous files stay in use")
        else:
            self.log(f"{what}_loaded")

    def _freeze_heap(self) -> None:
        """Freeze live objects so that the garbage collector does not scan them repeatedly."""
        gc.collect()
        gc.freeze()
        gc.set_threshold(10_000, 20, 50)
        self.metrics.watch_gc()

    def _announce(self, models: ServerBackend, address: str) -> None:
        names = ", ".join(f"{d['name']} ({d['kind']})" for d in models.describe())
        self._say(sys.stdout.fileno(), f"{names} on {address} ({self.note})")
        self.log("ready", address=address, models=models.describe())

    def _signalled(self, models: ServerBackend) -> None:
        self._signals += 1
        if self._signals > 1:
            models.kill()
            os._exit(1)
        self._stop.set()

    async def _watch(self, models: ServerBackend) -> None:
        """Stop the server when all of its models have failed permanently."""
        while not models.failed() or models.recoverable():
            await models.changed.wait()
            models.changed.clear()
        self._say(sys.stderr.fileno(), "; ".join(models.failed()))
        self._stop.set()

    async def _tick(self, models: ServerBackend, admission: Admission) -> None:
        expected = time.monotonic() + 1.0
        while True:
            await asyncio.sleep(max(0.0, expected - time.monotonic()))
            lag = time.monotonic() - expected
            self.metrics.loop_lag.observe(max(0.0, lag))
            if lag > LAG_WARNING:
                self.log("loop_blocked", seconds=round(lag, 2))
            expected = time.monotonic() + 1.0
            admission.tick(1.0 + lag)
            models.tick()

    def _say(self, file: int, line: str) -> None:
        """Print a line; a full disk or a closed terminal is ignored."""
        with contextlib.suppress(OSError):
            os.write(file, f"plaudit {self.command}: {line}\n".encode())


class _Servers:
    """The HTTP and the gRPC server of one application."""

    def __init__(self, sock: socket.socket, http: Listener, grpc: GrpcServer | None, log: Log) -> None:
        self._sock = sock
        self._http = http
        self._grpc = grpc
        self._log = log
        self._leaving: asyncio.Task[None] | None = None

    async def start(self) -> None:
        await self._http.start([self._sock])
        if self._grpc is not None:
            await self._grpc.start()
            self._log("grpc", port=self._grpc.port)

    async def refuse(self, seconds: float) -> None:
        """Accept no more connections, without losing one that has begun. gRPC also tells its clients to leave."""
        if self._grpc is not None:
            self._leaving = asyncio.create_task(self._grpc.stop(seconds))
        begin_no_connection(self._sock)
        await asyncio.sleep(BEGUN_SECONDS)
        self._http.refuse()

    def unwritten(self) -> int:
        return self._http.unwritten()

    def in_use(self) -> bool:
        return self._http.in_use(IDLE_SECONDS)

    async def stop(self) -> None:
        await self._http.stop()
        if self._grpc is not None:
            await self._grpc.stop()


def _grpc(app: App, table: ListenTable, tls: Tls | None) -> GrpcServer:
    try:
        from plaudit.serve.grpc.server import GrpcServer
    except ImportError as error:
        raise ConfigError(
            f"--grpc-port needs gRPC, which is not installed ({error}): pip install 'plaudit[grpc]'"
        ) from error
    return GrpcServer(app, table, tls)


class _LiveThread(ThreadingHTTPServer):
    """Answers /health/live in its own thread, so that a busy event loop is not mistaken for a dead process."""

    daemon_threads = True
    failed: Callable[[], list[str]] = list

    def __init__(self, host: str, port: int) -> None:
        try:
            super().__init__((host, port), _Live)
        except OSError as error:
            raise ConfigError(f"cannot listen on {host}:{port}: {error.strerror}; choose another health_port") from None
        threading.Thread(target=self.serve_forever, daemon=True, name="live").start()


class _Live(BaseHTTPRequestHandler):
    timeout = 5

    def do_GET(self) -> None:
        assert isinstance(self.server, _LiveThread)
        status, body = 404, b"{}"
        if self.path == "/health/live":
            status, body = (503, b'{"status":"failed"}') if self.server.failed() else (200, b'{"status":"live"}')
        self.send_response(status)
        self.send_header("content-type", "application/json")
        self.send_header("content-length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)

    def log_message(self, format: str, *args: object) -> None:
        pass
