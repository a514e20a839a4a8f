"""A wire over a socket: length-prefixed MessagePack both ways, no pickle."""

from __future__ import annotations

import select
import socket
import struct
import subprocess
import time
from collections.abc import Callable
from typing import Any

import msgspec

from plaudit.errors import ReceiverLost

SEND_SECONDS = 30.0  # a message fits into the socket's buffer, unless its reader has stopped
LIMIT = 1 << 28  # bytes in a message: layouts and handles, never weights
_LENGTH = struct.Struct("<I")


class SocketWire:
    """The trainer's end. `process`, if we started it, tells in errors how it ended."""

    def __init__(self, name: str, connection: socket.socket, process: subprocess.Popen[bytes] | None = None) -> None:
        self.name = name
        self.connection = connection
        self.process = process
        self._buffer = bytearray()
        connection.settimeout(SEND_SECONDS)

    def tell(self, message: dict[str, Any]) -> None:
        try:
            self.connection.sendall(_packed(message))
        except TimeoutError as error:
            raise ReceiverLost(self.name, f"took no message for {SEND_SECONDS:g} s: it is stopped") from error
        except OSError as error:
            raise ReceiverLost(self.name, self._end()) from error

    def answer(self, seconds: float) -> dict[str, Any]:
        until = time.monotonic() + seconds
        while (message := _unpacked(self._buffer)) is None:
            ready, _, _ = select.select([self.connection], [], [], max(0.0, until - time.monotonic()))
            if not ready:
                raise ReceiverLost(self.name, f"did not answer within {seconds:.3g} s: it is stopped or overloaded")
            self._fill()
        return message

    def _fill(self) -> None:
        try:
            data = self.connection.recv(1 << 16)
        except OSError:
            data = b""
        if not data:
            raise ReceiverLost(self.name, self._end())
        self._buffer += data

    def _end(self) -> str:
        if self.process is None:
            return "has closed its connection"
        try:
            return f"has ended (exit code {self.process.wait(1.0)})"
        except subprocess.TimeoutExpired:
            return "has closed its connection"


def serve_wire(connection: socket.socket, respond: Callable[[dict[str, Any]], dict[str, Any]]) -> None:
    """The receiver's end: answer every message until the other side closes."""
    buffer = bytearray()
    while data := connection.recv(1 << 16):
        buffer += data
        while (message := _unpacked(buffer)) is not None:
            connection.sendall(_packed(respond(message)))


def _packed(message: dict[str, Any]) -> bytes:
    body = msgspec.msgpack.encode(message)
    if len(body) > LIMIT:
        raise ValueError(f"a message of {len(body)} bytes is more than the {LIMIT} that a wire takes")
    return _LENGTH.pack(len(body)) + body


def _unpacked(buffer: bytearray) -> dict[str, Any] | None:
    """The first whole message, taken out of the buffer."""
    if len(buffer) < _LENGTH.size:
        return None
    (length,) = _LENGTH.unpack_from(buffer)
    if length > LIMIT:
        raise ValueError(f"a message of {length} bytes is more than the {LIMIT} that are taken")
    end = _LENGTH.size + length
    if len(buffer) < end:
        return None
    message: dict[str, Any] = msgspec.msgpack.decode(bytes(buffer[_LENGTH.size : end]))
    del buffer[:end]
    return message
