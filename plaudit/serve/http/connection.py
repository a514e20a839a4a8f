"""An HTTP/1.1 connection on asyncio and httptools: parses one request at a time, and limits headers and slow or idle
clients."""

from __future__ import annotations

import asyncio
import fcntl
import re
import secrets
import socket
import struct
import termios
import time
from array import array
from collections import OrderedDict
from contextlib import suppress
from http import HTTPStatus
from typing import Any
from urllib.parse import unquote

import httptools

from plaudit.config.serve import LimitsTable
from plaudit.serve.http.exchange import AsgiApp, Exchange, Flow, date
from plaudit.serve.http.message import Connection, HttpError

KEEP_ALIVE_SECONDS = 75
PIECE_BYTES = 4096  # of heads and chunks parsed at a time
CHUNKS = 256  # of one connection that are parsed before others have their turn
EMPTY_LINE = b"\r\n\r\n"
CHUNKED_HEAD = b"POST / HTTP/1.1\r\nTransfer-Encoding: chunked\r\n\r\n"  # for a parser that decodes chunks
START_LINE = re.compile(rb"([A-Z-]+) ([!-\"$-~]+) HTTP/(1\.[01])\r\n")
ABSOLUTE = re.compile(rb"https?://[^/?@]+(/[^?]*)?(?:\?(.*))?", re.IGNORECASE)
HOST = re.compile(rb"(?:\[[0-9A-Za-z:.%~_-]+\]|[0-9A-Za-z._~!$&'()*+,;=%-]*)(?::[0-9]*)?")
ASGI = {"version": "3.0", "spec_version": "2.3"}


class Connections:
    """The open connections of a server, and those of them that handle no request, the longest idle first."""

    def __init__(self) -> None:
        self.open: set[HttpConnection] = set()
        self._strangers: OrderedDict[HttpConnection, None] = OrderedDict()
        self._known: OrderedDict[HttpConnection, None] = OrderedDict()  # a request on it was authenticated

    def add(self, connection: HttpConnection) -> None:
        self.open.add(connection)
        self.rest(connection)

    def rest(self, connection: HttpConnection) -> None:
        (self._known if connection.known else self._strangers)[connection] = None

    def work(self, connection: HttpConnection) -> None:
        self._strangers.pop(connection, None)
        self._known.pop(connection, None)

    def discard(self, connection: HttpConnection) -> None:
        self.open.discard(connection)
        self.work(connection)

    def close_idle(self, fresh: HttpConnection) -> None:
        """Make room for a new connection: close the connection that has been idle longest, preferring those that have
        not sent an API key."""
        longest = next((each for idle in (self._strangers, self._known) for each in idle if each is not fresh), None)
        if longest is not None:
            self.discard(longest)  # now: its connection_lost comes in the next iteration of the event loop
            longest.transport.abort()


