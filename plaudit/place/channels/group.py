"""A process group owned by a channel, separate from torch's default group: trainer is rank 0, receivers follow.

It is made for one set of receivers, over a TCPStore in the trainer, and discarded at the first failure: torch's groups
do not survive one. Every broadcast has a deadline. Gloo enforces it itself. NCCL does not: its work is polled here,
and at the deadline its communicator is aborted, long before torch's own watchdog would end the process.
"""

from __future__ import annotations

import secrets
import socket
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from datetime import timedelta
from typing import Any

import torch
import torch.distributed
from torch import Tensor

from plaudit.errors import ChannelError, ConfigError, one_line
from plaudit.place.channels.messages import Invitation

dist: Any = torch.distributed  # torch's stubs do not list what is used here

LOOK_SECONDS = 0.0005  # poll interval of NCCL's work
WATCHDOG_SECONDS = 3600.0


class GroupBroken(ChannelError):
    """An exchange failed; only the wires can tell which receiver caused it."""


class Rendezvous:
    """The trainer's store, through which the ranks of every new group connect."""

    def __init__(self, host: str, seconds: float) -> None:
        self.host = host
        limit = timedelta(seconds=seconds)
        try:
            self.store = dist.TCPStore(host, 0, is_master=True, wait_for_workers=False, timeout=limit)
        except RuntimeError as error:
            raise ConfigError(
                f"cannot listen on {host!r} for the collective channel ({one_line(error, 120)}): set an address of "
                "this machine"
            ) from error

    def invitation(self, backend: str, size: int) -> Invitation:
        """For the receivers; each also gets its rank."""
        return Invitation(self.host, self.store.port, secrets.token_hex(8), backend, size)


class ChannelGroup:
    """backend   "gloo" for tensors of the CPU, "nccl" for those of a GPU"""

    def __init__(self, invitation: Invitation, rank: int, seconds: float, store: Any = None) -> None:
        self.id = invitation.group
        self.rank = rank
        backend, size = invitation.backend, invitation.size
        limit = timedelta(seconds=max(seconds, 0.1))
        self.device = torch.device("cpu" if backend == "gloo" else "cuda")
        with _broken_if_it_fails():
            if store is None:
                store = dist.TCPStore(invitation.host, invitation.port, is_master=False, timeout=limit)
            store = dist.PrefixStore(self.id, store)
            if backend == "gloo":
                self._group: Any = dist.ProcessGroupGloo(store, rank, size, _gloo_options(invitation.host, limit))
            else:
                options = dist.ProcessGroupNCCL.Options()
                options._timeout = timedelta(seconds=WATCHDOG_SECONDS)
                self._group = dist.ProcessGroupNCCL(store, rank, size, options)
                self._connect(seconds)

    def broadcast(self, flat: Tensor, seconds: float) -> Pending:
        """Start it; rank 0 sends. `flat` must live until the end."""
        options = dist.BroadcastOptions()
        options.rootRank = 0
        options.timeout = timedelta(seconds=max(seconds, 0.1)) if flat.device.type == "cpu" else _no_limit()
        with _broken_if_it_fails():
            return Pending(self._group, self._group.broadcast([flat], options), flat)

    def send(self, flat: Tensor, rank: int) -> Pending:
        """Start it. `flat` must live until the end. Sends to the same rank arrive in order."""
        with _broken_if_it_fails():
            return Pending(self._group, self._group.send([flat], rank, 0), flat)

    def receive(self, flat: Tensor, rank: int) -> Pending:
        with _broken_if_it_fails():
            return Pending(self._group, self._group.recv([flat], rank, 0), flat)

    def _connect(self, seconds: float) -> None:
        """NCCL connects at the first exchange, in a call without a deadline, so a thread makes it."""
        device = torch.cuda.current_device()

        def first() -> None:
            torch.cuda.set_device(device)
            self.broadcast(torch.zeros(1, device=self.device), seconds).wait(seconds)

        thread = threading.Thread(target=first, daemon=True)
        thread.start()
        thread.join(seconds)
        if thread.is_alive():
            raise GroupBroken(f"NCCL did not connect within {seconds:.3g} s")

    def close(self) -> None:
        group, self._group = self._group, None
        if group is not None:
            group.abort()


class Pending:
    """An exchange in progress; it keeps its tensor alive."""

    def __init__(self, group: Any, work: Any, flat: Tensor) -> None:
        self._group = group
        self._work = work
        self.flat = flat

    def wait(self, seconds: float) -> Tensor:
        with _broken_if_it_fails():
            if self.flat.device.type == "cpu":
                self._work.wait(timedelta(seconds=max(seconds, 0.1)))
            else:
                self._watch(time.monotonic() + seconds)
        return self.flat

    def _watch(self, until: float) -> None:
        while not self._work.is_completed():
            if time.monotonic() > until:
                self._group.abort()
                raise GroupBroken("NCCL did not finish an exchange in time")
            time.sleep(LOOK_SECONDS)
        self._work.wait()


def _gloo_options(host: str, limit: timedelta) -> Any:
    options = dist.ProcessGroupGloo._Options()
    options._devices = [dist.ProcessGroupGloo.create_device(hostname=_own_address(host))]
    options._timeout = limit
    return options


def _own_address(host: str) -> str:
    """This machine's address on the route to `host`: the others must be able to reach it there."""
    family, kind, _, _, address = socket.getaddrinfo(host, 9, type=socket.SOCK_DGRAM)[0]
    with socket.socket(family, kind) as probe:  # no packet is sent
        probe.connect(address)
        return str(probe.getsockname()[0])


def _no_limit() -> timedelta:
    return timedelta(seconds=WATCHDOG_SECONDS)


@contextmanager
def _broken_if_it_fails() -> Iterator[None]:
    try:
        yield
    except RuntimeError as error:
        raise GroupBroken(f"an exchange of the group failed: {one_line(error, 160)}") from error
