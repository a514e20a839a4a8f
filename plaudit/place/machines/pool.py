"""The trainer's side of rollout machines: a host that starts rollout workers on them.

Machines connect to the trainer's endpoint (messages.py) when they are ready, and again after they were away. Each has
places for as many engines; a machine too many waits for the places of one that is lost. An engine ends with its
machine, as the trainer sees it: when the machine's connection is over, so are those of its engines.
"""

from __future__ import annotations

import os
import socket
import sys
import threading
from contextlib import suppress
from itertools import count
from pathlib import Path
from types import TracebackType
from typing import Self

import msgspec

from plaudit import __version__
from plaudit.config import RlRecipe
from plaudit.errors import EngineLost, PlauditError, ReceiverLost
from plaudit.models import choose_device
from plaudit.output import sync
from plaudit.place.machines.messages import (
    ENDPOINT,
    Accepted,
    Begin,
    Done,
    End,
    Ended,
    Join,
    Rejected,
    ReportStream,
    TrainerEndpoint,
)
from plaudit.place.workers.callback import CallbackListener
from plaudit.process.framing import pack

JOIN_SECONDS = 600.0  # for all machines to come, at the start
REJOIN_SECONDS = 25.0  # for one to come in place of a lost one: with the time to notice, less than a minute
CONNECT_SECONDS = 60.0  # for an engine's process to connect; the first on a machine imports
END_SECONDS = 10.0  # for a machine to say how an engine has ended
UNHEARD_MS = 20_000  # without an acknowledgement a machine then counts as lost
HELLO_SECONDS = 10.0


class Machine:
    """One that has joined.

    address   of this machine, as it is reached from there
    free      its places without an engine
    """

    def __init__(self, sock: socket.socket, name: str, places: int, news: threading.Condition) -> None:
        self.sock = sock
        self.name = name
        self.address: str = sock.getsockname()[0]
        self.free = list(range(places))
        self.there = True
        self.engines: dict[int, socket.socket] = {}
        self.ended: dict[int, str] = {}
        self._news = news
        self._sending = threading.Lock()

    def send(self, command: Accepted | Rejected | Begin | End | Done) -> None:
        with suppress(OSError), self._sending:  # the reader sees the same end
            self.sock.sendall(pack(command))

    def read(self, stream: ReportStream) -> None:
        """Wait until it has disconnected; its engines are then lost too."""
        with suppress(OSError):
            while data := self.sock.recv(1 << 16):
                for report in stream.feed(data):
                    assert isinstance(report, Ended)
                    with self._news:
                        self.ended[report.number] = report.words
                        self._news.notify_all()
        self.leave()
        self.sock.close()

    def leave(self) -> None:
        with self._news:
            self.there = False
            for sock in self.engines.values():
                with suppress(OSError):  # its own reader has closed it
                    sock.shutdown(socket.SHUT_RDWR)
            self._news.notify_all()
        with suppress(OSError):
            self.sock.shutdown(socket.SHUT_RDWR)


class MachineEngine:
    """A worker process on another machine, as `Hosted`."""

    def __init__(
        self, machine: Machine, number: int, place: int, sock: socket.socket, news: threading.Condition
    ) -> None:
        self.sock = sock
        self._machine = machine
        self._number = number
        self._place = place
        self._news = news
        with news:
            machine.engines[number] = sock
        if not machine.there:  # it left meanwhile, and did not know of this one
            machine.leave()

    def end(self) -> str:
        machine, number = self._machine, self._number
        machine.send(End(number))
        with self._news:
            self._news.wait_for(lambda: number in machine.ended or not machine.there, END_SECONDS)
            words = machine.ended.pop(number, None)
            del machine.engines[number]
            if words is not None:
                machine.free = sorted([*machine.free, self._place])
                self._news.notify_all()
                return words
        if machine.there:  # nobody knows what still runs there
            machine.leave()
            return f"was on {machine.name}, which said nothing for {END_SECONDS:g} s"
        return f"was lost with its machine {machine.name}"


