"""A wire over a socket: length-prefixed MessagePack both ways, no pickle."""

from __future__ import annotations

import select
import socket
import subprocess
import time
from collections import deque
from collections.abc import Callable
from typing import Any

import msgspec

from plaudit.errors import ReceiverLost
from plaudit.process.framing import FrameReader, pack

SEND_SECONDS = 30.0  # a message fits into the socket's buffer, unless its reader is stopped
_DECODER = msgspec.msgpack.Decoder(dict[str, Any])


class SocketWire:
    """The trainer's end. `process`, if this side started it, is used in errors to report its exit."""

    ranks = 1

    def __init__(self, name: str, connection: socket.socket, process: subprocess.Popen[bytes] | None = None) -> None:
        self.name = name
        self.connection = connection
        self.process = process
        self._reader = FrameReader(_DECODER)
        self._replies: deque[dict[str, Any]] = deque()
        connection.settimeout(SEND_SECONDS)

    def send(self, message: dict[str, Any]) -> None:
        try:
            self.connection.sendall(pack(message))
        except TimeoutError as error:
            raise ReceiverLost(self.name, f"read no message for {SEND_SECONDS:g} s: it is stopped") from error
        except OSError as error:
            raise ReceiverLost(self.name, self._end()) from error

    def answer(self, seconds: float) -> dict[str, Any]:
        until = time.monotonic() + seconds
        while not self._replies:
            ready, _, _ = select.select([self.connection], [], [], max(0.0, until - time.monotonic()))
            if not ready:
                raise ReceiverLost(self.name, f"did not answer within {seconds:.3g} s: it is stopped or overloaded")
            self._fill()
        return self._replies.popleft()

    def _fill(self) -> None:
        try:
            data = self.connection.recv(1 << 16)
        except OSError:
            data = b""
        if not data:
            raise ReceiverLost(self.name, self._end())
        self._replies += self._reader.feed(data)

    def _end(self) -> str:
        if self.process is None:
            return "has closed its connection"
        try:
            return f"has ended (exit code {self.process.wait(1.0)})"
        except subprocess.TimeoutExpired:
            return "has closed its connection"


def serve_wire(connection: socket.socket, respond: Callable[[dict[str, Any]], dict[str, Any]]) -> None:
    """The receiver's end: answer every message until the other side closes."""
    reader = FrameReader(_DECODER)
    while data := connection.recv(1 << 16):
        for message in reader.feed(data):
            connection.sendall(pack(respond(message)))
