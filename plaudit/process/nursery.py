"""Workers in a moment: one process imports what a worker needs, once, and forks itself for every worker.

Importing torch and a model library takes seconds of processor time; a fork takes milliseconds. So a second replica, and
a worker in place of one that died, cost the loading of their model alone. The nursery has started no thread of torch's
and no device when it forks. Every child has its own standard streams, environment, directory and random numbers, and
none of the nursery's sockets.

    python -m plaudit.process.nursery FD     for each request: imports its module, if it is new, and forks; the child
                                             calls the module's main

A child may ask for children in its turn (the ranks of a model, say): it has a connection of its own to the nursery. Who
asked for a child and is gone, however that came, takes it along: the nursery kills it, a stopped one too.
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

START_SECONDS = 300.0  # for the nursery to import, and to fork
CLOSE_SECONDS = 1.0
MOST_BYTES = 1 << 18  # of a request: an environment
PR_SET_NAME = 15
_CODE = struct.Struct("<i")


class ForkRequest(msgspec.Struct):
    """Which module's `main` a child runs, where, and in which process group. With it go four descriptors: the worker's
    socket, the end of the pipe that tells when it is gone, standard output and standard error."""

    module: str
    environment: dict[str, str]
    directory: str
    group: int


class Forked:
    """A child of the nursery's, as `subprocess.Popen` shows its own.

    The pipe's other end is open in the child and in the nursery: it closes when the child is gone, after the exit code,
    and closes without one if the nursery was killed before.
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
        # While another thread waits for its end, it has none: that thread has the lock.
        if self._lock.locked() or self.poll() is None:
            with suppress(ProcessLookupError):
                os.kill(self.pid, signal.SIGKILL)


class Nursery:
    """The caller's end. It ends when the process that started it does."""

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
        """Its children end too."""
        self._sock.close()
        if self._process is not None:
            try:
                self._process.wait(CLOSE_SECONDS)
            except subprocess.TimeoutExpired:  # it imports
                self._process.kill()
                self._process.wait()

    def fork(self, module: str, fd: int, environment: Mapping[str, str]) -> Forked:
        """Raises OSError if the nursery is gone."""
        request = msgspec.msgpack.encode(ForkRequest(module, dict(environment), str(Path.cwd()), os.getpgrp()))
        ours, theirs = os.pipe()
        try:
            with self._lock:
                socket.send_fds(self._sock, [request], [fd, theirs, 1, 2])
                reply = self._sock.recv(_CODE.size)
            if not reply:
                raise ConnectionResetError("the process that forks workers has ended")
        except TimeoutError as error:
            os.close(ours)
            self.close()  # a reply that came now would be taken for the next one's
            raise ConnectionAbortedError(f"no worker was forked within {START_SECONDS:g} s") from error
        except OSError:
            os.close(ours)
            raise
        finally:
            os.close(theirs)
        return Forked(_CODE.unpack(reply)[0], ours)


# The nursery that this process was forked from, if it was.
parent: Nursery | None = None


class _Forker:
    """The nursery's own side. Its children have sockets of their own to end by."""

    def __init__(self, fd: int) -> None:
        self.owner = socket.socket(fileno=fd)
        self.callers = {fd: self.owner}
        self.woken, self.waker = socket.socketpair()
        self.children: dict[int, tuple[int, int]] = {}  # living ones: the pipe, and which caller's it is

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
        """Tell the exit code before the number of the process is free for another."""
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
        """Of the owner's: all."""
        for pid, (_, whose) in self.children.items():
            if whose == caller or caller == self.owner.fileno():
                os.kill(pid, signal.SIGKILL)

    def fork(self, caller: socket.socket, request: ForkRequest, fds: list[int]) -> None:
        with suppress(Exception):  # the child will fail in the same way, and say so
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
        with suppress(OSError):  # the caller is gone
            caller.send(_CODE.pack(pid))

    def become(self, request: ForkRequest, fds: list[int], control: socket.socket) -> NoReturn:
        """In the child: as a process of its own would begin."""
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
            with suppress(PermissionError):  # that of another session
                os.setpgid(0, request.group)
            parent = Nursery(control, request.environment)
            random.seed()
            np.random.seed()  # of libraries that draw from it
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
    return socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)  # a request or a reply is one packet


def _name_process(module: str) -> None:
    """What `top` and `ps -o comm` show."""
    name = f"plaudit-{module.split('.')[-1]}"
    with suppress(AttributeError):  # Linux has it
        ctypes.CDLL(None).prctl(PR_SET_NAME, name.encode()[:15], 0, 0, 0)


def main(fd: int) -> None:
    # Threads of a library's that sleep since its import are not in the child, and are not missed there.
    warnings.filterwarnings("ignore", message=".*fork.*", category=DeprecationWarning)
    _Forker(fd).run()


if __name__ == "__main__":
    # Under its own name, and not as __main__: children look here for their `parent`.
    importlib.import_module("plaudit.process.nursery").main(int(sys.argv[1]))
