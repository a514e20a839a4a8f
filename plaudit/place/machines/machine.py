"""`plaudit rollouts RUN`: this machine generates for a run that trains on others. Loads no torch itself.

It finds the trainer by the run directory, which both see, starts engines as it is told, each a process that talks to
the trainer itself, and ends them when it is told or when the trainer is gone. Then it waits for the trainer to come
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
from plaudit.place.machines.messages import DOOR, Begin, Done, Door, End, Ended, Joining, OrderStream, SentAway, Welcome
from plaudit.place.workers.callback import knock
from plaudit.process.framing import pack
from plaudit.process.spawn import Child, end_child, spawn_on

LOOK_SECONDS = 0.5
CONNECT_SECONDS = 10.0
WORKER = "plaudit.place.workers.worker"


class Leave:
    """asked   by SIGTERM, which a cluster sends to all machines of a job: the trainer needs its engines until it has
    saved. A second one ends the process."""

    asked = False

    def listen(self) -> None:
        signal.signal(signal.SIGTERM, self._ask)

    def _ask(self, number: int, _: FrameType | None) -> None:
        if self.asked:
            sys.exit(128 + number)
        self.asked = True


def generate_for(run: Path, wait: float, leave: Leave) -> bool:
    """Until the run is done: then True. False if this machine was asked to leave, and the trainer has gone. `wait`:
    seconds without a trainer."""
    run, until = run.resolve(), time.monotonic() + wait
    while not leave.asked:
        if (sock := _entered(run / DOOR)) is not None:
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
        """Whether the run is done, and not only its trainer gone."""
        stream = OrderStream()
        try:
            self._send(Joining(socket.gethostname(), __version__))
            while data := self.sock.recv(1 << 16):
                for order in stream.feed(data):
                    match order:
                        case Welcome():
                            _go_to(order.directory)
                        case SentAway():
                            raise ConfigError(f"{order.message}: install the same on both")
                        case Begin():
                            self._begin(order)
                        case End():
                            self._send(Ended(order.number, self._end(order.number)))
                        case Done():
                            return True
        except OSError:
            pass  # the trainer is gone
        finally:
            for number in list(self.children):
                self._end(number)
        return False

    def _begin(self, order: Begin) -> None:
        try:
            with knock(order.address, order.token) as sock:
                self.children[order.number] = spawn_on(WORKER, sock, gpus_of(order))
        except (OSError, ConfigError) as error:
            self.failed[order.number] = f"could not be started on {socket.gethostname()}: {one_line(error)}"

    def _end(self, number: int) -> str:
        child = self.children.pop(number, None)
        return self.failed.pop(number, "is not known here") if child is None else end_child(child)

    def _send(self, said: Joining | Ended) -> None:
        self.sock.sendall(pack(said))


def _entered(file: Path) -> socket.socket | None:
    """A connection to the trainer, if there is one."""
    with suppress(OSError, msgspec.DecodeError, ValueError):  # none yet, or what a killed one has left
        door = msgspec.json.decode(file.read_bytes(), type=Door)
        return knock((door.host, door.port), bytes.fromhex(door.token), CONNECT_SECONDS)
    return None


def _go_to(directory: str) -> None:
    try:
        os.chdir(directory)
    except OSError as error:
        raise ConfigError(
            f"the trainer runs in {directory}, by which its recipe's paths go, and here that is no directory "
            f"({error.strerror}): start both in one that all machines have"
        ) from error


def gpus_of(order: Begin) -> dict[str, str]:
    """As many of this machine's, or of those that it was given, as an engine takes, by its place."""
    if not order.gpus:
        return {}
    first, last = order.place * order.gpus, (order.place + 1) * order.gpus
    given = os.environ.get("CUDA_VISIBLE_DEVICES")
    there = [str(number) for number in range(last)] if given is None else [each for each in given.split(",") if each]
    if len(there) < last:
        raise ConfigError(
            f"engine {order.place} of this machine takes the GPUs {first} to {last - 1}, and CUDA_VISIBLE_DEVICES has "
            f"{len(there)}: set resources.rollout.nodes to more machines, or fewer processes"
        )
    return {"CUDA_VISIBLE_DEVICES": ",".join(there[first:last])}


def _say(what: str) -> None:
    print(f"plaudit: {what}", file=sys.stderr)
