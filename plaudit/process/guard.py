"""Kills processes that were stopped (SIGSTOP): others would wait for them until their own timeouts.

The kernel distinguishes a stopped process from a busy one (state T in /proc), however long it computes or holds the
GIL, so no heartbeat is needed. A process stopped by a debugger has another state and is ignored. A killed process is
then handled like any other that was killed.

`plaudit train` checks the ranks it starts. Processes started by others, such as ranks of torchrun or actors of Ray,
have a guard process on their machine: `python -m plaudit.process.guard PID NAME`. Without /proc nothing is killed.
"""

from __future__ import annotations

import os
import select
import signal
import sys
import time
from collections.abc import Iterable
from contextlib import suppress
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    import subprocess

LOOK_SECONDS = 1.0
STOPPED_SECONDS = 10.0
STOPPED = f"was stopped (SIGSTOP) for {STOPPED_SECONDS:g} s and was ended"

_guards: list[subprocess.Popen[bytes]] = []  # kept alive as long as this process


class Guard:
    """Call it often; it checks once a second. It counts checks, so a suspended machine does not look like a stopped
    process."""

    def __init__(self) -> None:
        self._seen: dict[int, int] = {}
        self._next = 0.0

    def end_stopped(self, pids: Iterable[int]) -> list[int]:
        """Kills those that were stopped for too long, and returns them."""
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
    """The child processes of this process that are still running."""
    pids: list[int] = []
    for task in Path("/proc/self/task").glob("*/children"):
        with suppress(OSError):  # a thread that has exited since
            pids += map(int, task.read_text().split())
    return pids


def guard_this_process(name: str) -> None:
    """Start a guard process for this process; it exits when this process does, for whatever reason."""
    import subprocess  # not above: a rule's process forks for every response, and each module that is loaded costs time

    command = [sys.executable, "-m", "plaudit.process.guard", str(os.getpid()), name]
    _guards.append(subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.DEVNULL, start_new_session=True))


def main(pid: int, name: str) -> None:
    guard = Guard()
    while not select.select([0], [], [], LOOK_SECONDS)[0]:  # standard input closes when the process exits
        if guard.end_stopped([pid]):
            print(f"plaudit: {name} (pid {pid}) {STOPPED}", file=sys.stderr)
            return


if __name__ == "__main__":
    main(int(sys.argv[1]), sys.argv[2])
