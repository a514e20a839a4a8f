"""Admission control and the ASGI application, which finds the route, authenticates the caller, calls the handler and
counts requests. No model runs here.

It implements ASGI directly and uses no framework: what a request may cost (bytes, seconds, items) is limited here and
in `message.py` before anything parses it, and access to a route is decided in a single place.

Load is counted in tokens and bytes. A request that would only wait is rejected at once with a Retry-After. The last
share of the capacity is reserved for API keys that use less than theirs, so one key cannot block the others.
"""

from __future__ import annotations

import asyncio
import copy
import itertools
import math
import secrets
import time
from collections import Counter
from collections.abc import Mapping

from plaudit.serve.http.keys import Keys, Meter
from plaudit.serve.http.message import (
    NOBODY,
    ROUTE_KEY,
    TENANT,
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
    send_parts,
    send_reply,
)  # fmt: skip
from plaudit.serve.http.reader import BodyReaders
from plaudit.serve.http.traces import TRACE, Traces
from plaudit.serve.logs import Log
from plaudit.serve.metrics import Metrics

PACE_SECONDS = 10.0  # window over which the throughput is estimated
LONGEST_WAIT = 30
UNKNOWN = "unknown"  # replaces the key's name for requests that were not authenticated


class Quota:
    """A limit shared by several API keys."""

    def __init__(self, limit: int, keys: int) -> None:
        self.limit = limit
        self.in_use = 0
        self._by_tenant: Counter[str] = Counter()
        self.share_among(keys)

    def share_among(self, keys: int) -> None:
        self._share = self.limit // max(1, keys)

    @property
    def most(self) -> int:
        """The most that one key can use at a time when no other key uses any."""
        return max(self._share, self.limit - self._share)

    def fits(self, tenant: str, count: int) -> bool:
        within_share = self._by_tenant[tenant] + count <= self._share
        return self.in_use + count <= (self.limit if within_share else self.limit - self._share)

    def take(self, tenant: str, count: int) -> None:
        self.in_use += count
        self._by_tenant[tenant] += count


class Admission:
    """leaving    a shutdown signal was received: the server reports not ready, so that load balancers stop sending
               requests, and asks clients to close their connections
    draining   no new connections are accepted
    """

    def __init__(
        self, queued_tokens: int, buffered_bytes: int, keys: int, overload_status: int, metrics: Metrics
    ) -> None:
        self.open_requests = 0
        self.leaving = self.draining = False
        self._tokens = Quota(queued_tokens, keys)
        self._bytes = Quota(buffered_bytes, keys)
        self.arriving = Quota(buffered_bytes, keys + 1)  # one more: callers without a key cannot block those with one
        self._status = overload_status
        self._metrics = metrics
        self.answered = 0  # tokens, since the last tick
        self._pace = 0.0  # tokens answered per second while there is load
        self._meters: Mapping[str, Meter] = {}

    def share_among(self, keys: int, meters: Mapping[str, Meter]) -> None:
        """`meters`: of the keys with a token quota."""
        self._tokens.share_among(keys)
        self._bytes.share_among(keys)
        self.arriving.share_among(keys + 1)
        self._meters = meters

    @property
    def open_tokens(self) -> int:
        """Tokens accepted and not yet answered."""
        return self._tokens.in_use

    @property
    def most_tokens(self) -> int:
        return self._tokens.limit

    def request(self, tenant: str, content_length: int) -> OpenRequest:
        """Admits a request, before its body is read, until the returned context ends."""
        if not self._tokens.fits(tenant, 1):
            raise self.overload(f"{self.open_tokens} tokens are queued; the limit is {self.most_tokens}")
        request = OpenRequest(self, self._bytes, tenant)
        request.grow(content_length)
        return request

    def tokens(self, tenant: str, count: int) -> OpenTokens:
        """Admits the tokens of a request, before its works are queued, until the returned context ends."""
        if count > self._tokens.most:
            raise HttpError(
                422, "too_many_tokens", f"the request has {count} tokens; at most {self._tokens.most} fit; split it"
            )
        if not self._tokens.fits(tenant, count):
            raise self.overload(
                f"{self.open_tokens} tokens are queued, and {count} more would exceed {self.most_tokens}"
            )
        if (meter := self._meters.get(tenant)) is not None:
            meter.take(count)
        return OpenTokens(self, self._tokens, tenant, count)

    def overload(self, why: str) -> HttpError:
        self._metrics.rejected.labels("overload").inc()
        wait = self.retry_after()
        return HttpError(self._status, "overloaded", f"{why}; try again in {wait} s", retry_after=wait)

    def retry_after(self) -> int:
        """Seconds until about half of the queued tokens are answered at the current throughput."""
        if self._pace <= 0:
            return 1
        return max(1, min(LONGEST_WAIT, math.ceil(self.open_tokens / 2 / self._pace)))

    def tick(self, seconds: float) -> None:
        """Called about every second with the time since the last call."""
        answered, self.answered = self.answered, 0
        if answered or self.open_tokens:
            weight = min(1.0, seconds / PACE_SECONDS) if self._pace else 1.0
            self._pace += weight * (answered / seconds - self._pace)


