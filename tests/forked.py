"""`plaudit` in a process of its own, forked from one that has imported everything: for tests that need a real process.

What depends on how Python itself starts (another environment for its libraries, -m, sitecustomize) needs a new one.
"""

from __future__ import annotations

import json
import os
import signal
import socket
import sys
from collections.abc import Mapping, Sequence
from contextlib import suppress
from pathlib import Path

from plaudit.cli import main as command
from plaudit.process.spawn import spawn


class ForkedCommand:
    """As `subprocess.Popen`. Its output, of both streams, goes to a file; it has a process group of its own."""

    def __init__(
        self, arguments: Sequence[str], output: Path, environment: Mapping[str, str] | None = None
    ) -> None:  # fmt: skip
        self.child, sock = spawn("tests.forked", environment)
        self.pid = self.child.pid
        with sock:
            sock.sendall(json.dumps([str(output), *arguments]).encode() + b"\n")
            assert sock.recv(1) == b"!", "the forked command did not start"

    @property
    def returncode(self) -> int | None:
        return self.child.poll()

    def poll(self) -> int | None:
        return self.child.poll()

    def wait(self, timeout: float | None = None) -> int:
        return self.child.wait(timeout)

    def kill(self) -> None:
        self.child.kill()

    def terminate(self) -> None:
        self.send_signal(signal.SIGTERM)

    def send_signal(self, number: int) -> None:
        if self.poll() is None:
            with suppress(ProcessLookupError):
                os.kill(self.pid, number)


def main(fd: int) -> None:
    """In the fork."""
    os.setpgid(0, 0)
    with socket.socket(fileno=fd) as sock, sock.makefile() as lines:
        output, *arguments = json.loads(lines.readline())
        file = os.open(output, os.O_WRONLY | os.O_CREAT | os.O_APPEND)
        os.dup2(file, 1)
        os.dup2(file, 2)
        os.close(file)
        signal.signal(signal.SIGINT, signal.default_int_handler)  # the nursery ignores it
        sys.argv = ["plaudit", *arguments]
        sock.sendall(b"!")
    command()
