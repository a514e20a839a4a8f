"""Starts a command once for every rank, and ends all of them when one fails. Needs no torch."""

from __future__ import annotations

import os
import signal
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from types import FrameType
from typing import IO

from plaudit.errors import RankLost
from plaudit.process.guard import STOPPED, Guard, guard_this_process

PARENT = "PLAUDIT_PARENT"
LOST = RankLost.exit_code
GRACE = 5.0  # seconds between asking the others to end and ending them
PATIENCE = 3.0  # seconds in which the cause of a loss shows, if it is another rank's end
SHOWN = 4000  # bytes of a failed rank's last words that are read


def is_rank() -> bool:
    """Whether this process is one of several already: started by `launch`, or by torchrun."""
    return "RANK" in os.environ


def guard_rank() -> None:
    """This process is a rank: if another than `launch` has started it, it needs a guard of its own."""
    if PARENT not in os.environ:
        guard_this_process(f"rank {os.environ['RANK']}")


@dataclass
class Child:
    rank: int
    process: subprocess.Popen[bytes]
    words: IO[bytes] | None
    """What it wrote to stderr; None for rank 0, whose stderr is the command's own."""
    stopped: bool = False

    def end(self) -> str:
        """How it ended, and its last line of output."""
        if self.stopped:
            return STOPPED
        code = self.process.returncode
        if code < 0:
            return f"was ended by {signal.Signals(-code).name}"
        if self.words is None:
            return f"ended with code {code}"
        self.words.seek(max(0, self.words.seek(0, os.SEEK_END) - SHOWN))
        lines = self.words.read().decode(errors="replace").strip().splitlines()
        return f"ended with code {code}: {lines[-1].removeprefix('plaudit: ') if lines else 'no output'}"


def launch(ranks: int, arguments: Sequence[str]) -> int:
    """Run `plaudit` with these arguments on every rank; the exit code of the whole."""
    children: list[Child] = []
    with _forwarded(children):
        try:
            port = _free_port()
            for rank in range(ranks):
                children.append(_start(rank, ranks, port, arguments))
            return _wait(children)
        finally:
            _end(children)


def _start(rank: int, ranks: int, port: int, arguments: Sequence[str]) -> Child:
    environment = {
        **os.environ, "RANK": str(rank), "LOCAL_RANK": str(rank), "WORLD_SIZE": str(ranks), "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": str(port), PARENT: str(os.getpid()),
    }  # fmt: skip
    # Each rank would take every core for itself.
    environment.setdefault("OMP_NUM_THREADS", str(max(1, (os.cpu_count() or 1) // ranks)))
    words = None if rank == 0 else tempfile.TemporaryFile()  # noqa: SIM115 (the child's for as long as it lives)
    # A session of its own: Ctrl-C reaches the ranks once, through this process, and not a second time from the
    # terminal, which would end them before they have saved.
    process = subprocess.Popen(
        [sys.executable, "-m", "plaudit", *arguments], env=environment, start_new_session=True,
        stdin=subprocess.DEVNULL, stdout=None if rank == 0 else subprocess.DEVNULL, stderr=words,
    )  # fmt: skip
    return Child(rank, process, words)


def _wait(children: Sequence[Child]) -> int:
    guard = Guard()
    while True:
        codes = [child.process.poll() for child in children]
        if all(code == 0 for code in codes):
            return 0
        if any(codes):
            break
        ended = guard.end_stopped(child.process.pid for child in children if child.process.returncode is None)
        for child in children:
            child.stopped |= child.process.pid in ended
        time.sleep(0.05)
    # A rank that lost another may be seen first: the other one is the cause, and is dead or about to be.
    deadline = time.monotonic() + PATIENCE
    while time.monotonic() < deadline and all(child.process.poll() in (None, LOST, 0) for child in children):
        time.sleep(0.05)
    failed = [child for child in children if child.process.poll()]
    causes = sorted(failed, key=lambda child: (child.process.returncode == LOST, child.process.returncode > 0))
    cause = causes[0]
    code = cause.process.returncode
    silent = [child.rank for child in children if child.process.poll() is None]
    if code == LOST and silent:
        named = ", ".join(map(str, silent))
        print(f"plaudit: rank {named} did not respond; --resume continues from the last checkpoint", file=sys.stderr)
    elif cause.rank != 0 or code < 0:
        end = cause.end()
        cure = "" if "--resume" in end else "; --resume continues from the last checkpoint"
        print(f"plaudit: rank {cause.rank} {end}{cure}", file=sys.stderr)
    return int(code) if code > 0 else 1


def _end(children: Sequence[Child]) -> None:
    alive = [child for child in children if child.process.poll() is None]
    for child in alive:
        child.process.terminate()
    deadline = time.monotonic() + GRACE
    for child in alive:
        try:
            child.process.wait(max(0.0, deadline - time.monotonic()))
        except subprocess.TimeoutExpired:
            child.process.kill()
            child.process.wait()
    for child in children:
        if child.words is not None:
            child.words.close()


@contextmanager
def _forwarded(children: list[Child]) -> Iterator[None]:
    """SIGTERM and SIGINT go to the ranks, which save and end; then this process has nothing left to wait for."""

    def forward(number: int, _: FrameType | None) -> None:
        for child in children:
            if child.process.poll() is None:
                child.process.send_signal(number)

    before = {number: signal.signal(number, forward) for number in (signal.SIGTERM, signal.SIGINT)}
    try:
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


def _free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port: int = probe.getsockname()[1]
        return port