class OpenRequest:
    """The bytes of an admitted request. A class of its own, as `OpenTokens`: contextlib's generators take three times
    as long, and every request enters both."""

    __slots__ = ("_admission", "_bytes", "_held", "_tenant")

    def __init__(self, admission: Admission, quota: Quota, tenant: str) -> None:
        self._admission = admission
        self._bytes = quota
        self._tenant = tenant
        self._held = 0

    def grow(self, count: int) -> None:
        """Counts bytes beyond the announced length."""
        # A single request is limited by its own maximum size, and is admitted when there is no other.
        quota = self._bytes
        if not quota.fits(self._tenant, count) and quota.in_use > self._held:
            raise self._admission.overload(
                f"{quota.in_use} bytes of requests are being handled; the limit is {quota.limit}"
            )
        self._held += count
        quota.take(self._tenant, count)

    def __enter__(self) -> OpenRequest:
        self._admission.open_requests += 1
        return self

    def __exit__(self, *_: object) -> None:
        self._bytes.take(self._tenant, -self._held)
        self._admission.open_requests -= 1


class OpenTokens:
    """The tokens of an admitted request, which count while its works are queued or computed."""

    __slots__ = ("_admission", "_count", "_quota", "_tenant")

    def __init__(self, admission: Admission, quota: Quota, tenant: str, count: int) -> None:
        self._admission = admission
        self._quota = quota
        self._tenant = tenant
        self._count = count

    def __enter__(self) -> None:
        self._quota.take(self._tenant, self._count)

    def __exit__(self, *_: object) -> None:
        self._quota.take(self._tenant, -self._count)
        self._admission.answered += self._count


