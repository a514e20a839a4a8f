"""A small model in its own process that receives weights, in place of an engine."""

from __future__ import annotations

import multiprocessing
import os
import signal
import socket
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import Shard, distribute_tensor

from plaudit.place.channels.channel import answered
from plaudit.place.channels.collective import CollectiveChannel
from plaudit.place.channels.disk import DiskChannel
from plaudit.place.channels.receiver import WeightReceiver
from plaudit.place.channels.shared import SharedChannel
from plaudit.place.channels.weights import Weights, named_tensors
from plaudit.place.channels.wire import SocketWire, serve_wire
from plaudit.train.run.checksum import Checksum


class Small(nn.Module):
    """Tied, with a buffer, an empty tensor, other dtypes, a matrix above a mebibyte and many small ones."""

    def __init__(self, seed: int, *, tied: bool = True, width: int = 640) -> None:
        super().__init__()
        torch.manual_seed(seed)
        self.embed = nn.Embedding(50, 16)
        self.big = nn.Linear(width, 480)
        self.layers = nn.ModuleList(nn.Linear(16, 16) for _ in range(4))
        self.narrow = nn.Parameter(torch.randn(7, 3).to(torch.bfloat16))
        self.nothing = nn.Parameter(torch.empty(0, 4))
        self.head = nn.Linear(16, 50, bias=False)
        if tied:
            self.head.weight = self.embed.weight
        else:
            self.head.weight.data.copy_(self.embed.weight.data)
        self.register_buffer("counts", torch.randint(0, 100, (5,)))


def digest(module: nn.Module) -> str:
    """Checksum of the values under every name, independent of ties and devices."""
    checksum = Checksum()
    for _, tensor in sorted(module.state_dict().items()):
        checksum.update(tensor.cpu())
    return checksum.hexdigest()


# A server that has imported torch once and forks: a receiver is up in milliseconds.
_CONTEXT = multiprocessing.get_context("forkserver")
_CONTEXT.set_forkserver_preload(["tests.place.receiving"])


class Process:
    """A forked child process, as wires and tests use it."""

    def __init__(self, target: Callable[..., None], *arguments: object) -> None:
        self._process = _CONTEXT.Process(target=target, args=arguments, daemon=True)
        self._process.start()
        self.pid = self._process.pid or 0
        self.kill = self._process.kill

    def wait(self, timeout: float = 10.0) -> int | None:
        self._process.join(timeout)
        return self._process.exitcode


class Receiving:
    """The other process, and the wire to it."""

    def __init__(self, name: str, **arguments: str) -> None:
        ours, theirs = socket.socketpair()
        with theirs:
            self.process = Process(serve, theirs, arguments)
        self.wire = SocketWire(f"{name} (pid {self.process.pid})", ours, self.process)  # type: ignore[arg-type]
        self._socket = ours

    def look(self) -> dict[str, Any]:
        """Version, digest, addresses and shared mappings, as the other process has them."""
        self.wire.send({"look": True})
        return self.wire.answer(30.0)

    def damage(self) -> None:
        """The next data that it receives is corrupted on arrival."""
        self.wire.send({"damage": True})
        self.wire.answer(30.0)

    def die_in_midst(self, how: int = signal.SIGKILL) -> None:
        """It sends itself a signal at the second tensor of the next publication."""
        self.wire.send({"die": int(how)})
        self.wire.answer(30.0)

    def close(self) -> None:
        self._socket.close()
        self.process.kill()
        self.process.wait()


@contextmanager
def receiving(count: int = 1, **arguments: str) -> Iterator[list[Receiving]]:
    others = [Receiving(f"rollout {i}", **arguments) for i in range(count)]
    try:
        for other in others:
            other.look()  # wait for its start, so that later timings and timeouts do not include it
        yield others
    finally:
        for other in others:
            other.close()


def fault_on_arrival(fault: dict[str, Any]) -> None:
    """In this process, the fault in `fault` is applied once, to the second tensor that arrives."""
    update, tensors = Checksum.update, []

    def arrived(self: Checksum, tensor: Tensor) -> None:
        if fault and tensor.numel():
            tensors.append(tensor)
            if len(tensors) == 2 and "die" in fault:
                os.kill(os.getpid(), fault.pop("die"))
            elif len(tensors) == 2 and fault.pop("damage", False):
                tensor.view(-1).view(torch.uint8)[1] ^= 4
        update(self, tensor)

    Checksum.update = arrived  # type: ignore[method-assign]


def serve(connection: socket.socket, arguments: dict[str, str]) -> None:
    device = arguments.get("device", "cpu")
    module = Small(int(arguments.get("seed", "99")), tied=arguments.get("tied", "1") == "1").to(device)
    receiver = WeightReceiver(module)
    fault: dict[str, Any] = {}
    fault_on_arrival(fault)

    def respond(message: dict[str, Any]) -> dict[str, Any]:
        if "look" in message:
            mapped = sorted({weight.data_ptr() for weight in Weights.of(module).tensors.values()})
            lines = [line.split(maxsplit=5) for line in Path("/proc/self/maps").read_text().splitlines()]
            shared = {line[5] for line in lines if len(line) == 6 and line[5].startswith(("/memfd:", "/dev/shm"))}
            return {
                "version": receiver.version, "digest": digest(module), "addresses": mapped, "shared": sorted(shared),
            }  # fmt: skip
        if "damage" in message or "die" in message:
            fault.update(message)
            return {}
        return answered(receiver, message)

    torch.set_num_threads(1)
    serve_wire(connection, respond)


def publish_and_be_killed(wire: socket.socket, ready: socket.socket, device: str = "cpu") -> None:
    """A trainer in its own process: publishes once through shared memory, then kills itself."""
    module = Small(1).to(device)
    SharedChannel(module).publish(Weights.of(module), 1, [SocketWire("rollout 0", wire)])
    ready.sendall(digest(module).encode())
    os.kill(os.getpid(), signal.SIGKILL)


def publish_sharded(rank: int, meeting: str, kind: str, wire: socket.socket, result: socket.socket) -> None:
    """One of two trainers, each with half of every matrix. The first has the wire; both publish."""
    torch.set_num_threads(1)
    store = torch.distributed.FileStore(f"{meeting}/store", 2)
    torch.distributed.init_process_group("gloo", store=store, rank=rank, world_size=2)
    mesh = init_device_mesh("cpu", (2,))
    module = Small(1)
    published = digest(module)
    tensors: dict[str, Tensor] = {}
    halves: dict[int, Tensor] = {}
    for name, tensor in named_tensors(module).items():
        if tensor.ndim == 2 and id(tensor) not in halves:
            halves[id(tensor)] = distribute_tensor(tensor.detach(), mesh, [Shard(0)])
        tensors[name] = halves.get(id(tensor), tensor)
    channel = {
        "disk": lambda: DiskChannel(f"{meeting}/weights"), "collective": CollectiveChannel, "shared": SharedChannel,
    }[kind]()  # fmt: skip
    wires = [SocketWire("rollout 0", wire)] if rank == 0 else []
    for version in (1, 2):
        channel.publish(Weights(tensors), version, wires)
    if rank == 0:
        result.sendall(published.encode())
    torch.distributed.destroy_process_group()
