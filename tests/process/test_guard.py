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
# Holds the GIL for as long as it lives, as a library may for minutes.
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


def until(done: Callable[[], bool]) -> None:
    deadline = time.monotonic() + LIMIT
    while not done():
        assert time.monotonic() < deadline
        time.sleep(0.01)


def test_the_stopped_one_is_ended_and_the_busy_one_is_not(
    start: Callable[[str], "subprocess.Popen[str]"], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(guard, "LOOK_SECONDS", 0.02)
    monkeypatch.setattr(guard, "STOPPED_SECONDS", 0.2)
    busy, stopped, back = start(BUSY), start(ASLEEP), start(ASLEEP)
    for process in (busy, stopped, back):
        assert process.stdout is not None
        process.stdout.readline()
    pids = [busy.pid, stopped.pid, back.pid]
    assert set(pids) <= set(children())
    for process in (stopped, back):
        process.send_signal(signal.SIGSTOP)
    until(lambda: is_stopped(stopped.pid) and is_stopped(back.pid))
    looks = Guard()
    assert looks.end_stopped(pids) == []
    back.send_signal(signal.SIGCONT)
    until(lambda: not is_stopped(back.pid))
    ended: list[int] = []
    until(lambda: bool(ended.extend(looks.end_stopped(pids)) or ended))
    assert ended == [stopped.pid]
    assert stopped.wait(LIMIT) == -signal.SIGKILL
    assert busy.poll() is None
    assert back.poll() is None


def test_a_guard_ends_with_its_process(start: Callable[[str], "subprocess.Popen[str]"]) -> None:
    process = start(f"{GUARDED} {ASLEEP}")
    assert process.stdout is not None
    beside = psutil.Process(int(process.stdout.readline()))
    assert beside.is_running()
    os.kill(process.pid, signal.SIGKILL)
    process.wait()
    until(lambda: not beside.is_running() or beside.status() == psutil.STATUS_ZOMBIE)