class App:
    def __init__(
        self, routes: Routes, keys: Keys, admission: Admission, limits: Limits, metrics: Metrics, log: Log, *,
        log_requests: bool, traces: Traces | None = None,
    ) -> None:  # fmt: skip
        self.routes = routes
        self.keys = keys
        self.admission = admission
        self.limits = limits
        self.metrics = metrics
        self.log = log
        self.log_requests = log_requests
        self.traces = traces
        self.readers = BodyReaders()
        self._ids = itertools.count()
        self._prefix = secrets.token_hex(4)

    def beside(self, routes: Routes) -> App:
        """An application with other routes, and the same keys, admission, limits and log."""
        other = copy.copy(self)
        other.routes = routes
        return other

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            if scope["type"] == "websocket":
                await send({"type": "websocket.close", "code": 1008})
            return
        began = time.perf_counter()
        request = Request(scope, receive, self.limits, f"{self._prefix}-{next(self._ids)}", self.readers.run)
        try:
            reply: Reply | None = await self._answer(self.routes.find(request.method, request.path), request, send)
        except HttpError as error:
            reply = self._errors(request)(error, request.id)
            if error.type == "quota":
                self.metrics.rejected.labels("quota").inc()
            self._count_error(error.type, str(error), request)
        except Exception as error:
            # A bug in the server. The client gets no internals; the log has the location.
            self.log("bug", request_id=request.id, path=request.path[:200], error=_where(error))
            hidden = HttpError(500, "internal", "internal error; see the server's log")
            reply = self._errors(request)(hidden, request.id)
            self._count_error("internal", _where(error), request)
        if reply is None:  # the client has disconnected
            if (trace := TRACE.get()) is not None:
                trace.end(request, None)
            return
        # otherwise the reply has started; a broken reply is left incomplete, which clients detect
        if not request.begun:
            self._ask_to_leave(reply)
            await send_reply(send, reply, request)
        self._count(request, reply.status, time.perf_counter() - began)

    def _count(self, request: Request, status: int, seconds: float) -> None:
        route = request.route
        if route is not None and route.access == "open":  # health checks and pages, which are not work
            self.metrics.probes.labels(status).inc()
            return
        if (trace := TRACE.get()) is not None:
            trace.end(request, status)
        protocol, tenant, model = "native" if route is None else route.protocol, request.tenant, request.model
        self.metrics.requests.labels(model, protocol, status, tenant or UNKNOWN).inc()
        self.metrics.request_seconds.labels(model, protocol).observe(seconds)
        if request.tokens:
            self.metrics.key_tokens.labels(tenant, model).inc(request.tokens)
        if self.log_requests:
            self.log(
                "request", request_id=request.id, method=request.method, path=request.path[:200], protocol=protocol,
                status=status, tenant=tenant, model=model, items=request.items, failed=request.failed,
                tokens=request.tokens, error=request.error, ms=round(seconds * 1000, 2),
            )  # fmt: skip

    def _errors(self, request: Request) -> ErrorWriter:
        return self.routes.errors(request.path) if request.route is None else request.route.errors

    async def _answer(self, place: Endpoint, request: Request, send: Send) -> Reply | None:
        route = request.route = place.last
        if self.traces is not None and route.access != "open":
            TRACE.set(self.traces.begin(request))
        self.keys.check_host(request.headers)
        holder = self.keys.admit(place, request.credential())
        request.tenant, request.roles = holder.name, holder.roles
        TENANT.set(request.tenant)
        if request.tenant != NOBODY:
            request.connection.known = True
        if not route.work:
            return await route.handler(request)
        length = request.headers.get(b"content-length", b"0")
        request.take_deadline()
        began = time.perf_counter()
        size = min(int(length), self.limits.body_bytes) if length.isdigit() else 0
        with self.admission.request(request.tenant, size) as admitted:
            request.grow = admitted.grow
            request.content = await request.body()
            ROUTE_KEY.set(request.headers.get(b"x-route-key") or request.content)
            if route.fields or len(place.routes) > 1:
                await request.read_fields()
            request.route = place.choose(request)
            reply = await self._unless_gone(request.route, request, send)
        self.metrics.history.requests += 1
        self.metrics.history.latencies.append(time.perf_counter() - began)
        return reply

    async def _unless_gone(self, route: Route, request: Request, send: Send) -> Reply | None:
        """Runs the handler and sends its reply if it is a stream. Cancels the handler and returns None if the client
        disconnects first."""
        task, connection = asyncio.current_task(), request.connection
        assert task is not None
        watching = None if request.notified_when_lost else asyncio.create_task(request.until_lost())
        try:
            reply = await route.handler(request) if connection.enter(task) else None
            if reply is not None and reply.parts is not None:
                self._ask_to_leave(reply)
                await send_parts(send, reply, reply.parts, request)
            return reply
        except asyncio.CancelledError:
            if not connection.lost:
                raise
            task.uncancel()
            return None
        finally:
            connection.working.discard(task)
            if watching is not None:
                watching.cancel()

    def _ask_to_leave(self, reply: Reply) -> None:
        if self.admission.leaving:
            reply.headers.append((b"connection", b"close"))

    def _count_error(self, type: str, message: str, request: Request) -> None:
        request.error = type
        self.metrics.errors.labels(type).inc()
        self.metrics.history.error(type, message, "", request.id, request.tenant)


def _where(error: BaseException) -> str:
    """Returns the kind of error and our line that raised it: enough to locate it, without any user data."""
    place = error.__traceback__
    while place is not None and place.tb_next is not None:
        place = place.tb_next
    at = "" if place is None else f" at {place.tb_frame.f_code.co_filename.rpartition('/')[2]}:{place.tb_lineno}"
    return f"{type(error).__name__}{at}"
