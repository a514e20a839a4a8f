"""A connection back from a process that another host or user started, perhaps on another machine.

It is started with an address and a token, both valid for one connection, or for those of several machines. A caller
without the token is disconnected; the comparison takes the same time for every wrong one.
"""

from __future__ import annotations

import hmac
import secrets
import socket
import time
from collections.abc import Iterator
from contextlib import suppress

from plaudit.errors import ReceiverLost

TOKEN_BYTES = 32
CALLER_SECONDS = 5.0  # for a caller to send its token: other callers wait behind it
KEEPALIVE = {"TCP_KEEPIDLE": 10, "TCP_KEEPINTVL": 5, "TCP_KEEPCNT": 3}  # a machine that vanished is noticed within 25 s


class CallbackListener:
    """Listens on `host`, an address of this machine ("": all of them), at a free port."""

    def __init__(self, host: str) -> None:
        self._listening = socket.create_server((host, 0))
        self.address: tuple[str, int] = self._listening.getsockname()[:2]
        self.token = secrets.token_bytes(TOKEN_BYTES)

    def admit(self, name: str, seconds: float) -> socket.socket:
        """The first connection with the right token; then the listener is closed."""
        until = time.monotonic() + seconds
        with self._listening:
            while (left := until - time.monotonic()) > 0:
                self._listening.settimeout(left)
                try:
                    sock = self._caller()
                except TimeoutError:
                    break
                if sock is not None:
                    return sock
        raise ReceiverLost(name, f"did not connect to {self.address[0]}:{self.address[1]} within {seconds:g} s")

    def callers(self) -> Iterator[socket.socket]:
        """All connections with the right token, until the listener is closed."""
        while True:
            try:
                sock = self._caller()
            except OSError:
                return
            if sock is not None:
                yield sock

    def close(self) -> None:
        with suppress(OSError):  # nothing waits on it any more
            self._listening.shutdown(socket.SHUT_RDWR)
        self._listening.close()

    def _caller(self) -> socket.socket | None:
        """The next caller, or None if its token is wrong."""
        sock, _ = self._listening.accept()
        if hmac.compare_digest(_read_token(sock), self.token):
            return _with_keepalive(sock)
        sock.close()
        return None


def dial(address: tuple[str, int], token: bytes, seconds: float = 30.0) -> socket.socket:
    """The other end of a CallbackListener."""
    sock = _with_keepalive(socket.create_connection(address, seconds))
    sock.sendall(token)
    return sock


def _read_token(sock: socket.socket) -> bytes:
    """The token that the caller sends first."""
    sock.settimeout(CALLER_SECONDS)
    shown = b""
    try:
        while len(shown) < TOKEN_BYTES and (data := sock.recv(TOKEN_BYTES - len(shown))):
            shown += data
    except OSError:
        return b""
    return shown


def _with_keepalive(sock: socket.socket) -> socket.socket:
    sock.settimeout(None)
    sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    sock.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
    for option, value in KEEPALIVE.items():
        if hasattr(socket, option):  # Linux
            sock.setsockopt(socket.IPPROTO_TCP, getattr(socket, option), value)
    return sock
