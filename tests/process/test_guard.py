"""A stopped process is killed, a busy one is not: real processes, real signals."""

import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator

import psutil
import pytest

from plaudit.process import guard
from plaudit.process.guard import Guard, children, is_stopped

LIMIT = 20.0
# Holds the GIL until it is killed, as a library may for minutes.
BUSY = "print(flush=True); import re; re.match(r'(a+)+$', 'a' * 64 + 'b')"
ASLEEP = "print(flush=True); import time; time.sleep(600)"
GUARDED = (
    "from plaudit.process import guard; guard.guard_this_process('rank 7'); print(guard._guards[0].pid, flush=True);"
)


@pytest.fixture
def start() -> Iterator[Callable[[str], "subprocess.Popen[str]"]]:
    started = []

    def begin(code: str) -> "subprocess.Popen[str]":
        started.append(
            subprocess.Popen([sys.executable, "-c", code], stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
        )
        return started[-1]

    yield begin
    for process in started:
        process.kill()
        process.communicate()


def until(condition: Callable[[], bool]) -> None:
    deadline = time.monotonic() + LIMIT
    while not condition():
        assert time.monotonic() < deadline
        time.sleep(0.01)


def test_a_stopped_process_is_killed_and_a_busy_one_is_not(
    start: Callable[[str], "subprocess.Popen[str]"], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(guard, "LOOK_SECONDS", 0.02)
    monkeypatch.setattr(guard, "STOPPED_SECONDS", 0.2)
    busy, stopped, continued = start(BUSY), start(ASLEEP), start(ASLEEP)
    for process in (busy, stopped, continued):
        assert process.stdout is not None
        process.stdout.readline()
    pids = [busy.pid, stopped.pid, continued.pid]
    assert set(pids) <= set(children())
    for process in (stopped, continued):
        process.send_signal(signal.SIGSTOP)
    until(lambda: is_stopped(stopped.pid) and is_stopped(continued.pid))
    watcher = Guard()
    assert watcher.end_stopped(pids) == []
    continued.send_signal(signal.SIGCONT)
    until(lambda: not is_stopped(continued.pid))
    killed: list[int] = []
    until(lambda: bool(killed.extend(watcher.end_stopped(pids)) or killed))
    assert killed == [stopped.pid]
    assert stopped.wait(LIMIT) == -signal.SIGKILL
    assert busy.poll() is None
    assert continued.poll() is None


def test_a_guard_exits_with_its_process(start: Callable[[str], "subprocess.Popen[str]"]) -> None:
    process = start(f"{GUARDED} {ASLEEP}")
    assert process.stdout is not None
    guard_process = psutil.Process(int(process.stdout.readline()))
    assert guard_process.is_running()
    os.kill(process.pid, signal.SIGKILL)
    process.wait()
    until(lambda: not guard_process.is_running() or guard_process.status() == psutil.STATUS_ZOMBIE)
