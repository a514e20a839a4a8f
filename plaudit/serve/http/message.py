"""Requests, replies and routes over ASGI, with limits on everything a hostile client could send.

A route has a method, an exact path, an access level and a handler; the table of routes defines everything the server
serves. Where two protocols share a path, the body decides: every route but the last has a function `claims` that
recognises its bodies, tried in the order in which the protocols are listed.
"""

from __future__ import annotations

import asyncio
import contextlib
import gc
import re
import time
import zlib
from collections.abc import AsyncGenerator, Awaitable, Callable, Collection, Iterable, Mapping, MutableMapping
from contextvars import ContextVar
from dataclasses import dataclass, field
from typing import Any, Literal, TypeVar
from urllib.parse import parse_qsl

import msgspec

from plaudit.errors import one_line

T = TypeVar("T")
Scope = MutableMapping[str, Any]
Receive = Callable[[], Awaitable[MutableMapping[str, Any]]]
Send = Callable[[MutableMapping[str, Any]], Awaitable[None]]

JSON = b"application/json"
NOBODY = "anonymous"
LINGER_SECONDS = 2.0
INLINE_BYTES = 64 * 1024  # of JSON decoded on the event loop: a thread would cost more
THREAD_BYTES = 256 * 1024  # decoded in a thread: another process would cost more, and the worst case takes milliseconds
PIECE_BYTES = 1 << 20  # decompressed or scanned at a time
VALUE_BYTES = 64  # memory of a decoded value besides its text
_SAFE_ID = re.compile(rb"[A-Za-z0-9._:/-]{1,128}")
_ENCODER = msgspec.json.Encoder()


TENANT: ContextVar[str] = ContextVar("TENANT", default=NOBODY)
"""The tenant this task works for."""
ROUTE_KEY: ContextVar[bytes] = ContextVar("ROUTE_KEY", default=b"")
"""The routing key that selects the model version: the request's X-Route-Key, or its body."""


class HttpError(Exception):
    """An error reply. `type` is for programs, the message is for people."""

    def __init__(
        self, status: int, type: str, message: str, retry_after: int | None = None, allow: str | None = None
    ) -> None:
        super().__init__(message)
        self.status = status
        self.type = type
        self.retry_after = retry_after
        self.allow = allow

    def reply(self, request_id: str) -> Reply:
        content = {
            "error": {
                "type": self.type, "message": str(self), "request_id": request_id,
                "retryable": self.status == 408 or self.status == 429 or self.status >= 500,
            }
        }  # fmt: skip
        reply = Reply.json(content, self.status)
        if self.retry_after is not None:
            reply.headers.append((b"retry-after", str(self.retry_after).encode()))
        if self.allow is not None:
            reply.headers.append((b"allow", self.allow.encode()))
        if self.status == 401:
            reply.headers.append((b"www-authenticate", b"Bearer"))
        return reply

    def shaped(self, content: Any, request_id: str, status: int | None = None) -> Reply:
        """The reply in another protocol's format, with the headers that every error has."""
        return Reply(status or self.status, _ENCODER.encode(content), headers=self.reply(request_id).headers)


@dataclass(slots=True)
class Reply:
    """parts  the body as a stream; the generator must write errors that occur midway itself"""

    status: int
    body: bytes
    content_type: bytes = JSON
    headers: list[tuple[bytes, bytes]] = field(default_factory=list)
    parts: AsyncGenerator[bytes, None] | None = None

    @classmethod
    def json(cls, content: Any, status: int = 200) -> Reply:
        return cls(status, _ENCODER.encode(content))


@dataclass(slots=True)
class Limits:
    body_bytes: int
    body_seconds: float
    request_seconds: float
    json_values: int = 4_000_000
    structures: int = 262_144  # non-numeric values of a large body


class Connection:
    """The state of a request's connection: the tasks to cancel when it is lost. `known`: a request on it was
    authenticated."""

    __slots__ = ("known", "lost", "working")

    def __init__(self) -> None:
        self.known = False
        self.lost = False
        self.working: set[asyncio.Task[Any]] = set()

    def enter(self, task: asyncio.Task[Any]) -> bool:
        """Returns whether the client is still connected."""
        self.working.add(task)
        return not self.lost

    def lose(self) -> None:
        self.lost = True
        for task in self.working:
            task.cancel()


