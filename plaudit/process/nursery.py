"""Fast starts of workers: a fork server imports what workers need once, and forks itself for every worker.

Importing torch and a model library takes seconds of CPU time; a fork takes milliseconds. So another replica, or the
replacement of a crashed worker, costs only the loading of its model. The nursery has started no torch threads and no
device when it forks. Every child has its own standard streams, environment, directory and random state, and
none of the nursery's sockets.

        python -m plaudit.process.nursery FD     for each request: imports its module, if needed, and forks; the child
                                                 calls the module's main

A child may request children in turn (for example the ranks of a model): it has its own connection to the nursery. When
the process that requested a child exits, for whatever reason, the nursery kills the child, even if it is stopped.
"""

from __future__ import annotations

import ctypes
import importlib
import os
import random
import select
import signal
import socket
import struct
import subprocess
import sys
import threading
import traceback
import warnings
from collections.abc import Mapping
from contextlib import suppress
from pathlib import Path
from typing import NoReturn

import msgspec
import numpy as np

START_SECONDS = 300.0  # timeout of the nursery for importing and forking
CLOSE_SECONDS = 1.0
MOST_BYTES = 1 << 18  # limit of a request, which includes an environment
PR_SET_NAME = 15
_CODE = struct.Struct("<i")


class ForkRequest(msgspec.Struct):
    """The module whose `main` a child runs, its directory and its process group. Four descriptors are sent with it: the
    worker's socket, the end of the pipe that signals its exit, standard output and standard error."""

    module: str
    environment: dict[str, str]
    directory: str
    group: int


class Forked:
    """A child of the nursery, with the interface of `subprocess.Popen`.

    The pipe's other end is open in the child and in the nursery: it closes when the child has exited, after its exit
    code, or without one if the nursery was killed before.
    """

    def __init__(self, pid: int, pipe: int) -> None:
        self.pid = pid
        self.returncode: int | None = None
        self._pipe = pipe
        self._lock = threading.Lock()

    def poll(self) -> int | None:
        with suppress(subprocess.TimeoutExpired):
            self.wait(0.0)
        return self.returncode

    def wait(self, timeout: float | None = None) -> int:
        with self._lock:
            if self.returncode is None:
                poll = select.poll()
                poll.register(self._pipe, select.POLLIN)
                if not poll.poll(None if timeout is None else timeout * 1000):
                    raise subprocess.TimeoutExpired(f"worker {self.pid}", timeout or 0.0)
                code = os.read(self._pipe, _CODE.size)
                self.returncode = _CODE.unpack(code)[0] if code else -signal.SIGKILL
                os.close(self._pipe)
            return self.returncode

    def kill(self) -> None:
        # If another thread waits for its exit, that thread holds the lock.
        if self._lock.locked() or self.poll() is None:
            with suppress(ProcessLookupError):
                os.kill(self.pid, signal.SIGKILL)


class Nursery:
    """The client side. The nursery exits with the process that started it."""

    def __init__(
        self, sock: socket.socket, environment: Mapping[str, str], process: subprocess.Popen[bytes] | None = None
    ) -> None:
        self.environment = environment
        self._process = process
        self._lock = threading.Lock()
        self._sock = sock
        sock.settimeout(START_SECONDS)

    @classmethod
    def start(cls, environment: Mapping[str, str]) -> Nursery:
        ours, theirs = _control_pair()
        with theirs:
            process = subprocess.Popen(
                [sys.executable, "-m", "plaudit.process.nursery", str(theirs.fileno())], pass_fds=[theirs.fileno()],
                stdin=subprocess.DEVNULL, env=dict(environment),
            )  # fmt: skip
        return cls(ours, environment, process)

    def close(self) -> None:
        """Close it; its children are killed too."""
        self._sock.close()
        if self._process is not None:
            try:
                self._process.wait(CLOSE_SECONDS)
            except subprocess.TimeoutExpired:  # it is importing
                self._process.kill()
                self._process.wait()

    def fork(self, module: str, fd: int, environment: Mapping[str, str]) -> Forked:
        """Raises ConnectionError if the nursery has exited or was closed."""
        request = msgspec.msgpack.encode(ForkRequest(module, dict(environment), str(Path.cwd()), os.getpgrp()))
        ours, theirs = os.pipe()
        try:
            with self._lock:
                if self._sock.fileno() < 0:
                    raise ConnectionResetError("the process that forks workers was replaced")
                socket.send_fds(self._sock, [request], [fd, theirs, 1, 2])
                reply = self._sock.recv(_CODE.size)
            if not reply:
                raise ConnectionResetError("the process that forks workers has exited")
        except TimeoutError as error:
            os.close(ours)
            self.close()  # a late reply would be mistaken for the next one's
            raise ConnectionAbortedError(f"no worker was forked within {START_SECONDS:g} s") from error
        except OSError:
            os.close(ours)
            raise
        finally:
            os.close(theirs)
        return Forked(_CODE.unpack(reply)[0], ours)


# The nursery that this process was forked from, if any.
parent: Nursery | None = None