class HttpConnection(asyncio.Protocol):
    """Handles one request at a time: what a client sends before its reply is not parsed until the reply is sent.

    httptools (llhttp, strict) checks the syntax of the head and decodes chunks. It is given each head alone, up to its
    empty line, and then discarded, so that nothing it concludes from a head (an offered upgrade, for example) decides
    where the body ends: that is decided here, by Content-Length or Transfer-Encoding.

    among  the server's open connections, including this one
    tasks  the tasks that answer their requests
    """

    transport: asyncio.Transport
    _flow: Flow

    def __init__(
        self, app: AsgiApp, limits: LimitsTable, among: Connections, tasks: set[asyncio.Task[None]]
    ) -> None:  # fmt: skip
        self._app = app
        self._limits = limits
        self._among = among
        self._tasks = tasks
        self._loop = asyncio.get_running_loop()
        self._client = Connection()
        self._exchange: Exchange | None = None  # the request that is being handled
        self._ended = False  # no further request is accepted
        self._received = b""
        self._at = 0  # where the part of it begins that was not parsed yet
        self._tail = b""  # the end of what was parsed, which may be the beginning of an empty line
        self._parser: Any = None
        self._messages = 0  # that the parser has begun
        self._in_head = True
        self._head = bytearray()
        self._headers: list[tuple[bytes, bytes]] = []
        self._head_complete = self._keep_alive = False
        self._left = 0  # bytes of a body of known length
        self._chunked = False  # whether a chunked body is being received
        self._pieces: list[bytes] = []  # of chunks
        self.on_body = self._pieces.append  # called by the parser
        self._framing = 0  # bytes of chunk sizes and trailers since the last chunk
        self.waiting_since = time.monotonic()  # for a request, or for the end of its headers
        self._stalled = (0, 0.0, 0.0)  # unread bytes of the client; since when this many, since when any

    # Callbacks of the transport

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        self.transport = transport
        self._flow = Flow(transport)
        self._server = _address(transport.get_extra_info("sockname"))
        self._peer = _address(transport.get_extra_info("peername"))
        self._scheme = "http" if transport.get_extra_info("sslcontext") is None else "https"
        self._among.add(self)
        if len(self._among.open) > self._limits.connections:
            self._among.close_idle(self)

    def connection_lost(self, exc: Exception | None) -> None:
        self._ended = True
        self._among.discard(self)
        self._client.lose()
        if self._exchange is not None:
            self._exchange.lose()
        self._flow.resume_writing()
        self._parser = None

    def pause_writing(self) -> None:
        self._flow.pause_writing()

    def resume_writing(self) -> None:
        self._flow.resume_writing()

    def data_received(self, data: bytes) -> None:
        if not self._ended:
            self._received = self._received[self._at :] + data
            self._at = 0
            self._parse()

    # Requests

    def _parse(self) -> None:
        """Parses what has been received, up to the end of a request."""
        chunks = 0
        try:
            while self._at < len(self._received) and not self._ended:
                if self._left:
                    self._take_body()
                elif self._chunked:
                    if chunks > CHUNKS:  # tiny ones, which are expensive; other connections first
                        self._loop.call_soon(self._parse)
                        break
                    chunks += self._take_chunks()
                elif self._exchange is None:
                    self._take_head()
                else:
                    break  # until the reply is sent
        except HttpError as error:
            self._refuse(error)
        except httptools.HttpParserError:
            self._refuse(_bad_http("this is not HTTP/1.1: the request could not be parsed"))
        if self._ended:
            return
        if self._at < len(self._received):
            self._flow.pause_reading(self)
        else:
            self._received, self._at = b"", 0
            self._flow.resume_reading(self)

    def _take_head(self) -> None:
        if not self._head:
            while self._received[self._at : self._at + 1] in (b"\r", b"\n"):  # empty lines before a request
                self._at += 1
            if self._at == len(self._received):
                return
            self._expect(in_head=True)
            self._headers = []
            self._head_complete = False
            self.waiting_since = time.monotonic()
        piece = self._until_empty_line()
        self._head += piece
        # An offer of another protocol is ignored, as a server may: the request is answered as HTTP/1.1.
        with suppress(httptools.HttpParserUpgrade):
            self._parser.feed_data(piece)
        if len(self._head) > self._limits.header_bytes or len(self._headers) > self._limits.headers:
            most = f"at most {self._limits.headers} headers of {self._limits.header_bytes} bytes in total are accepted"
            raise HttpError(431, "headers_too_large", f"{most}; send fewer")
        if self._head_complete:
            self._begin()

    def _take_body(self) -> None:
        assert self._exchange is not None
        body = self._received[self._at : self._at + self._left]
        self._at += len(body)
        self._left -= len(body)
        self._exchange.feed(body)
        if not self._left:
            self._end_body()

    def _take_chunks(self) -> int:
        """Returns the number of chunks taken."""
        assert self._exchange is not None
        piece = self._until_empty_line()
        self._framing += len(piece)
        self._parser.feed_data(piece)
        count = len(self._pieces)
        if count:
            self._framing = 0
            self._exchange.feed(b"".join(self._pieces))
            self._pieces.clear()
        if self._framing > self._limits.header_bytes:
            raise HttpError(
                431, "headers_too_large", f"chunk sizes and trailers have at most {self._limits.header_bytes} bytes"
            )
        if not self._chunked:
            self._end_body()
        return count

    def _until_empty_line(self) -> bytes:
        """The next PIECE_BYTES of what has been received, or fewer up to an empty line, with which a head and a chunked
        body end. It may have begun in what was taken before."""
        taken, at = len(self._tail), self._at
        piece = self._tail + self._received[at : at + PIECE_BYTES]
        end = piece.find(EMPTY_LINE)
        if end >= 0:
            piece = piece[: end + len(EMPTY_LINE)]
        self._at += len(piece) - taken
        self._tail = b"" if end >= 0 else piece[-3:]
        return piece[taken:]

    def _expect(self, *, in_head: bool) -> None:
        self._in_head = in_head
        self._messages = 0
        self._parser = httptools.HttpRequestParser(self)

    # Callbacks of the parser

    def on_message_begin(self) -> None:
        self._messages += 1
        if self._messages > 1:  # never: it is given one message at a time
            raise _bad_http("data follows the end of the request")

    def on_header(self, name: bytes, value: bytes) -> None:
        if self._in_head and len(self._headers) <= self._limits.headers:  # trailers are ignored
            self._headers.append((name.lower(), value.rstrip(b" \t")))

    def on_headers_complete(self) -> None:
        if self._in_head:
            self._head_complete = True
            self._keep_alive = self._parser.should_keep_alive()

    def on_message_complete(self) -> None:
        if not self._in_head:
            self._chunked = False

    # Requests and replies

    def _begin(self) -> None:
        method, target, version = _start_line(self._head)
        self._head.clear()
        self._in_head = False
        length, expects_continue = self._checked_headers(version)
        if len(self._among.open) > self._limits.connections:
            message = f"{self._limits.connections} connections are busy, which is the limit; try again in 1 s"
            raise HttpError(503, "too_many_connections", message, retry_after=1)
        path, query = _path_and_query(method, target)
        scope = {
            "type": "http", "asgi": ASGI, "http_version": version, "server": self._server, "client": self._peer,
            "scheme": self._scheme, "method": method, "root_path": "",
            "path": unquote(path.decode("ascii")) if b"%" in path else path.decode("ascii"), "raw_path": path,
            "query_string": query, "headers": self._headers, "connection": self._client,
        }  # fmt: skip
        keep_alive = version == "1.1" and self._keep_alive
        exchange = self._exchange = Exchange(self._flow, scope, keep_alive, expects_continue, self._replied)
        self._among.work(self)
        if length is None:
            self._chunked = True
            self._framing = 0
            self._expect(in_head=False)
            self._parser.feed_data(CHUNKED_HEAD)
        else:
            self._left = length
            if not length:
                self._end_body()
        task = self._loop.create_task(exchange.run(self._app))
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)

    def _checked_headers(self, version: str) -> tuple[int | None, bool]:
        """The length of the body, or None if it is chunked; whether the client waits for `100 Continue`. Refuses what
        RFC 9112 forbids and the parser accepts."""
        fields = dict(self._headers)
        if len(fields) < len(self._headers):
            names = [name for name, _ in self._headers]
            for name in (b"host", b"content-length", b"transfer-encoding"):
                if names.count(name) > 1:
                    raise _bad_http(f"{name.decode()} is sent {names.count(name)} times; send it once")
        host = fields.get(b"host")
        if host is None and version == "1.1":
            raise _bad_http("HTTP/1.1 needs a Host header; send the name of the server")
        if host and not HOST.fullmatch(host):
            raise _bad_http(f"Host is {host[:40].decode('latin-1')!r}; expected a name or address, and a port")
        length: int | None = int(fields.get(b"content-length", b"0"))
        coding = fields.get(b"transfer-encoding")
        if coding is not None:
            if coding.lower() != b"chunked" or version == "1.0" or b"content-length" in fields:
                raise _bad_http("Transfer-Encoding must be chunked, without Content-Length, and in HTTP/1.1")
            length = None
        return length, version == "1.1" and fields.get(b"expect", b"").lower() == b"100-continue"

    def _end_body(self) -> None:
        assert self._exchange is not None
        self._exchange.scope["arrived"] = True
        self._exchange.end()

    def _replied(self, exchange: Exchange) -> None:
        self._exchange = None
        self.waiting_since = time.monotonic()
        if not exchange.keep_alive:
            self._ended = True
            self.transport.close()
        elif not self.transport.is_closing():
            self._among.rest(self)
            self._parse()

    # Called by the listener

    @property
    def known(self) -> bool:
        return self._client.known

    @property
    def idle(self) -> bool:
        """Whether no request is being handled: it is between requests, or slow to begin one."""
        return self._exchange is None

    def leave(self) -> None:
        """Accept no more requests after the one in progress."""
        if self._exchange is None:
            self.transport.close()
        else:
            self._exchange.keep_alive = False

    def unwritten(self) -> int:
        """Bytes of replies that the client has not read yet."""
        return self.transport.get_write_buffer_size()

    def watch(self, now: float) -> None:
        """Called every second: close a connection that is slow with its headers or idle for too long, and one whose
        client reads nothing of its reply for `write_seconds`, or not all of it within `request_seconds`."""
        most = self._limits.header_seconds if self._in_head else KEEP_ALIVE_SECONDS
        if self.idle and now - self.waiting_since > most and not self.transport.is_closing():
            self.transport.close()
        size, (before, since, first) = self.unwritten(), self._stalled
        if size:  # including what the kernel buffers, which changes long before it accepts more from us
            size += _unacknowledged(self.transport.get_extra_info("socket"))
        since, first = now if size != before else since, first if before else now
        self._stalled = (size, since, first)
        if size and (now - since > self._limits.write_seconds or now - first > self._limits.request_seconds):
            self._drop()

    def _drop(self) -> None:
        """Close at once and discard what the kernel has buffered for the client."""
        self.transport.get_extra_info("socket").setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
        self.transport.abort()

    def _refuse(self, error: HttpError) -> None:
        """Reply to what is not a request or not the body of one, and accept no more."""
        self._ended = True
        exchange, self._exchange = self._exchange, None
        if exchange is not None:
            exchange.lose()
        if (exchange is None or not exchange.started) and not self.transport.is_closing():
            self.transport.write(_written(error))
        self.transport.close()


