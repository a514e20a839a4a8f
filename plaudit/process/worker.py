"""The main loop of a worker process: read the received frames, compute one step, send finished results.

A worker starts with one Start frame, sends Alive every second from a separate thread, so that a long step is not
mistaken for a stopped process, and exits when the other end of its socket closes. Subclasses implement `take` and
`step`.
"""

from __future__ import annotations

import os
import select
import signal
import socket
import sys
import threading
import time
import traceback
from abc import ABC, abstractmethod
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import Any, Generic, TypeVar

import msgspec

from plaudit.errors import PlauditError, one_line
from plaudit.process.framing import FrameReader, pack

ALIVE_EVERY = 1.0  # seconds
F = TypeVar("F")
S = TypeVar("S")


class Alive(msgspec.Struct, tag=True, array_like=True):
    """A heartbeat. If `steps` does not change while it has work, the worker hangs."""

    steps: int
    resident: int = 0  # bytes of memory
    device: int = 0  # bytes of its GPU's


class Failed(msgspec.Struct, tag=True, array_like=True):
    """The worker cannot load its model, or cannot continue; `message` is for the user."""

    message: str


class SocketWorker(ABC, Generic[F]):
    """`steps` counts the iterations of the loop."""

    def __init__(self, sock: socket.socket, reader: FrameReader[F]) -> None:
        self.sock = sock
        self.steps = 0
        self._reader = reader
        self._incoming = select.poll()  # unlike select(), which does not support descriptors from 1024 on
        self._incoming.register(sock, select.POLLIN)
        self._sending = threading.Lock()

    @property
    @abstractmethod
    def busy(self) -> bool:
        """Whether there is something to compute; otherwise the loop waits for a frame."""

    @abstractmethod
    def take(self, frame: F) -> None: ...

    @abstractmethod
    def step(self) -> None:
        """Compute one step of the received work, if any, and send finished results."""

    def device_bytes(self) -> int:
        """GPU memory in use."""
        return 0

    def send(self, frame: Any) -> None:
        with self._sending:
            self.sock.sendall(pack(frame))

    def run(self) -> None:
        threading.Thread(target=self._send_heartbeats, daemon=True).start()
        while self._receive(block=not self.busy):
            self.step()
            self.steps += 1

    def _send_heartbeats(self) -> None:
        while True:
            try:
                self.send(Alive(self.steps, _resident_bytes(), self.device_bytes()))
            except OSError:
                os._exit(0)  # the other end is closed, so nobody needs the results
            time.sleep(ALIVE_EVERY)

    def _receive(self, block: bool) -> bool:
        """Process the received frames; False when the other end has closed."""
        while self._incoming.poll(None if block else 0):
            data = self.sock.recv(1 << 20)
            if not data:
                return False
            for frame in self._reader.feed(data):
                self.take(frame)
            block = False
        return True


def _resident_bytes() -> int:
    with suppress(OSError):  # no descriptors, or not Linux
        return int(Path("/proc/self/statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE")
    return 0


def run_worker(
    fd: int, decoder: msgspec.msgpack.Decoder[F], start_type: type[S],
    load: Callable[[S, socket.socket, FrameReader[F]], SocketWorker[F]],
) -> None:  # fmt: skip
    """Runs a worker process on this socket until it exits. Errors are sent in a Failed frame before it exits."""
    # Ctrl-C in a terminal reaches the whole process group; the parent decides when workers exit.
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    sock = socket.socket(fileno=fd)
    reader = FrameReader(decoder)
    start = _first(sock, reader, start_type)
    with suppress(BrokenPipeError, ConnectionResetError):  # the other end has closed
        try:
            load(start, sock, reader).run()
        except (BrokenPipeError, ConnectionResetError):
            raise
        except (PlauditError, OSError, ValueError, RuntimeError, MemoryError) as error:
            ours = isinstance(error, PlauditError)
            if not ours:
                traceback.print_exc()
            sock.sendall(pack(Failed(" ".join(str(error).split()) if ours else one_line(error))))
            sys.exit(2)


def _first(sock: socket.socket, reader: FrameReader[F], start_type: type[S]) -> S:
    while data := sock.recv(1 << 20):
        for frame in reader.feed(data):
            assert isinstance(frame, start_type), f"the first frame must be Start, not {type(frame).__name__}"
            return frame
    sys.exit(0)
