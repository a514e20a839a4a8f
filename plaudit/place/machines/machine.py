"""`plaudit rollouts RUN`: generate on this machine for a run that trains on others. Imports no torch itself.

It finds the trainer by the run directory, which both see, starts engines on its request, each a process that talks
to the trainer itself, and ends them on its request or when the trainer is lost. Then it waits for the trainer to come
again: a run that is resumed finds it there.
"""

from __future__ import annotations

import os
import signal
import socket
import sys
import time
from contextlib import suppress
from pathlib import Path
from types import FrameType

import msgspec

from plaudit import __version__
from plaudit.errors import ConfigError, RunError, one_line
from plaudit.place.machines.messages import (
    ENDPOINT,
    Accepted,
    Begin,
    CommandStream,
    Done,
    End,
    Ended,
    Join,
    Rejected,
    TrainerEndpoint,
)
from plaudit.place.workers.callback import dial
from plaudit.process.framing import pack
from plaudit.process.spawn import Child, end_child, spawn_on

LOOK_SECONDS = 0.5
CONNECT_SECONDS = 10.0
WORKER = "plaudit.place.workers.worker"


class Leave:
    """requested   by SIGTERM, which a cluster sends to all machines of a job: the trainer needs its engines until it
    has saved. A second one ends the process."""

    requested = False

    def listen(self) -> None:
        signal.signal(signal.SIGTERM, self._request)

    def _request(self, number: int, _: FrameType | None) -> None:
        if self.requested:
            sys.exit(128 + number)
        self.requested = True


def generate_for(run: Path, wait: float, leave: Leave) -> bool:
    """Until the run is done: then True. False if this machine was asked to leave, and the trainer has gone. `wait`:
    seconds without a trainer."""
    run, until = run.resolve(), time.monotonic() + wait
    while not leave.requested:
        if (sock := _connected(run / ENDPOINT)) is not None:
            _say(f"this machine generates for the run in {run}; its trainer is at {sock.getpeername()[0]}")
            with sock:
                if Engines(sock).serve():
                    return True
            _say(f"the trainer of {run} is gone: waits {wait:g} s for one that goes on with the run")
            until = time.monotonic() + wait
        elif time.monotonic() > until:
            raise RunError(
                f"no trainer of a run in {run} for {wait:g} s: start plaudit train with resources.rollout.nodes and "
                f"--out {run}, or give --wait more seconds"
            )
        time.sleep(LOOK_SECONDS)
    return False


class Engines:
    """Of one trainer, from its welcome to its end."""

    def __init__(self, sock: socket.socket) -> None:
        self.sock = sock
        self.children: dict[int, Child] = {}
        self.failed: dict[int, str] = {}

    def serve(self) -> bool:
        """Whether the run is done, rather than only its trainer lost."""
        stream = CommandStream()
        try:
            self._send(Join(socket.gethostname(), __version__))
            while data := self.sock.recv(1 << 16):
                for command in stream.feed(data):
                    match command:
                        case Accepted():
                            _go_to(command.directory)
                        case Rejected():
                            raise ConfigError(f"{command.message}: install the same on both")
                        case Begin():
                            self._begin(command)
                        case End():
                            self._send(Ended(command.number, self._end(command.number)))
                        case Done():
                            return True
        except OSError:
            pass  # the trainer has exited
        finally:
            for number in list(self.children):
                self._end(number)
        return False

    def _begin(self, command: Begin) -> None:
        try:
            with dial(command.address, command.token) as sock:
                self.children[command.number] = spawn_on(WORKER, sock, gpus_of(command))
        except (OSError, ConfigError) as error:
            self.failed[command.number] = f"could not be started on {socket.gethostname()}: {one_line(error)}"

    def _end(self, number: int) -> str:
        child = self.children.pop(number, None)
        return self.failed.pop(number, "is not known here") if child is None else end_child(child)

    def _send(self, report: Join | Ended) -> None:
        self.sock.sendall(pack(report))


def _connected(file: Path) -> socket.socket | None:
    """A connection to the trainer, if there is one."""
    with suppress(OSError, msgspec.DecodeError, ValueError):  # none yet, or what a killed one has left
        endpoint = msgspec.json.decode(file.read_bytes(), type=TrainerEndpoint)
        return dial((endpoint.host, endpoint.port), bytes.fromhex(endpoint.token), CONNECT_SECONDS)
    return None


def _go_to(directory: str) -> None:
    try:
        os.chdir(directory)
    except OSError as error:
        raise ConfigError(
            f"the trainer runs in {directory}, by which its recipe's paths go, and here that is no directory "
            f"({error.strerror}): start both in one that all machines have"
        ) from error


def gpus_of(command: Begin) -> dict[str, str]:
    """As many of this machine's, or of those that it was given, as an engine takes, by its place."""
    if not command.gpus:
        return {}
    first, last = command.place * command.gpus, (command.place + 1) * command.gpus
    visible = os.environ.get("CUDA_VISIBLE_DEVICES")
    there = (
        [str(number) for number in range(last)] if visible is None else [each for each in visible.split(",") if each]
    )
    if len(there) < last:
        raise ConfigError(
            f"engine {command.place} of this machine takes the GPUs {first} to {last - 1}, and CUDA_VISIBLE_DEVICES "
            f"has {len(there)}: set resources.rollout.nodes to more machines, or fewer processes"
        )
    return {"CUDA_VISIBLE_DEVICES": ",".join(there[first:last])}


def _say(what: str) -> None:
    print(f"plaudit: {what}", file=sys.stderr)
