"""Ends a process that was stopped (SIGSTOP): whoever works with it would wait for it until their own time is over.

A stopped process is told from a busy one by the kernel (state T in /proc), however long it computes or holds the GIL:
no heartbeat is needed. One that a debugger holds has another state and is left alone. After its end it is a process
that was killed, and what happens then happens here too.

`plaudit train` looks after the ranks it starts. What others start, a rank of torchrun or an actor of Ray, has a guard
of its own on its machine: `python -m plaudit.process.guard PID NAME`. Where there is no /proc nothing is ended.
"""

from __future__ import annotations

import os
import select
import signal
import subprocess
import sys
import time
from collections.abc import Iterable
from contextlib import suppress
from pathlib import Path

LOOK_SECONDS = 1.0
STOPPED_SECONDS = 10.0
STOPPED = f"was stopped (SIGSTOP) for {STOPPED_SECONDS:g} s and was ended"

_guards: list[subprocess.Popen[bytes]] = []  # they live as long as this process


class Guard:
    """Asked often, it looks once a second. It counts looks: a machine that slept is no process that stood."""

    def __init__(self) -> None:
        self._seen: dict[int, int] = {}
        self._next = 0.0

    def end_stopped(self, pids: Iterable[int]) -> list[int]:
        """Those of them that were stopped for too long, and are killed now."""
        now = time.monotonic()
        if now < self._next:
            return []
        self._next = now + LOOK_SECONDS
        self._seen = {pid: self._seen.get(pid, 0) + 1 for pid in pids if is_stopped(pid)}
        ended = [pid for pid, looks in self._seen.items() if looks > STOPPED_SECONDS / LOOK_SECONDS]
        for pid in ended:
            with suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
        return ended


def is_stopped(pid: int) -> bool:
    try:
        stat = Path(f"/proc/{pid}/stat").read_text()
    except OSError:
        return False
    return stat.rpartition(")")[2].split()[0] == "T"


def children() -> list[int]:
    """The processes that this one has started and that are still there."""
    pids: list[int] = []
    for task in Path("/proc/self/task").glob("*/children"):
        with suppress(OSError):  # a thread that has ended since
            pids += map(int, task.read_text().split())
    return pids


def guard_this_process(name: str) -> None:
    """Start a guard beside this process; it ends when this one does, however that comes."""
    command = [sys.executable, "-m", "plaudit.process.guard", str(os.getpid()), name]
    _guards.append(subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.DEVNULL, start_new_session=True))


def main(pid: int, name: str) -> None:
    guard = Guard()
    while not select.select([0], [], [], LOOK_SECONDS)[0]:  # standard input closes with the process
        if guard.end_stopped([pid]):
            print(f"plaudit: {name} (pid {pid}) {STOPPED}", file=sys.stderr)
            return


if __name__ == "__main__":
    main(int(sys.argv[1]), sys.argv[2])
