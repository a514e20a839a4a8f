"""Processes that parse large bodies outside the server process.

Decoding 60 MiB of JSON in one call holds the GIL for up to three seconds, whichever thread it runs in. It is therefore
done in another process, and the result is assembled in small pieces (`tree.py`).

    python -m plaudit.serve.http.reader FD     for each request: imports the module, calls the function, sends the tree
"""

from __future__ import annotations

import asyncio
import importlib
import os
import signal
import socket
import sys
import time
from collections import deque
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from functools import partial
from typing import Any, TypeVar, get_type_hints

import msgspec

from plaudit.process.framing import LENGTH, FrameReader, pack
from plaudit.process.spawn import Child, spawn
from plaudit.serve.http.message import HttpError
from plaudit.serve.http.tree import Assembler, TreeError, TreeSplitter

READERS = 2
NICE = 10  # the server process has priority where cores are scarce
SILENT_SECONDS = 120.0  # timeout for reading a body; two orders of magnitude above the normal duration
T = TypeVar("T")


class ReadRequest(msgspec.Struct, array_like=True):
    """A function of a module, its arguments after the body, limits for the result, and the size of the body that
    follows."""

    module: str
    function: str
    arguments: list[Any]
    most: int
    size: int


class Piece(msgspec.Struct, tag=True, array_like=True):
    operation: int
    value: Any


class Whole(msgspec.Struct, tag=True, array_like=True):
    pass


class ReadRefused(msgspec.Struct, tag=True, array_like=True):
    status: int
    kind: str
    message: str


_ANSWER: msgspec.msgpack.Decoder[Piece | Whole | ReadRefused] = msgspec.msgpack.Decoder(Piece | Whole | ReadRefused)


class BodyReaders:
    """Runs `read(...)` in another process. Each key uses at most one process at a time, so its large bodies do not
    delay others."""

    def __init__(self, count: int = READERS) -> None:
        self._threads = ThreadPoolExecutor(count, thread_name_prefix="reader")
        self._idle = [_Reader() for _ in range(count)]
        self._all = tuple(self._idle)
        self._busy: set[str] = set()
        self._waiting: dict[str, deque[asyncio.Future[_Reader]]] = {}

    async def run(
        self, read: Callable[..., T], body: bytes, arguments: Sequence[Any], most: int, tenant: str, deadline: float
    ) -> T:
        """Returns `read(body, *arguments)`: a record of the named type, or the fields of an object."""
        loop = asyncio.get_running_loop()
        kind = get_type_hints(read)["return"]
        turn: asyncio.Future[_Reader] = loop.create_future()
        self._waiting.setdefault(tenant, deque()).append(turn)
        self._give_turns()
        try:
            async with asyncio.timeout(deadline - time.monotonic()):
                reader = await turn
                request = ReadRequest(read.__module__, read.__qualname__, list(arguments), most, len(body))
                work = loop.run_in_executor(self._threads, reader.exchange, request, body, kind)
                turn = loop.create_future()  # done when a reader is assigned
                work.add_done_callback(partial(self._done, tenant, reader))
                result: T = await asyncio.shield(work)
                return result
        except TimeoutError:
            raise HttpError(504, "deadline", "the deadline expired before the body was read") from None
        finally:
            if turn.done() and not turn.cancelled():  # a reader was assigned, but the waiter has been cancelled
                self._free(tenant, turn.result())
            turn.cancel()

    def close(self) -> None:
        for reader in self._all:
            reader.end()
        self._threads.shutdown(wait=False, cancel_futures=True)

    def _done(self, tenant: str, reader: _Reader, work: asyncio.Future[Any]) -> None:
        if not work.cancelled():
            work.exception()  # retrieved, also if nobody awaits it
        self._free(tenant, reader)

    def _free(self, tenant: str, reader: _Reader) -> None:
        self._busy.discard(tenant)
        self._idle.append(reader)
        self._give_turns()

    def _give_turns(self) -> None:
        """Assigns free readers to keys in the order of their last use."""
        for tenant, turns in tuple(self._waiting.items()):
            while turns and turns[0].cancelled():
                turns.popleft()
            if turns and self._idle and tenant not in self._busy:
                self._busy.add(tenant)
                turns.popleft().set_result(self._idle.pop())
                self._waiting[tenant] = self._waiting.pop(tenant)
            if not turns:
                del self._waiting[tenant]


class _Reader:
    """One process, started on first use and restarted when it has exited."""

    def __init__(self) -> None:
        self._child: Child | None = None
        self._sock: socket.socket | None = None

    def exchange(self, request: ReadRequest, body: bytes, kind: Any) -> Any:
        """Sends one request and reads its reply. Called in a thread."""
        try:
            if self._sock is None:
                self._child, self._sock = spawn(__name__)
                self._sock.settimeout(SILENT_SECONDS)
            self._sock.sendall(pack(request))
            self._sock.sendall(body)
            tree = self._assembled(self._sock)
        except HttpError:
            raise  # a complete reply: nothing of it is left in the socket
        except OSError:
            self.end()
            raise HttpError(
                503, "read_failed", "the process that parses large bodies has exited; send the request again in "
                "smaller parts",
                retry_after=1,
            ) from None  # fmt: skip
        except BaseException:
            self.end()
            raise
        return tree if kind == dict[str, Any] else msgspec.convert(tree, kind)

    @staticmethod
    def _assembled(sock: socket.socket) -> Any:
        frames, assembler = FrameReader(_ANSWER), Assembler()
        while data := sock.recv(1 << 16):
            for frame in frames.feed(data):
                if isinstance(frame, Piece):
                    assembler.add(frame.operation, frame.value)
                elif isinstance(frame, ReadRefused):
                    raise HttpError(frame.status, frame.kind, frame.message)
                else:
                    return assembler.value
        raise ConnectionResetError

    def end(self) -> None:
        if self._sock is not None:
            self._sock.close()
        if self._child is not None:
            self._child.kill()
            self._child.wait()
        self._child = self._sock = None


def main(fd: int) -> None:
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    os.nice(NICE)
    sock = socket.socket(fileno=fd)
    stream = sock.makefile("rb")
    with suppress(BrokenPipeError, ConnectionResetError):  # the server has exited
        while head := stream.read(LENGTH.size):
            request = msgspec.msgpack.decode(stream.read(*LENGTH.unpack(head)), type=ReadRequest)
            sock.sendall(_answer(request, stream.read(request.size)))


def _answer(request: ReadRequest, body: bytes) -> bytes:
    try:
        read = getattr(importlib.import_module(request.module), request.function)
        names, hints = read.__code__.co_varnames[1:], get_type_hints(read)
        arguments = [msgspec.convert(each, hints[name]) for name, each in zip(names, request.arguments, strict=False)]
        pieces = [pack(Piece(*frame)) for frame in TreeSplitter(request.most).cut(read(body, *arguments))]
    except HttpError as error:
        return pack(ReadRefused(error.status, error.type, str(error)))
    except TreeError as error:
        return pack(ReadRefused(413, "too_large", str(error)))
    except OverflowError:
        return pack(ReadRefused(422, "invalid_request", "the body has an integer of more than 64 bits"))
    return b"".join([*pieces, pack(Whole())])


if __name__ == "__main__":
    main(int(sys.argv[1]))
