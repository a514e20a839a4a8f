"""Runs `plaudit`, a module or code in a separate process, forked from one that has already imported everything.

Tests of Python's own start-up (another environment for its libraries), or of what is imported, need a new process.
"""

from __future__ import annotations

import json
import os
import runpy
import signal
import socket
import sys
import tempfile
from collections.abc import Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from subprocess import CompletedProcess

# Modules that commands import when they run: imported once here instead of in every fork.
import plaudit.critic.server
import plaudit.place.build
import plaudit.report.live
import plaudit.rl.follower
import plaudit.rl.loop
import plaudit.search.service.routes
import plaudit.serve.server
import plaudit.train.supervised.supervised  # noqa: F401
from plaudit.cli import main as command
from plaudit.process.spawn import spawn
from tests.serve import injected

RUN_SECONDS = 600.0


class ForkedCommand:
    """Like `subprocess.Popen`: `plaudit ARGUMENTS`, `-m MODULE ARGUMENTS` or `-c CODE ARGUMENTS`. All its output goes
    to one file, or errors to a second one; it has its own process group."""

    def __init__(
        self, arguments: Sequence[str], output: Path, environment: Mapping[str, str] | None = None,
        errors: Path | None = None, cwd: Path | None = None,
    ) -> None:  # fmt: skip
        self.child, sock = spawn("tests.forked", environment)
        self.pid = self.child.pid
        with sock:
            paths = (output, errors or output, cwd or Path.cwd())
            sock.sendall(json.dumps([*map(str, paths), *arguments]).encode() + b"\n")
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
    """Runs in the fork."""
    os.setpgid(0, 0)
    with socket.socket(fileno=fd) as sock, sock.makefile() as lines:
        output, errors, cwd, *arguments = json.loads(lines.readline())
        for stream, path in ((1, output), (2, "/dev/full" if os.environ.get("PLAUDIT_FULL_DISK") else errors)):
            file = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_APPEND)
            os.dup2(file, stream)
            os.close(file)
        os.chdir(cwd)
        signal.signal(signal.SIGINT, signal.default_int_handler)  # the nursery process ignores SIGINT
        sock.sendall(b"!")
    if arguments[0] == "-m":
        sys.argv = arguments[1:]
        runpy.run_module(arguments[1], run_name="__main__")
    elif arguments[0] == "-c":
        sys.argv = ["-c", *arguments[2:]]
        exec(compile(arguments[1], "<string>", "exec"), {"__name__": "__main__"})
    else:
        sys.argv = ["plaudit", *arguments]
        command()


def run_forked(
    *arguments: str, environment: Mapping[str, str] | None = None, cwd: Path | None = None
) -> CompletedProcess[str]:  # fmt: skip
    """Runs a command to completion, like `subprocess.run`."""
    with tempfile.TemporaryDirectory() as directory:
        output, errors = Path(directory, "output"), Path(directory, "errors")
        child = ForkedCommand(arguments, output, environment, errors, cwd)
        try:
            code = child.wait(RUN_SECONDS)
        finally:
            child.kill()
        return CompletedProcess(arguments, code, output.read_text(), errors.read_text())


def run_all(commands: Sequence[Sequence[str]], outputs: Path, environments: Sequence[Mapping[str, str]]) -> None:
    """Runs commands in parallel, for example the ranks of a job; all must succeed."""
    files = [outputs / f"output-{n}" for n in range(len(commands))]
    children = [ForkedCommand(*each) for each in zip(commands, files, environments, strict=True)]
    try:
        for child, file in zip(children, files, strict=True):
            assert child.wait(RUN_SECONDS) == 0, file.read_text()
    finally:
        for child in children:
            child.kill()
            child.wait()


if "plaudit.process.nursery" in sys.orig_argv:  # the process that forks all commands and their workers
    injected.install()

if __name__ == "__main__":  # runs where nothing is forked: on a machine with GPUs, and on systems other than Linux
    injected.install()
    main(int(sys.argv[1]))
