"""The ASGI application: find the route, let the caller in, answer, count. It runs no model.

It speaks ASGI itself and uses no framework: what a request may cost (bytes, seconds, items) is bounded here and in
`http.py` before anything reads it, and a route's access is decided in one place that nothing can go around.
"""

from __future__ import annotations

import asyncio
import itertools
import secrets
import time

from plaudit.serve.http.admission import Admission
from plaudit.serve.http.auth import Keys
from plaudit.serve.http.message import (
    Endpoint,
    ErrorWriter,
    HttpError,
    Limits,
    Receive,
    Reply,
    Request,
    Route,
    Routes,
    Scope,
    Send,
    send_reply,
)
from plaudit.serve.logs import Log
from plaudit.serve.metrics import Metrics


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
        self.metrics.history.request(time.perf_counter() - began)
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
