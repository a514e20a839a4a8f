"""Runs a command that ends with its parent process: `python -m plaudit.place.engines.leash CORES COMMAND ...`.

The parent has the other end of this process's standard input. When that closes, for whatever reason (the parent was
killed, too), the command and all processes it started get SIGTERM, and SIGKILL if they do not exit.
"""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import threading
from collections.abc import Sequence
from contextlib import suppress

GRACE = 15.0  # seconds to exit after SIGTERM


def run(cores: Sequence[int], command: Sequence[str]) -> int:
    if cores and hasattr(os, "sched_setaffinity"):
        os.sched_setaffinity(0, cores)
    # A separate session: an interrupt at the terminal is for the parent, which then closes our standard input.
    process = subprocess.Popen(command, stdin=subprocess.DEVNULL, start_new_session=True)
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    signal.signal(signal.SIGTERM, lambda *_: _signal(process.pid, signal.SIGTERM))
    watch = threading.Thread(target=_watch, args=(process,), daemon=True)
    watch.start()
    code = process.wait()
    _signal(process.pid, signal.SIGKILL)  # processes that it started and left behind
    return code if code >= 0 else 128 - code


def _watch(process: subprocess.Popen[bytes]) -> None:
    while os.read(0, 4096):
        pass
    _signal(process.pid, signal.SIGTERM)
    try:
        process.wait(GRACE)
    except subprocess.TimeoutExpired:
        _signal(process.pid, signal.SIGKILL)


def _signal(group: int, number: signal.Signals) -> None:
    with suppress(ProcessLookupError):
        os.killpg(group, number)


if __name__ == "__main__":
    sys.exit(run([int(core) for core in sys.argv[1].split(",") if core], sys.argv[2:]))