class RolloutMachines:
    """A `Host`: the engines of a run on resources.rollout.nodes machines of their own. Only the main rank has one."""

    def __init__(self, recipe: RlRecipe, directory: Path, join: float = JOIN_SECONDS) -> None:
        rollout = recipe.resources.rollout
        self.nodes = rollout.nodes
        self.places = recipe.rollout_processes // rollout.nodes
        self.gpus = rollout.ranks if choose_device(recipe.model.device).startswith("cuda") else 0
        self.machines: list[Machine] = []
        self._join_seconds = join
        self._news = threading.Condition()
        self._numbers = count()
        self._directory = directory
        try:
            self._listener = CallbackListener(rollout.address or "")
        except OSError as error:
            raise PlauditError(
                f"resources.rollout.address = {rollout.address!r} is not an address of this machine "
                f"({error.strerror or error}): set one, or remove it"
            ) from error
        endpoint = TrainerEndpoint(_own_name(rollout.address), self._listener.address[1], self._listener.token.hex())
        self._file = directory / ENDPOINT
        _write_for_us(self._file, msgspec.json.encode(endpoint))
        threading.Thread(target=self._accept, daemon=True, name="machines").start()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        """Machines of a run that has not come to its end wait for whoever resumes it."""
        self._file.unlink(missing_ok=True)
        self._listener.close()
        for machine in list(self.machines):
            if kind is None:
                machine.send(Done())
            machine.leave()

    @property
    def address(self) -> str:
        """This machine's, at which the others reach it. Waits for all of them."""
        with self._news:
            if len(self._present()) < self.nodes:
                print(
                    f"plaudit: waits for {self.nodes} machine(s) that generate (resources.rollout.nodes): on each run "
                    f"plaudit rollouts {self._directory}", file=sys.stderr,
                )  # fmt: skip
            self._news.wait_for(lambda: len(self._present()) >= self.nodes, self._join_seconds)
            there = self._present()
        if len(there) < self.nodes:
            raise EngineLost(
                f"{len(there)} of {self.nodes} machine(s) that generate (resources.rollout.nodes) came within "
                f"{self._join_seconds:g} s: on each run plaudit rollouts {self._directory}"
            )
        return there[0].address

    def __call__(self) -> MachineEngine:
        with self._news:
            if not self._news.wait_for(lambda: any(machine.free for machine in self._present()), REJOIN_SECONDS):
                raise EngineLost(
                    f"no machine has come within {REJOIN_SECONDS:g} s to generate in place of one that was lost: run "
                    f"plaudit rollouts {self._directory} there, and --resume continues from the last checkpoint"
                )
            machine = next(machine for machine in self._present() if machine.free)
            number, place = next(self._numbers), machine.free.pop(0)
        listener = CallbackListener(machine.address)
        machine.send(Begin(number, place, self.gpus, listener.address, listener.token))
        try:
            sock = listener.admit(f"an engine on {machine.name}", CONNECT_SECONDS)
        except ReceiverLost as error:
            machine.leave()  # nobody knows what still runs there
            raise EngineLost(str(error)) from error
        return MachineEngine(machine, number, place, sock, self._news)

    def _present(self) -> list[Machine]:
        return [machine for machine in self.machines if machine.there]

    def _accept(self) -> None:
        for sock in self._listener.callers():
            threading.Thread(target=self._join_machine, args=(sock,), daemon=True, name="machine").start()

    def _join_machine(self, sock: socket.socket) -> None:
        if hasattr(socket, "TCP_USER_TIMEOUT"):  # Linux
            sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_USER_TIMEOUT, UNHEARD_MS)
        stream = ReportStream()
        with suppress(OSError, msgspec.DecodeError, ValueError):  # whoever it was
            hello = _first(sock, stream)
            if hello is None:
                sock.close()
                return
            machine = Machine(sock, hello.name, self.places, self._news)
            if hello.version != __version__:
                machine.send(Rejected(f"{hello.name} has plaudit {hello.version}, and the trainer {__version__}"))
                sock.close()
                return
            machine.send(Accepted(str(Path.cwd())))
            with self._news:
                self.machines = [*self._present(), machine]
                self._news.notify_all()
            machine.read(stream)


def _first(sock: socket.socket, stream: ReportStream) -> Join | None:
    sock.settimeout(HELLO_SECONDS)
    while data := sock.recv(1 << 16):
        for report in stream.feed(data):
            sock.settimeout(None)
            return report if isinstance(report, Join) else None
    return None


def _own_name(address: str | None) -> str:
    """By which the others reach this machine. torchrun's over several is one of that kind."""
    master = os.environ.get("MASTER_ADDR", "")
    own = master in ("", "localhost") or master.startswith("127.")
    return address or (socket.gethostname() if own else master)


def _write_for_us(path: Path, data: bytes) -> None:
    """Whole, or not at all, and only for this user."""
    temporary = path.with_name(f"{path.name}.tmp")
    temporary.unlink(missing_ok=True)
    with os.fdopen(os.open(temporary, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600), "wb") as file:
        file.write(data)
    temporary.replace(path)
    sync(path.parent)
