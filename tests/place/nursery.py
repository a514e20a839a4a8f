"""Rollout workers in a moment: one process imports everything once and forks itself for each worker.

A real worker in all else: its own process, which may be killed, stopped and started again.
"""

from __future__ import annotations

import contextlib
import os
import signal
import socket
import struct
import subprocess
import sys
import time

CODE = "from tests.place.nursery import serve; serve({})"


class Nursery:
    """Give `start` as the host of a run. `workers` are those that were started, in order."""

    def __init__(self) -> None:
        self._ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        with theirs:
            self._process = subprocess.Popen(
                [sys.executable, "-c", CODE.format(theirs.fileno())], pass_fds=[theirs.fileno()],
                # A look for GPUs that does not start the driver, which no fork survives.
                env={**os.environ, "OMP_NUM_THREADS": "1", "PYTORCH_NVML_BASED_CUDA_CHECK": "1"},
            )  # fmt: skip
        self.workers: list[Forked] = []

    def start(self) -> Forked:
        ours, theirs = socket.socketpair()
        with theirs:
            socket.send_fds(self._ours, [b"x"], [theirs.fileno()])
        self._ours.settimeout(120)
        (pid,) = struct.unpack("<i", self._ours.recv(4))
        self.workers.append(Forked(pid, ours))
        return self.workers[-1]

    def close(self) -> None:
        self._ours.close()
        self._process.wait(60)


class Forked:
    def __init__(self, pid: int, sock: socket.socket) -> None:
        self.pid = pid
        self.sock = sock

    def end(self) -> str:
        with contextlib.suppress(ProcessLookupError):
            os.kill(self.pid, signal.SIGKILL)
        deadline = time.monotonic() + 120
        while time.monotonic() < deadline:
            try:
                os.kill(self.pid, 0)
            except ProcessLookupError:
                return "has ended"
            time.sleep(0.002)
        raise AssertionError(f"worker {self.pid} cannot be ended")


def serve(fd: int) -> None:
    from plaudit.place.workers.worker import main

    signal.signal(signal.SIGCHLD, signal.SIG_IGN)  # the kernel reaps
    door = socket.socket(fileno=fd)
    while True:
        data, fds, _, _ = socket.recv_fds(door, 1, 1)
        if not data:
            return
        pid = os.fork()
        if pid == 0:
            door.close()
            signal.signal(signal.SIGCHLD, signal.SIG_DFL)
            main(fds[0])
            os._exit(0)
        os.close(fds[0])
        door.send(struct.pack("<i", pid))
