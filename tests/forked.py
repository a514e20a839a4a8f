"""`plaudit`, or a module, in a process of its own that is forked from one which has imported everything already.

What depends on how Python itself starts (another environment for its libraries, sitecustomize) needs a new process.
"""

from __future__ import annotations

import json
import os
import runpy
import signal
import socket
import sys
from collections.abc import Mapping, Sequence
from contextlib import suppress
from pathlib import Path

from plaudit.cli import main as command
from plaudit.process.spawn import spawn

RUN_SECONDS = 600.0


class ForkedCommand:
    """As `subprocess.Popen`: `plaudit ARGUMENTS`, or `-m MODULE ARGUMENTS`. All its output goes to a file;
    it has a process group of its own."""

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
        sock.sendall(b"!")
    if arguments[0] == "-m":
        sys.argv = arguments[1:]
        runpy.run_module(arguments[1], run_name="__main__")
    else:
        sys.argv = ["plaudit", *arguments]
        command()


def run_all(commands: Sequence[Sequence[str]], outputs: Path, environments: Sequence[Mapping[str, str]]) -> None:
    """Such commands side by side, the ranks of something: all must end well."""
    files = [outputs / f"output-{n}" for n in range(len(commands))]
    children = [ForkedCommand(*each) for each in zip(commands, files, environments, strict=True)]
    try:
        for child, file in zip(children, files, strict=True):
            assert child.wait(RUN_SECONDS) == 0, file.read_text()
    finally:
        for child in children:
            child.kill()
            child.wait()