class _Forker:
    """The server side. Its children have their own sockets."""

    def __init__(self, fd: int) -> None:
        self.owner = socket.socket(fileno=fd)
        self.callers = {fd: self.owner}
        self.woken, self.waker = socket.socketpair()
        self.children: dict[int, tuple[int, int]] = {}  # running ones: the pipe, and the caller's number

    def run(self) -> None:
        signal.signal(signal.SIGINT, signal.SIG_IGN)
        signal.signal(signal.SIGCHLD, lambda *_: None)
        self.waker.setblocking(False)
        signal.set_wakeup_fd(self.waker.fileno(), warn_on_full_buffer=False)
        while True:
            poll = select.poll()
            for fd in (self.woken.fileno(), *self.callers):
                poll.register(fd, select.POLLIN)
            for fd, _ in poll.poll():
                if fd == self.woken.fileno():
                    self.woken.recv(1 << 12)
                    self.reap()
                    continue
                caller = self.callers[fd]
                data, fds, _, _ = socket.recv_fds(caller, MOST_BYTES, 4)
                if data:
                    self.fork(caller, msgspec.msgpack.decode(data, type=ForkRequest), fds)
                else:
                    self.kill_children_of(fd)
                    if caller is self.owner:
                        return
                    self.callers.pop(fd).close()

    def reap(self) -> None:
        """Report the exit codes before the process numbers are reused."""
        for pid, (pipe, _) in list(self.children.items()):
            with suppress(ChildProcessError):
                if (end := os.waitid(os.P_PID, pid, os.WEXITED | os.WNOHANG | os.WNOWAIT)) is None:
                    continue
                code = end.si_status if end.si_code == os.CLD_EXITED else -end.si_status
                del self.children[pid]
                with suppress(BrokenPipeError):
                    os.write(pipe, _CODE.pack(code))
                os.close(pipe)
                os.waitpid(pid, 0)

    def kill_children_of(self, caller: int) -> None:
        """Kill the children of a caller; of the owner: all."""
        for pid, (_, whose) in self.children.items():
            if whose == caller or caller == self.owner.fileno():
                os.kill(pid, signal.SIGKILL)

    def fork(self, caller: socket.socket, request: ForkRequest, fds: list[int]) -> None:
        with suppress(Exception):  # the child will fail in the same way and report it
            importlib.import_module(request.module)
        ours, theirs = _control_pair()
        pid = os.fork()
        if pid == 0:
            ours.close()
            self.become(request, fds, theirs)
        theirs.close()
        self.callers[ours.fileno()] = ours
        worker, pipe, *streams = fds
        self.children[pid] = pipe, caller.fileno()
        for fd in (worker, *streams):
            os.close(fd)
        with suppress(OSError):  # the caller has exited
            caller.send(_CODE.pack(pid))

    def become(self, request: ForkRequest, fds: list[int], control: socket.socket) -> NoReturn:
        """Runs in the child: sets it up like a new process."""
        global parent
        code = 1
        try:
            signal.set_wakeup_fd(-1)
            signal.signal(signal.SIGCHLD, signal.SIG_DFL)
            for each in (*self.callers.values(), self.woken, self.waker):
                each.close()
            for pipe, _ in self.children.values():
                os.close(pipe)
            worker, _, *streams = fds
            for stream, fd in zip((1, 2), streams, strict=True):
                os.dup2(fd, stream)
                os.close(fd)
            os.environ.clear()
            os.environ.update(request.environment)
            os.chdir(request.directory)
            with suppress(PermissionError):  # a process group of another session
                os.setpgid(0, request.group)
            parent = Nursery(control, request.environment)
            random.seed()
            np.random.seed()  # for libraries that use its global state
            sys.argv = [request.module, str(worker)]
            _name_process(request.module)
            importlib.import_module(request.module).main(worker)
            code = 0
        except SystemExit as end:
            code = end.code if isinstance(end.code, int) else int(end.code is not None)
            if isinstance(end.code, str):
                print(end.code, file=sys.stderr)
        except BaseException:
            traceback.print_exc()
        finally:
            with suppress(Exception):
                sys.stdout.flush()
                sys.stderr.flush()
            os._exit(code)


def _control_pair() -> tuple[socket.socket, socket.socket]:
    return socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)  # each request or reply is one packet


def _name_process(module: str) -> None:
    """Set the name shown by `top` and `ps -o comm`."""
    name = f"plaudit-{module.split('.')[-1]}"
    with suppress(AttributeError):  # available on Linux only
        ctypes.CDLL(None).prctl(PR_SET_NAME, name.encode()[:15], 0, 0, 0)


def main(fd: int) -> None:
    # Threads that a library started at import do not exist in the child, and are not needed there.
    warnings.filterwarnings("ignore", message=".*fork.*", category=DeprecationWarning)
    _Forker(fd).run()


if __name__ == "__main__":
    # Imported under its own name instead of __main__: children look up `parent` here.
    importlib.import_module("plaudit.process.nursery").main(int(sys.argv[1]))
