"""The live page of a run: a small HTTP server in a thread, for browsers of this machine.

        GET /        the page, without data            POST /pause, /continue, /stop    control the run
        GET /data    the page's data, and the state

Only `/` is public: the others need the token, which is after the # of the address, so that it is in no request for a
page and in no log. The Host is checked against DNS rebinding.
"""

from __future__ import annotations

import secrets
import threading
import time
from collections.abc import Callable
from http import HTTPStatus
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any, Protocol

from plaudit.errors import PlauditError
from plaudit.report.history import read_history
from plaudit.report.page import as_json, live_page, page_data

AGAIN_SECONDS = 2.0  # polling interval of a page
SHARE = 0.02  # share of time that may be spent on reading the log: the run uses the same interpreter
LAST_SECONDS = 10.0  # time in which an open page can fetch the last figures


class Control(Protocol):
    """Control of the run."""

    def state(self) -> str:
        """running, pausing, paused or stopping"""

    def act(self, what: str) -> str | None:
        """Pause, continue or stop the run; returns why it is not possible, or None."""


class LivePage:
    def __init__(self, run: Path, control: Control) -> None:
        self.run, self.control = run, control
        self.token = secrets.token_urlsafe(18)
        self.over = threading.Event()
        self._sent_last = threading.Event()
        self._last_request = -LAST_SECONDS
        self._lock = threading.Lock()
        self._data: dict[str, Any] = {}
        self._size, self._fresh_until = -1, 0.0
        self._again = AGAIN_SECONDS
        page = self

        class Handler(_Handler):
            owner = page

        self.server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        self.server.daemon_threads = True
        self.port = self.server.server_address[1]
        threading.Thread(target=self.server.serve_forever, name="live page", daemon=True).start()

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.port}/#{self.token}"

    def close(self) -> None:
        """Wait until open pages have fetched the last figures."""
        watched = time.monotonic() - self._last_request < max(LAST_SECONDS, 2 * self._again)
        self.over.set()
        if watched:
            self._sent_last.wait(LAST_SECONDS)
        self.server.shutdown()
        self.server.server_close()

    def data(self) -> dict[str, Any]:
        with self._lock:
            over = self.over.is_set()
            self._last_request = time.monotonic()
            if over or self._last_request >= self._fresh_until:
                self._read()
            again = None if over else self._again
            # `bytes` of the log: if unchanged there is nothing to redraw.
            return {
                **self._data,
                "bytes": self._size,
                "state": "over" if over else self.control.state(),
                "again": again,
            }

    def sent(self, data: dict[str, Any]) -> None:
        if data["again"] is None:
            self._sent_last.set()

    def _read(self) -> None:
        size = sum(path.stat().st_size for path in self.run.glob("events*.jsonl"))
        if size == self._size:
            return
        begin = time.thread_time()
        self._data = page_data([read_history(self.run)])
        self._size = size
        self._again = max(AGAIN_SECONDS, (time.thread_time() - begin) / SHARE)
        self._fresh_until = time.monotonic() + self._again / 2


class _Handler(BaseHTTPRequestHandler):
    owner: LivePage
    protocol_version = "HTTP/1.1"
    timeout = 60

    def do_GET(self) -> None:
        if self.path == "/":
            self._guarded(self._page, token=False)
        else:
            self._guarded(self._data if self.path == "/data" else self._nothing)

    def do_POST(self) -> None:
        acts = ("/pause", "/continue", "/stop")
        self._guarded(self._act if self.path in acts else self._nothing)

    def _guarded(self, answer: Callable[[], None], token: bool = True) -> None:
        own = {f"{name}:{self.owner.port}" for name in ("127.0.0.1", "localhost")}
        given = self.headers.get("Authorization", "").removeprefix("Bearer ")
        if self.headers.get("Host") not in own:
            self._json(HTTPStatus.MISDIRECTED_REQUEST, {"error": "the Host of this request is not this page's address"})
        elif self.headers.get("Origin", "http://127.0.0.1").partition("://")[2] not in {*own, "127.0.0.1"}:
            self._json(HTTPStatus.FORBIDDEN, {"error": "requests of another Origin are not allowed"})
        elif token and not secrets.compare_digest(given.encode(), self.owner.token.encode()):
            self._json(
                HTTPStatus.UNAUTHORIZED,
                {"error": "the token is missing or wrong; open the address that `plaudit train --live` printed"},
            )
        else:
            answer()

    def _page(self) -> None:
        self._send(HTTPStatus.OK, "text/html; charset=utf-8", live_page().encode())

    def _data(self) -> None:
        try:
            data = self.owner.data()
        except (PlauditError, OSError) as error:
            self._json(HTTPStatus.SERVICE_UNAVAILABLE, {"error": str(error)})
            return
        self._json(HTTPStatus.OK, data)
        self.owner.sent(data)

    def _act(self) -> None:
        refused = self.owner.control.act(self.path[1:])
        if refused is None:
            self._json(HTTPStatus.OK, {"state": self.owner.control.state()})
        else:
            self._json(HTTPStatus.CONFLICT, {"error": refused})

    def _nothing(self) -> None:
        self._json(HTTPStatus.NOT_FOUND, {"error": f"no route {self.command} {self.path}"})

    def _json(self, status: HTTPStatus, data: dict[str, Any]) -> None:
        self._send(status, "application/json", as_json(data).encode())

    def _send(self, status: HTTPStatus, kind: str, body: bytes) -> None:
        self.send_response(status)
        for name, value in (
            ("Content-Type", kind), ("Content-Length", str(len(body))), ("Cache-Control", "no-store"),
            ("X-Content-Type-Options", "nosniff"), ("X-Frame-Options", "DENY"), ("Referrer-Policy", "no-referrer"),
            ("Connection", "close"),
        ):  # fmt: skip
            self.send_header(name, value)
        self.end_headers()
        self.wfile.write(body)

    def log_message(self, format: str, *args: Any) -> None:
        """Not logged: the terminal shows the run's own output."""