class Request:
    """One request. `tenant` is the name of its API key and `roles` are the key's roles; `grow` counts bytes beyond the
    announced length and may reject them; `elsewhere` parses in another process. For log and metrics: the model that
    answered, the number of items (and failed items) and tokens, and the type of the error
    that was returned."""

    __slots__ = (
        "_fields", "_limits", "_receive", "_scope", "begun", "complete", "connection", "content", "deadline",
        "elsewhere", "error", "failed", "grow", "headers", "id", "items", "method", "model", "path", "query", "roles",
        "route", "server", "tenant", "tokens",
    )  # fmt: skip

    def __init__(
        self, scope: Scope, receive: Receive, limits: Limits, fresh_id: str, elsewhere: Callable[..., Awaitable[Any]]
    ) -> None:
        self.elsewhere = elsewhere
        self._receive = receive
        self._limits = limits
        self._scope = scope
        self.connection: Connection = scope.get("connection") or Connection()
        self.method: str = scope["method"]
        # Not request.url, which is built from the Host header and so controlled by the client.
        self.path: str = scope["path"]
        self.query: bytes = scope["query_string"]
        self.server: tuple[str, int | None] = scope["server"]  # the address the connection was accepted on
        self.headers: dict[bytes, bytes] = dict(scope["headers"])
        chosen_id = self.headers.get(b"x-request-id", b"")
        self.id = chosen_id.decode() if _SAFE_ID.fullmatch(chosen_id) else fresh_id
        self.tenant = ""
        self.roles: Collection[str] = ()
        self.model = ""
        self.items = self.failed = self.tokens = 0
        self.error: str | None = None
        self.begun = False  # part of a streamed reply has been sent
        self.content = b""
        self.grow: Callable[[int], None] = _uncounted
        self.route: Route | None = None
        self._fields: dict[str, Any] | None = None
        # Whether the whole body has been read. GET may have a body too, possibly one without an end.
        self.complete = self.headers.get(b"content-length", b"0") == b"0" and b"transfer-encoding" not in self.headers
        self.deadline = time.monotonic() + limits.request_seconds

    @property
    def scheme(self) -> str:
        return str(self._scope["scheme"])

    def take_deadline(self) -> None:
        """Reads `X-Deadline: seconds`, relative to now, so that clock differences between machines do not matter."""
        header = self.headers.get(b"x-deadline")
        if header is None:
            return
        try:
            seconds = float(header)
        except ValueError:
            seconds = float("nan")
        if not -1e9 < seconds < 1e9:
            raise HttpError(
                400, "bad_deadline", f"X-Deadline is {_shown(header)}; expected seconds from now, such as 2.5"
            )
        if seconds <= 0:
            raise HttpError(504, "deadline", f"the deadline expired {-seconds:g} s before the request arrived")
        self.deadline = min(self.deadline, time.monotonic() + seconds)

    def credential(self) -> bytes | None:
        """The Authorization header, or the key in the header or field where some clients send it."""
        header = self.headers.get(b"authorization")
        if header is None:
            header = self.headers.get(b"x-api-key") or self.headers.get(b"triton-access-token")
            return None if header is None else b"Bearer " + header
        return header

    async def aside(self, read: Callable[..., T], *arguments: Any, json_bytes: int | None = None) -> T:
        """Runs `read` on the body, all of it JSON or the first `json_bytes` of it: large bodies in a thread, very
        large ones in another process, and only if it has no more values than the tokens a request may have: many small
        values take a hundred times the memory of their text."""
        if len(self.content) <= INLINE_BYTES:
            return read(self.content, *arguments)
        size = len(self.content) if json_bytes is None else min(json_bytes, len(self.content))
        values = 0
        for start in range(0, size, PIECE_BYTES):
            piece = self.content[start : min(size, start + PIECE_BYTES)]
            values += sum(map(piece.count, (b",", b"[", b"{")))
            if values > self._limits.json_values:
                raise HttpError(
                    413, "too_large", f"the body has more than {self._limits.json_values} JSON values; split it"
                )
            await asyncio.sleep(0)
        self.grow(values * VALUE_BYTES)
        if size <= THREAD_BYTES:
            return await asyncio.to_thread(_without_collector, read, self.content, *arguments)
        return await self.elsewhere(read, self.content, arguments, self._limits.structures, self.tenant, self.deadline)  # type: ignore[no-any-return]

    async def read_fields(self) -> None:
        """Parses `fields` in advance for a large body."""
        if len(self.content) > INLINE_BYTES:
            self._fields = await self.aside(json_object)

    def fields(self) -> dict[str, Any]:
        """The body as a JSON object."""
        if self._fields is None:
            self._fields = json_object(self.content)
        return self._fields

    def parameters(self) -> dict[str, str]:
        """Fields of the query string; the last value of each name."""
        try:
            return dict(parse_qsl(self.query.decode("latin-1"), max_num_fields=16))
        except ValueError:
            raise HttpError(400, "bad_query", "the query string has more than 16 fields") from None

    def content_type(self) -> bytes:
        return self.headers.get(b"content-type", JSON).partition(b";")[0].strip().lower()

    async def body(self) -> bytes:
        """The whole body, decompressed, within the limits of size and time."""
        limit = self._limits.body_bytes
        self._announced(limit)
        parts: list[bytes] = []
        if "arrived" in self._scope:  # most bodies arrive together with their headers
            await self._receive_parts(parts, limit)
        else:
            try:
                async with asyncio.timeout(self._limits.body_seconds):
                    await self._receive_parts(parts, limit)
            except TimeoutError:
                seconds, size = self._limits.body_seconds, sum(map(len, parts))
                raise HttpError(
                    408, "slow_body", f"the body did not arrive within {seconds:g} s ({size} bytes received)"
                ) from None
        self.complete = True
        body = b"".join(parts)
        coding = self.headers.get(b"content-encoding", b"identity").strip().lower()
        if coding in (b"identity", b""):
            return body
        return await self._unpacked(body, coding, limit)

    async def _receive_parts(self, parts: list[bytes], limit: int) -> None:
        size, more, announced = 0, True, int(self.headers.get(b"content-length", b"0"))
        while more:
            message = await self._receive()
            if message["type"] == "http.disconnect":
                raise HttpError(400, "disconnected", "the client disconnected before its body had arrived")
            parts.append(message.get("body", b""))
            size += len(parts[-1])
            if size > limit:
                raise _too_large(limit)
            if not announced:  # chunked: the size was not announced
                self.grow(len(parts[-1]))
            more = message.get("more_body", False)

    async def _unpacked(self, body: bytes, coding: bytes, limit: int) -> bytes:
        """Decompresses in threads, which release the GIL, one counted piece at a time."""
        if coding not in (b"gzip", b"deflate"):
            raise HttpError(
                415, "unsupported_encoding", f"Content-Encoding is {_shown(coding)}; expected gzip, deflate or none"
            )
        unpacker = zlib.decompressobj(wbits=31 if coding == b"gzip" else 15)
        pieces: list[bytes] = []
        left, size = body, 0
        while not unpacker.eof:
            try:
                pieces.append(await asyncio.to_thread(unpacker.decompress, left, PIECE_BYTES))
            except zlib.error as error:
                raise HttpError(400, "bad_encoding", f"the body is not {coding.decode()}: {error}") from None
            left, size = unpacker.unconsumed_tail, size + len(pieces[-1])
            if size > limit:
                raise _too_large(limit)
            self.grow(len(pieces[-1]))
            if not left and not pieces[-1]:
                break
        if not unpacker.eof or unpacker.unused_data:
            problem = "has data after its end" if unpacker.eof else "ends early"
            raise HttpError(400, "bad_encoding", f"the {coding.decode()} body {problem}")
        return b"".join(pieces)

    async def until_lost(self) -> None:
        """For servers that do not report lost connections: returns when it is cancelled or the client disconnects."""
        while (await self._receive())["type"] != "http.disconnect":
            pass
        self.connection.lose()

    @property
    def notified_when_lost(self) -> bool:
        return "connection" in self._scope

    async def linger(self) -> None:
        """Discard the rest of a body that is not needed. A connection closed with unread bytes is reset, and the
        client would lose the error reply."""
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(LINGER_SECONDS):
                while (await self._receive()).get("more_body", False):
                    pass

    def _announced(self, limit: int) -> None:
        length = self.headers.get(b"content-length")
        if length is not None and (not length.isdigit() or int(length) > limit):
            raise _too_large(limit)


