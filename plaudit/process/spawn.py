"""Starts a worker process: a module's `main`, on one end of a socket pair.

A descriptor is used instead of a port: nothing listens, and nobody else can connect. Workers are forked from a nursery,
which is started with the first of them. On a machine with GPUs, whose drivers do not survive a fork, and on systems
other than Linux each worker is a new process.
"""

from __future__ import annotations

import asyncio
import atexit
import os
import signal
import socket
import subprocess
import sys
import threading
from collections.abc import Mapping
from contextlib import suppress
from pathlib import Path
from typing import Protocol

from plaudit.process import nursery
from plaudit.process.guard import is_stopped
from plaudit.process.nursery import Nursery

# Libraries read these variables when they are loaded, so a nursery only forks workers with the same values.
READ_AT_IMPORT = (
    "OMP_", "MKL_", "KMP_", "GOMP_", "OPENBLAS_", "LD_", "PYTHON", "TORCH", "TRITON", "TRANSFORMERS_", "HF_",
)  # fmt: skip
FORKS = sys.platform == "linux" and not any(Path(driver).exists() for driver in ("/dev/nvidiactl", "/dev/kfd"))

NURSERIES = 3  # that may be killed while they start one child

Settings = tuple[tuple[str, str], ...]
_nurseries: dict[Settings, Nursery] = {}
_lock = threading.Lock()


class Child(Protocol):
    """A `subprocess.Popen`, or a child of the nursery."""

    pid: int

    def poll(self) -> int | None: ...

    def wait(self, timeout: float | None = None) -> int: ...

    def kill(self) -> None: ...


def spawn(module: str, environment: Mapping[str, str] | None = None) -> tuple[Child, socket.socket]:
    """Runs `module`'s main in a new process; returns it and our end of its socket. `environment` is added to ours.
    Raises OSError if it cannot be started."""
    environment = {**os.environ, **(environment or {})}
    ours, theirs = socket.socketpair()
    try:
        with theirs:
            return _start(module, theirs.fileno(), environment), ours
    except OSError:
        ours.close()
        raise


def spawn_on(module: str, sock: socket.socket, environment: Mapping[str, str] | None = None) -> Child:
    """The same with a connected socket, of which this process may then close its own end."""
    return _start(module, sock.fileno(), {**os.environ, **(environment or {})})


def end_child(child: Child) -> str:
    """Ensures that the child has exited; returns how, as text."""
    try:
        # A process that closed its socket is about to exit, and its own exit code is more useful.
        code = child.wait(0.0 if is_stopped(child.pid) else 1.0)
    except subprocess.TimeoutExpired:
        child.kill()
        child.wait()
        return "was ended"
    return f"was ended by {signal.Signals(-code).name}" if code < 0 else f"ended with code {code}"


def spawn_new_processes() -> None:
    """Start future children of this process as new processes instead of forks: it starts few workers, and a nursery
    would only use more memory."""
    global FORKS
    FORKS = False


async def spawn_soon(module: str, environment: Mapping[str, str]) -> tuple[Child, socket.socket]:
    """The same for an event loop, as the first child's imports take seconds. Runs in a daemon thread, so that exiting
    does not wait for it."""
    loop = asyncio.get_running_loop()
    result: asyncio.Future[tuple[Child, socket.socket]] = loop.create_future()

    def settle(started: tuple[Child, socket.socket] | None, error: Exception | None) -> None:
        if result.cancelled():
            _give_up(started)
        elif error is not None:
            result.set_exception(error)
        elif started is not None:
            result.set_result(started)

    def run() -> None:
        started, failure = None, None
        try:
            started = spawn(module, environment)
        except Exception as error:  # passed on to the caller, who waits
            failure = error
        try:
            loop.call_soon_threadsafe(settle, started, failure)
        except RuntimeError:  # the loop is closed
            _give_up(started)

    threading.Thread(target=run, daemon=True).start()
    return await result


def _give_up(started: tuple[Child, socket.socket] | None) -> None:
    """Kill a child that is no longer needed."""
    if started is not None:
        child, sock = started
        sock.close()
        child.kill()
        child.wait(10)


def _start(module: str, fd: int, environment: Mapping[str, str]) -> Child:
    if not FORKS:
        return subprocess.Popen(
            [sys.executable, "-m", module, str(fd)], pass_fds=[fd], stdin=subprocess.DEVNULL, env=dict(environment)
        )
    settings = _settings(environment)
    for _ in range(NURSERIES - 1):
        nursery = _nursery(settings, environment)
        with suppress(ConnectionError):  # it was killed
            return nursery.fork(module, fd, environment)
        _replace(settings, nursery, environment)
    return _nursery(settings, environment).fork(module, fd, environment)


def _replace(settings: Settings, dead: Nursery, environment: Mapping[str, str]) -> None:
    """Start another nursery, unless another thread that met the dead one has done it."""
    with _lock:
        if _nurseries.get(settings) is dead:
            dead.close()
            _nurseries[settings] = Nursery.start(environment)


def _settings(environment: Mapping[str, str]) -> Settings:
    return tuple(sorted(each for each in environment.items() if each[0].startswith(READ_AT_IMPORT)))


def _nursery(settings: Settings, environment: Mapping[str, str]) -> Nursery:
    with _lock:
        if settings not in _nurseries:
            parent = nursery.parent  # this process was forked from a nursery, which can fork its children too
            shared = parent if parent is not None and _settings(parent.environment) == settings else None
            _nurseries[settings] = shared or Nursery.start(environment)
        return _nurseries[settings]


@atexit.register
def _close() -> None:
    while _nurseries:
        _nurseries.popitem()[1].close()
