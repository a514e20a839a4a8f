"""`plaudit serve` and other servers: start, serve, drain, stop.

exit 0   drained after a signal          exit 1   stopped without draining, or no model is left to serve
exit 2   could not start: the message says why
"""

from __future__ import annotations

import asyncio
import contextlib
import gc
import os
import signal
import sys
import threading
import time
from collections.abc import Callable
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any, Protocol

import uvloop

from plaudit.config.serve import ListenTable, ServeTable
from plaudit.errors import ConfigError
from plaudit.serve.http.app import Admission, App
from plaudit.serve.http.keys import Keys, loopback
from plaudit.serve.http.listener import Listener, bind
from plaudit.serve.http.message import Limits, Routes
from plaudit.serve.logs import Log
from plaudit.serve.metrics import Metrics
from plaudit.serve.protocols.table import check_names, protocol_routes
from plaudit.serve.registry import Models
from plaudit.serve.scoring import ScoringService

LAG_WARNING = 1.0  # seconds the event loop may be late before the log says so


class ServerBackend(Protocol):
    """What computes behind the routes. `changed` is set when one of its models has come, gone or failed."""

    changed: asyncio.Event

    async def open(self) -> None: ...

    async def close(self) -> None: ...

    def kill(self) -> None: ...

    def tick(self) -> None:
        """Every second."""

    def describe(self) -> list[dict[str, Any]]: ...

    def failed(self) -> list[str]:
        """Models that will not come back."""

    def hopeful(self) -> bool:
        """Whether one is left that serves or may yet."""


Build = Callable[[Admission, Keys, Metrics, Log], tuple[ServerBackend, Routes]]


def serve(table: ServeTable) -> int:
    """Serve until a signal or until no model is left; the exit code."""
    check_names(table.allow_open, "allow_open")
    check_names(table.protocols or (), "protocols")

    def build(admission: Admission, keys: Keys, metrics: Metrics, log: Log) -> tuple[ServerBackend, Routes]:
        models = Models(table, admission, metrics, log)
        scoring = ScoringService(models, table.aliases, table.limits.items, salted=keys.several)
        return models, protocol_routes(scoring, table.protocols)

    return run_server(table, build, "serve", "page at /, documentation at /docs")


def run_server(table: ListenTable, build: Build, command: str, note: str) -> int:
    """`build` is called when the address is bound. `note` is for the line that says where the server is."""
    check_open(table)
    code = uvloop.run(_Server(table, build, command, note).run())
    if code:
        os._exit(code)  # without waiting for threads: what could not be drained may have somebody else to wait for
    return code


def check_open(table: ListenTable) -> None:
    """Who can reach the server without a key must be somebody's decision."""
    if not loopback(table.host) and not table.api_keys and not table.allow_open:
        raise ConfigError(
            f"host {table.host} is reachable by others, and there is no API key: give --api-key, or say with "
            "--allow-open which protocols may be used without one"
        )


class _Server:
    def __init__(self, table: ListenTable, build: Build, command: str, note: str) -> None:
        self.table = table
        self.build = build
        self.command = command
        self.note = note
        self.metrics = Metrics()
        self.log = Log(self.metrics.log_failures.inc)
        self._stop = asyncio.Event()
        self._signals = 0

    async def run(self) -> int:
        table, limits = self.table, self.table.limits
        sock = bind(table.host, table.port)
        port = sock.getsockname()[1]
        live = None if table.health_port is None else _LiveThread(table.host, table.health_port)
        holders = len(table.api_keys) + bool(table.allow_open)
        admission = Admission(limits.queued_tokens, limits.buffered_bytes, holders, table.overload_status, self.metrics)
        keys = Keys(
            table.api_keys, table.admin_key, keyless=loopback(table.host), allow_open=frozenset(table.allow_open)
        )
        models, routes = self.build(admission, keys, self.metrics, self.log)
        if live is not None:
            live.failed = models.failed
        app = App(
            routes, keys, admission,
            Limits(limits.body_bytes, limits.body_seconds, limits.request_seconds, limits.queued_tokens),
            self.metrics, self.log,
            log_requests=table.log == "requests",
        )  # fmt: skip
        listener = Listener(app, limits)
        listening = asyncio.create_task(listener.serve([sock]))
        self._listen(models)
        ticking = asyncio.create_task(self._tick(models, admission, listener))
        code = 0
        try:
            code = await self._until_stopped(models, admission, listener, f"http://{_shown(table.host)}:{port}")
        finally:
            ticking.cancel()
            listener.should_exit = True
            with contextlib.suppress(asyncio.CancelledError):
                await listening
            await models.close()
            if live is not None:
                live.shutdown()
            self.log("stopped", code=code)
            self.log.close()
        return code

    async def _until_stopped(
        self, models: ServerBackend, admission: Admission, listener: Listener, address: str
    ) -> int:  # fmt: skip
        opening = asyncio.create_task(models.open())
        stopping = asyncio.create_task(self._stop.wait())
        await asyncio.wait({opening, stopping}, return_when=asyncio.FIRST_COMPLETED)
        if not opening.done():
            opening.cancel()
            return 0
        opening.result()
        self._listen(models)  # again: Ray takes signals for itself when it starts
        self._settle()
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
        while (unfinished := admission.open_requests or listener.unwritten()) and time.monotonic() < until:
            await asyncio.sleep(0.02)
        return 1 if unfinished else 0

    def _listen(self, models: ServerBackend) -> None:
        loop = asyncio.get_running_loop()
        for number in (signal.SIGTERM, signal.SIGINT, signal.SIGHUP):
            loop.remove_signal_handler(number)
            loop.add_signal_handler(number, self._signalled, models)

    def _settle(self) -> None:
        """What lives now lives on: keep the collector from going over it again and again."""
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
        """End the server when none of its models will come back."""
        while not models.failed() or models.hopeful():
            await models.changed.wait()
            models.changed.clear()
        self._say(sys.stderr.fileno(), "; ".join(models.failed()))
        self._stop.set()

    async def _tick(self, models: ServerBackend, admission: Admission, listener: Listener) -> None:
        expected = time.monotonic() + 1.0
        while True:
            await asyncio.sleep(max(0.0, expected - time.monotonic()))
            lag = time.monotonic() - expected
            self.metrics.loop_lag.observe(max(0.0, lag))
            if lag > LAG_WARNING:
                self.log("loop_blocked", seconds=round(lag, 2))
            expected = time.monotonic() + 1.0
            admission.tick(1.0 + lag)
            listener.tick()
            models.tick()

    def _say(self, file: int, line: str) -> None:
        """A full disk or a closed terminal is no reason to stop."""
        with contextlib.suppress(OSError):
            os.write(file, f"plaudit {self.command}: {line}\n".encode())


class _LiveThread(ThreadingHTTPServer):
    """Answers /health/live from a thread of its own, so that a busy event loop does not look like a dead process."""

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


def _shown(host: str) -> str:
    return f"[{host}]" if ":" in host else host
