"""A real HTTP server that answers /v1/rewards as the test's script defines, correctly or not."""

from __future__ import annotations

import json
import threading
from collections.abc import Callable
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any


@dataclass
class Answer:
    """`missing` bytes of the body are announced but never sent; `hang` sends nothing until the server ends."""

    body: Any = None
    status: int = 200
    headers: dict[str, str] = field(default_factory=dict)
    missing: int = 0
    hang: bool = False


@dataclass
class Asked:
    body: dict[str, Any]
    headers: dict[str, str]

    @property
    def responses(self) -> int:
        return sum(len(item.get("responses", [1])) for item in self.body["items"])


def right(request: Asked, version: str = "0-a") -> dict[str, Any]:
    """A correct reply: the score of a response is the number in its text."""
    items = [{"scores": [float(r) for r in item["responses"]]} for item in request.body["items"]]
    return {"model": request.body["model"] or "sums", "version": version, "items": items}


class Scripted:
    """`script(number, request)` returns the answer to request `number`, counted from 0; by default all are correct."""

    def __init__(
        self, script: Callable[[int, Asked], Answer] = lambda _, request: Answer(right(request)), port: int = 0
    ) -> None:
        self.asked: list[Asked] = []
        self.connections = 0
        self.script = script
        self._lock = threading.Lock()
        self._ended = threading.Event()
        scripted = self

        class Handler(BaseHTTPRequestHandler):
            protocol_version = "HTTP/1.1"
            disable_nagle_algorithm = True

            def setup(self) -> None:
                super().setup()
                scripted.connections += 1

            def do_POST(self) -> None:
                scripted._answer(self)

            def do_GET(self) -> None:
                self.send_error(405)

            def log_message(self, *_: object) -> None:
                pass

        class Server(ThreadingHTTPServer):
            request_queue_size = 256
            daemon_threads = True

            def handle_error(self, *_: object) -> None:
                pass  # tests disconnect clients during a reply

        self._server = Server(("127.0.0.1", port), Handler)
        self.url = f"http://127.0.0.1:{self._server.server_port}"
        self._thread = threading.Thread(target=lambda: self._server.serve_forever(0.02), daemon=True)

    def _answer(self, handler: BaseHTTPRequestHandler) -> None:
        body = handler.rfile.read(int(handler.headers["content-length"]))
        request = Asked(json.loads(body), {k.lower(): v for k, v in handler.headers.items()})
        with self._lock:
            number = len(self.asked)
            self.asked.append(request)
        answer = self.script(number, request)
        if answer.hang:
            self._ended.wait(60)
            handler.close_connection = True
            return
        content = answer.body if isinstance(answer.body, bytes) else json.dumps(answer.body).encode()
        handler.send_response(answer.status)
        for name, value in {"Content-Length": str(len(content) + answer.missing), **answer.headers}.items():
            handler.send_header(name, value)
        handler.end_headers()
        handler.wfile.write(content)
        handler.close_connection = handler.close_connection or answer.missing > 0

    def __enter__(self) -> Scripted:
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._ended.set()
        self._server.shutdown()
        self._server.server_close()
        self._thread.join()