def json_object(body: bytes) -> dict[str, Any]:
    try:
        parsed = msgspec.json.decode(body)
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
        raise HttpError(400, "invalid_json", f"the body is not JSON: {one_line(error, 200)}") from None
    if not isinstance(parsed, dict):
        raise HttpError(400, "invalid_json", f"the body is a JSON {type(parsed).__name__}; expected an object")
    return parsed


def _uncounted(_: int) -> None:
    pass


def _without_collector(read: Callable[..., T], *arguments: Any) -> T:
    """Runs `read` without the garbage collector: everything decoded is kept, and scanning it would cost more time."""
    gc.disable()
    try:
        return read(*arguments)
    finally:
        gc.enable()


def convert(fields: Mapping[str, Any], kind: type[T], status: int = 422) -> T:
    """Converts the body's fields to a record; unknown fields are ignored."""
    try:
        return msgspec.convert(fields, kind)
    except msgspec.ValidationError as error:
        raise HttpError(status, "invalid_request", one_line(error, 200)) from None


def _too_large(limit: int) -> HttpError:
    return HttpError(413, "too_large", f"the body is larger than {limit} bytes; send fewer items per request")


def _shown(value: bytes) -> str:
    return repr(value[:40].decode("latin-1"))


async def send_reply(send: Send, reply: Reply, request: Request) -> None:
    headers = [
        (b"content-type", reply.content_type),
        (b"content-length", str(len(reply.body)).encode()),
        (b"x-request-id", request.id.encode()),
        *reply.headers,
    ]
    if not request.complete and (b"connection", b"close") not in headers:
        headers.append((b"connection", b"close"))
    await send({"type": "http.response.start", "status": reply.status, "headers": headers})
    if request.complete:
        await send({"type": "http.response.body", "body": reply.body})
        return
    await send({"type": "http.response.body", "body": reply.body, "more_body": True})
    await request.linger()
    await send({"type": "http.response.body", "body": b""})


