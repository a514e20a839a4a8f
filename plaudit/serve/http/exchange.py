"""One HTTP request and its reply, as an ASGI application sees them."""

from __future__ import annotations

import asyncio
import re
import time
from collections.abc import Awaitable, Callable, Iterable, MutableMapping
from email.utils import formatdate
from functools import cache, lru_cache
from http import HTTPStatus
from typing import Any

from plaudit.serve.http.message import Receive, Scope, Send

AsgiApp = Callable[[Scope, Receive, Send], Awaitable[None]]

HIGH_WATER = 64 * 1024  # bytes of a body that may be buffered for the application before reading pauses
CONTINUE = b"HTTP/1.1 100 Continue\r\n\r\n"
_CONTROL = re.compile(rb"[\x00-\x08\x0b\x0c\x0e-\x1f\x7f]")


class Flow:
    """Flow control of a connection in both directions."""

    def __init__(self, transport: asyncio.Transport) -> None:
        self.transport = transport
        self._paused: set[object] = set()  # who wants nothing more to be read
        self._writable: asyncio.Event | None = None  # set while the client does not read

    def pause_reading(self, who: object) -> None:
        if not self._paused:
            self.transport.pause_reading()
        self._paused.add(who)

    def resume_reading(self, who: object) -> None:
        if who in self._paused:
            self._paused.remove(who)
            if not self._paused:
                self.transport.resume_reading()

    def pause_writing(self) -> None:
        self._writable = asyncio.Event()

    def resume_writing(self) -> None:
        if self._writable is not None:
            self._writable.set()
            self._writable = None

    async def drain(self) -> None:
        if self._writable is not None:
            await self._writable.wait()


class Exchange:
    """keep_alive  whether the connection stays open after the reply
    started     the reply has begun
    done        the reply is complete
    lost        the connection is closed
    """

    __slots__ = (
        "_body", "_bodyless", "_chunked", "_expects_continue", "_flow", "_given", "_head", "_left", "_replied",
        "_waiter", "_whole", "done", "keep_alive", "lost", "scope", "started",
    )  # fmt: skip

    def __init__(
        self, flow: Flow, scope: dict[str, Any], keep_alive: bool, expects_continue: bool,
        replied: Callable[[Exchange], None],
    ) -> None:  # fmt: skip
        self._flow = flow
        self._replied = replied
        self.scope = scope
        self.keep_alive = keep_alive
        self._expects_continue = expects_continue
        self._body = bytearray()
        self._whole = self._given = False  # the body has been received; the application has received all of it
        self._waiter: asyncio.Future[None] | None = None
        self._head: bytes = b""  # of the reply, until it is written
        self._left: int | None = None  # bytes of the reply still to be sent, if its length was announced
        self._chunked = self._bodyless = False
        self.started = self.done = self.lost = False

    async def run(self, app: AsgiApp) -> None:
        try:
            await app(self.scope, self.receive, self.send)
        finally:
            if not self.done and not self.lost:
                self._flow.transport.close()  # the client could not tell where the reply ends

    # Called by the connection

    def feed(self, body: bytes) -> None:
        if self.done:
            return
        self._body += body
        if len(self._body) > HIGH_WATER:
            self._flow.pause_reading(self)
        self._wake()

    def end(self) -> None:
        self._whole = True
        self._wake()

    def lose(self) -> None:
        self.lost = True
        self._wake()

    def _wake(self) -> None:
        if self._waiter is not None and not self._waiter.done():
            self._waiter.set_result(None)

    # Called by the application

    async def receive(self) -> MutableMapping[str, Any]:
        if self._expects_continue and not self.started:
            self._expects_continue = False
            self._flow.transport.write(CONTINUE)
        while not (self._body or (self._whole and not self._given) or self.lost or self.done):
            if not self._whole:
                self._flow.resume_reading(self)
            self._waiter = asyncio.get_running_loop().create_future()
            try:
                await self._waiter
            finally:
                self._waiter = None
        if self.lost or self.done:
            return {"type": "http.disconnect"}
        body, self._given = bytes(self._body), self._whole
        self._body.clear()
        return {"type": "http.request", "body": body, "more_body": not self._whole}

    async def send(self, message: MutableMapping[str, Any]) -> None:
        await self._flow.drain()
        if self.lost:
            return
        kind = message["type"]
        if kind == "http.response.start" and not self.started:
            self._start(message["status"], message.get("headers", ()))
        elif kind == "http.response.body" and self.started and not self.done:
            self._continue(message.get("body", b""), message.get("more_body", False))
        else:
            raise RuntimeError(f"{kind} is not expected here")

    def _start(self, status: int, headers: Iterable[tuple[bytes, bytes]]) -> None:
        if not self._whole:
            self.keep_alive = False  # the rest of the body is not wanted
        lines = [_status_line(status)]
        closes = dated = False
        for name, value in headers:
            lines.append(name + b": " + value)
            if name == b"content-length":
                self._left = int(value)
            elif name == b"connection" and value.lower() == b"close":
                closes = True
            elif name == b"date":
                dated = True
        if not dated:
            lines.append(date())
        self._bodyless = self.scope["method"] == "HEAD" or status in (204, 304)
        if self._left is None and not self._bodyless:
            self._chunked = self.scope["http_version"] == "1.1"
            if self._chunked:
                lines.append(b"transfer-encoding: chunked")
        if self._left is None and not self._bodyless and not self._chunked:
            self.keep_alive = False  # the end of the connection marks the end of the reply
        if closes:
            self.keep_alive = False
        elif not self.keep_alive:
            lines.append(b"connection: close")
        head = b"\r\n".join(lines)
        if head.count(b"\n") != len(lines) - 1 or head.count(b"\r") != len(lines) - 1 or _CONTROL.search(head):
            raise RuntimeError("a header of the reply has a control character")
        self.started = True
        self._head = head + b"\r\n\r\n"
        if self._left is None:  # a stream, whose parts may take time; otherwise head and body are sent in one write
            self._flow.transport.write(self._head)
            self._head = b""

    def _continue(self, body: bytes, more: bool) -> None:
        if self._bodyless:
            body = b""
        elif self._chunked:
            body = b"%x\r\n%b\r\n" % (len(body), body) if body else b""
            if not more:
                body += b"0\r\n\r\n"
        elif self._left is not None:
            self._left -= len(body)
            if self._left < 0 or (self._left and not more):
                raise RuntimeError(f"the reply is {abs(self._left)} bytes off its content-length")
        if self._head or body:
            self._flow.transport.write(self._head + body)
            self._head = b""
        if not more:
            self.done = True
            self._wake()
            self._flow.resume_reading(self)
            self._replied(self)


@cache
def _status_line(status: int) -> bytes:
    phrase = HTTPStatus(status).phrase if status in HTTPStatus._value2member_map_ else ""
    return f"HTTP/1.1 {status} {phrase}".encode()


def date() -> bytes:
    """The Date header."""
    return _date(int(time.time()))


@lru_cache(1)
def _date(second: int) -> bytes:
    return f"date: {formatdate(second, usegmt=True)}".encode()
