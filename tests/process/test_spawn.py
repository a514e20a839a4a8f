"""Children forked from a warm process start like a new process and end with the process that requested them."""

from __future__ import annotations

import asyncio
import json
import os
import signal
import socket
import subprocess
import sys
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import psutil
import pytest

from plaudit.process import nursery, spawn
from plaudit.process.spawn import Child

pytestmark = pytest.mark.skipif(not spawn.FORKS, reason="on a machine with GPUs nothing is forked")


def started(**environment: str) -> tuple[Child, socket.socket]:
    return spawn.spawn("tests.process.child", environment)


def ask(sock: socket.socket, *words: Any) -> Any:
    sock.sendall(json.dumps(words).encode() + b"\n")
    sock.settimeout(60)
    return json.loads(sock.makefile().readline() or "null")


def wait_until_ended(pid: int) -> None:
    deadline = time.monotonic() + 60
    while time.monotonic() < deadline and psutil.pid_exists(pid):
        if psutil.Process(pid).status() == psutil.STATUS_ZOMBIE:
            return
        time.sleep(0.01)
    assert not psutil.pid_exists(pid) or psutil.Process(pid).status() == psutil.STATUS_ZOMBIE


def test_each_child_has_its_own_pid_environment_and_random_state(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    started()[1].close()  # the nursery imports this package from the directory it started in
    monkeypatch.chdir(tmp_path)
    (first, a), (second, b) = started(OWN="a"), started(OWN="b")
    with a, b:
        one, two = ask(a, "facts"), ask(b, "facts")
    assert [one["pid"], two["pid"]] == [first.pid, second.pid]
    assert (one["own"], two["own"]) == ("a", "b")
    assert one["directory"] == str(tmp_path)
    assert one["group"] == os.getpgrp()
    assert one["argv"][0].isdigit()
    assert one["name"] == "plaudit-child"
    assert all(x != y for x, y in zip(one["draws"], two["draws"], strict=True)), "both drew the same numbers"
    assert one["sockets"] == two["sockets"] == 2, "its own, and the one to the nursery"
    assert (first.wait(60), second.wait(60)) == (0, 0)


@pytest.mark.parametrize(("words", "code"), [(("exit", 0), 0), (("exit", 7), 7), (("exit", "why"), 1), (("raise",), 1)])
def test_wait_returns_the_exit_code(words: tuple[Any, ...], code: int) -> None:
    child, sock = started()
    with sock:
        assert ask(sock, *words) is None
    assert child.wait(60) == code
    assert child.poll() == code


def test_a_killed_child_reports_its_signal() -> None:
    child, sock = started()
    with sock:
        ask(sock, "facts")
        assert child.poll() is None
        with pytest.raises(subprocess.TimeoutExpired):
            child.wait(0.01)
        child.kill()
        assert child.wait(60) == -signal.SIGKILL
        child.kill()  # killing an ended child does nothing


def test_a_child_can_be_killed_while_another_thread_waits_for_it() -> None:
    child, sock = started()
    with sock, ThreadPoolExecutor(1) as threads:
        ask(sock, "facts")
        ended = threads.submit(child.wait)
        time.sleep(0.1)
        child.kill()
        assert ended.result(60) == -signal.SIGKILL


def test_a_killed_nursery_is_replaced_and_its_children_keep_running() -> None:
    child, sock = started()
    with sock:
        ask(sock, "facts")
        psutil.Process(psutil.Process(child.pid).ppid()).kill()
        another, theirs = started()
        with theirs:
            assert ask(theirs, "facts")["pid"] == another.pid
        assert another.wait(60) == 0
        assert ask(sock, "facts")["pid"] == child.pid
        child.kill()
        assert child.wait(60) == -signal.SIGKILL


def test_a_grandchild_comes_from_the_same_nursery_and_ends_with_the_child() -> None:
    child, sock = started()
    with sock:
        pid = ask(sock, "child")
        assert psutil.Process(pid).ppid() == psutil.Process(child.pid).ppid()
        os.kill(pid, signal.SIGSTOP)  # a stopped process ends too
        child.kill()
        assert child.wait(60) == -signal.SIGKILL
    wait_until_ended(pid)


CODE = """
import sys, time
from plaudit.process.spawn import spawn
child, sock = spawn("tests.process.child")
sock.sendall(b'["facts"]\\n')
sock.makefile().readline()
print(child.pid, flush=True)
time.sleep(600)
"""


def test_children_end_with_the_process_that_started_them() -> None:
    with subprocess.Popen([sys.executable, "-c", CODE], stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None
        pid = int(process.stdout.readline())
        os.kill(pid, signal.SIGSTOP)
        process.kill()
    wait_until_ended(pid)


def test_different_library_settings_use_another_nursery() -> None:
    child, sock = started(OMP_NUM_THREADS="3")
    with sock:
        ask(sock, "facts")
        parent = psutil.Process(child.pid).ppid()
    other, theirs = started()
    with theirs:
        ask(theirs, "facts")
        assert psutil.Process(other.pid).ppid() != parent
    assert (child.wait(60), other.wait(60)) == (0, 0)


def test_a_missing_module_ends_only_the_child() -> None:
    child, sock = spawn.spawn("tests.process.nobody")
    with sock:
        assert child.wait(60) == 1
    assert nursery.parent is None, "this process was not forked"


def test_a_child_whose_start_is_cancelled_is_killed() -> None:
    """As when a server is stopped while its worker starts: neither process nor socket is left."""
    children: list[tuple[Child, socket.socket]] = []

    async def cancel_start() -> None:
        task = asyncio.create_task(spawn.spawn_soon("tests.process.child", {}))
        await asyncio.sleep(0)
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task
        deadline = time.monotonic() + 60
        while (not children or children[0][0].poll() is None) and time.monotonic() < deadline:
            await asyncio.sleep(0.01)

    def record_child(module: str, environment: dict[str, str]) -> tuple[Child, socket.socket]:
        children.append(start(module, environment))
        return children[-1]

    start = spawn.spawn
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(spawn, "spawn", record_child)
        asyncio.run(cancel_start())
    child, sock = children[0]
    assert child.poll() == -signal.SIGKILL
    assert sock.fileno() == -1, "it is closed"


def test_a_killed_nursery_is_replaced_once_however_many_threads_meet_it() -> None:
    """Each would otherwise close the nursery that another has just started, with its children."""
    started()[1].close()
    (settings,) = [each for each in spawn._nurseries if spawn._settings(os.environ) == each]
    killed = spawn._nurseries[settings]
    assert killed._process is not None
    killed._process.kill()
    killed._process.wait()
    with ThreadPoolExecutor(4) as threads:
        children = list(threads.map(lambda _: started(), range(4)))
    pids = [child.pid for child, _ in children]
    for pid, (_, sock) in zip(pids, children, strict=True):
        with sock:
            assert ask(sock, "facts")["pid"] == pid