async def send_parts(send: Send, reply: Reply, parts: AsyncGenerator[bytes, None], request: Request) -> None:
    request.begun = True
    headers = [(b"content-type", reply.content_type), (b"x-request-id", request.id.encode()), *reply.headers]
    await send({"type": "http.response.start", "status": reply.status, "headers": headers})
    async with contextlib.aclosing(parts):
        async for part in parts:
            await send({"type": "http.response.body", "body": part, "more_body": True})
    await send({"type": "http.response.body", "body": b""})


Access = Literal["open", "key", "metrics", "admin"]
Handler = Callable[[Request], Awaitable[Reply]]
ErrorWriter = Callable[[HttpError, str], Reply]
Claims = Callable[[Mapping[str, Any]], bool]


@dataclass(frozen=True, slots=True)
class Route:
    """access    who may call it: anyone, any key (for work: a key with the role score), or keys with that role
    protocol  the protocol, as named by `--allow-open`
    work      whether it scores or generates: such routes are closed while the server drains or is overloaded
    errors    writes an error in this protocol's format
    fields    whether the handler reads the body as a JSON object
    claims    on a shared path: whether a body belongs to this protocol
    """

    method: str
    path: str
    access: Access
    handler: Handler
    protocol: str = "native"
    work: bool = False
    summary: str = ""
    errors: ErrorWriter = HttpError.reply
    claims: Claims | None = None
    fields: bool = False


class Endpoint:
    """The routes of one method and path: usually one, sometimes several."""

    def __init__(self, routes: list[Route]) -> None:
        self.routes = tuple(routes)
        self.last = routes[-1]
        self.access = self.last.access
        self.role = "score" if self.access == "key" and self.last.work else self.access
        self.protocols = frozenset(route.protocol for route in routes)
        for route in routes[:-1]:
            if route.claims is None:
                raise ValueError(
                    f"{route.method} {route.path} is shared, and the route of {route.protocol} has no claims"
                )
        if len({(route.access, route.work) for route in routes}) > 1:
            raise ValueError(f"the routes of {self.last.method} {self.last.path} differ in access or work")

    def choose(self, request: Request) -> Route:
        if len(self.routes) == 1:
            return self.last
        fields = request.fields()
        return next((r for r in self.routes if r.claims is not None and r.claims(fields)), self.last)


class Routes:
    """shapes     error writers for paths that do not exist, by path prefix
    catch_alls  catch-all routes for all other paths, of any method, by path prefix
    """

    def __init__(
        self, routes: Iterable[Route], shapes: Mapping[str, ErrorWriter] | None = None,
        catch_alls: Mapping[str, Route] | None = None,
    ) -> None:  # fmt: skip
        self.all = tuple(routes)
        self._shapes = dict(shapes or {})
        self._strangers = {start: Endpoint([route]) for start, route in (catch_alls or {}).items()}
        claimed: dict[str, dict[str, list[Route]]] = {}
        for route in self.all:
            claimed.setdefault(route.path, {}).setdefault(route.method, []).append(route)
        self._by_path = {
            path: {method: Endpoint(routes) for method, routes in methods.items()} for path, methods in claimed.items()
        }

    def find(self, method: str, path: str) -> Endpoint:
        methods = self._by_path.get(path)
        if methods is None:
            for start, stranger in self._strangers.items():
                if path.startswith(start):
                    return stranger
            raise HttpError(404, "not_found", "no such path; see /docs")
        place = methods.get(method)
        if place is None and method == "HEAD" and "GET" in methods and methods["GET"].last.access == "open":
            return methods["GET"]  # health checks of load balancers; the listener omits the body
        if place is None:
            allowed = ", ".join(sorted(methods))
            raise HttpError(405, "method_not_allowed", f"this path accepts {allowed}", allow=allowed)
        return place

    def errors(self, path: str) -> ErrorWriter:
        if path in self._by_path:  # the path exists with another method
            return next(iter(self._by_path[path].values())).last.errors
        return next((writer for start, writer in self._shapes.items() if path.startswith(start)), HttpError.reply)