def _start_line(head: bytearray) -> tuple[str, bytes, str]:
    """Method, target and version. The parser accepts more: other versions and protocols, several spaces."""
    match = START_LINE.match(head)
    if match is None:
        raise _bad_http("this is not HTTP/1.1: expected a method, a path and HTTP/1.1, with one space between them")
    return match[1].decode(), bytes(match[2]), match[3].decode()


def _path_and_query(method: str, target: bytes) -> tuple[bytes, bytes]:
    if target[:1] == b"/" and method != "CONNECT":
        path, _, query = target.partition(b"?")
        return path, query
    if target == b"*" and method == "OPTIONS":
        return target, b""
    absolute = ABSOLUTE.fullmatch(target)
    if absolute is None or method == "CONNECT":
        raise _bad_http("the target of the request is not a path on this server, which is not a proxy")
    return absolute[1] or b"/", absolute[2] or b""


def _address(name: Any) -> tuple[str, int | None] | None:
    """Host and port, or the path of a unix socket."""
    if isinstance(name, tuple):
        return str(name[0]), int(name[1])
    return (name, None) if isinstance(name, str) else None


def _unacknowledged(sock: Any) -> int:
    count = array("i", [0])
    fcntl.ioctl(sock.fileno(), termios.TIOCOUTQ, count)
    return count[0]


def _bad_http(message: str) -> HttpError:
    return HttpError(400, "bad_http", message)


def _written(error: HttpError) -> bytes:
    """The reply to input that could not be parsed as a request."""
    request_id = secrets.token_hex(8)
    reply = error.reply(request_id)
    lines = [
        f"HTTP/1.1 {error.status} {HTTPStatus(error.status).phrase}".encode(), b"content-type: " + reply.content_type,
        f"content-length: {len(reply.body)}".encode(), f"x-request-id: {request_id}".encode(), date(),
        b"connection: close", *(name + b": " + value for name, value in reply.headers),
    ]  # fmt: skip
    return b"\r\n".join(lines) + b"\r\n\r\n" + reply.body
