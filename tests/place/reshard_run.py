"""Training ranks and engine ranks of a reshard, each in its own process, over gloo. benchmarks/reshard.py uses a larger
model, and also measures sending the same bytes with plain gloo."""

from __future__ import annotations

import copy
import os
import socket
import time
from collections import deque
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import msgspec
import torch
from torch import Tensor, nn

from plaudit.config.placement import ResourcesTable
from plaudit.core.model.split import keep_part
from plaudit.core.model.stages import RankPosition
from plaudit.errors import PlauditError, ReceiverLost
from plaudit.models import new_llama
from plaudit.models.weights import Cut
from plaudit.place.channels.group import ChannelGroup, Pending
from plaudit.place.channels.messages import WeightReply, plain, typed
from plaudit.place.channels.receiver import WeightReceiver
from plaudit.place.channels.reshard.receiving import joined
from plaudit.place.channels.reshard.routes import PIECE_BYTES, Box, buckets, needed
from plaudit.place.channels.reshard.sending import ReshardChannel
from plaudit.place.channels.target import PartTarget
from plaudit.place.channels.weights import Layout, Weights
from plaudit.place.channels.wire import SocketWire, serve_wire
from plaudit.place.resharding import shard_weights
from plaudit.place.workers.rank import _taken
from plaudit.train.optim.sharding import Shards, cuts
from plaudit.train.run.orders import Orders
from plaudit.train.run.ranks import join
from tests.place.receiving import Process, fault_on_arrival

SECONDS = 60.0
WIDTH = int(os.environ.get("RESHARD_WIDTH", "256"))


def model(seed: int) -> nn.Module:
    """A model with pieces above and below a mebibyte, and a vocabulary size that is not divisible by the ranks."""
    return new_llama(
        "policy", vocab_size=4001, hidden_size=WIDTH, layers=2, heads=4, kv_heads=2, intermediate_size=8 * WIDTH,
        max_positions=64, seed=seed,
    )  # fmt: skip


def engine_part(place: RankPosition) -> tuple[nn.Module, nn.Module, dict[str, Cut]]:
    """A rank's part of the model, uninitialised, on the CPU; the full model on the meta device; and the cuts."""
    full_model = model(0).to("meta")
    part = copy.deepcopy(full_model)
    cuts = keep_part(part, place)
    return part.to_empty(device="cpu"), full_model, cuts


def engine_parts(layout: Layout, tensor: int, stages: int) -> list[dict[str, Box]]:
    boxes = []
    for rank in range(tensor * stages):
        part, _, cuts = engine_part(RankPosition(rank, tensor, stages))
        boxes.append(needed(layout, part.state_dict(), cuts))
    return boxes


def serve_rank(connection: socket.socket, rank: int, tensor: int, stages: int) -> None:
    torch.set_num_threads(1)
    part, whole, cuts = engine_part(RankPosition(rank, tensor, stages))
    receiver = WeightReceiver(PartTarget(part, whole, cuts))
    fault: dict[str, Any] = {}
    fault_on_arrival(fault)

    def respond(message: dict[str, Any]) -> dict[str, Any]:
        if "look" in message:
            expected = model(message["look"]).state_dict()
            wrong = [
                name
                for name, tensor in part.state_dict().items()
                if not torch.equal(tensor, expected[name] if name not in cuts else cuts[name].of(expected[name]))
            ]
            return {"version": receiver.version, "wrong": wrong, "bytes": Weights.of(part).nbytes}
        if "die" in message or "damage" in message:
            fault.update(message)
            return {}
        if "bare" in message:
            receive_bare(receiver, message["bare"])
            return {}
        data = msgspec.msgpack.encode(message)
        return plain(msgspec.msgpack.decode(_taken(receiver, rank, data), type=WeightReply))

    serve_wire(connection, respond)


def receive_bare(receiver: WeightReceiver, sizes: dict[str, dict[str, int]]) -> None:
    """Receives the given number of bytes from each training rank into preallocated memory with plain gloo."""
    group = receiver._collective[False]._group
    assert group is not None
    mine = {int(sender): size for sender, size in sizes[str(group.rank)].items()}
    buffers = {
        sender: BARE.setdefault((sender, size), torch.ones(size, dtype=torch.uint8)) for sender, size in mine.items()
    }
    for start in range(0, max(mine.values()), PIECE_BYTES):
        pieces = [(sender, flat[start : start + PIECE_BYTES]) for sender, flat in buffers.items()]
        under_way = [group.receive(piece, sender) for sender, piece in pieces if len(piece)]
        for pending in under_way:
            pending.wait(SECONDS)


def send_bare(group: ChannelGroup, sizes: dict[int, int]) -> None:
    """The training rank's side: sends the given number of bytes to each engine rank of the group."""
    buffers = {to: _buffer(to, size) for to, size in sizes.items()}
    under_way: deque[Pending] = deque()
    for start in range(0, max(sizes.values(), default=0), PIECE_BYTES):
        for to, flat in buffers.items():
            if len(piece := flat[start : start + PIECE_BYTES]):
                under_way.append(group.send(piece, to))
            while len(under_way) > 4:
                under_way.popleft().wait(SECONDS)
    for pending in under_way:
        pending.wait(SECONDS)


BARE: dict[int | tuple[int, int], Tensor] = {}


def _buffer(rank: int, size: int) -> Tensor:
    if rank not in BARE:
        BARE[rank] = torch.ones(size, dtype=torch.uint8)
    return BARE[rank]


class EngineWire:
    """A wire to several ranks, like `RanksReceiver`: sends each message to every rank and combines their answers."""

    def __init__(self, name: str, wires: Sequence[SocketWire]) -> None:
        self.name = name
        self.wires = wires
        self.ranks = len(wires)

    def send(self, message: dict[str, Any]) -> None:
        for wire in self.wires:
            wire.send(message)

    def answer(self, seconds: float) -> dict[str, Any]:
        replies, lost = [], None
        for wire in self.wires:
            try:
                replies.append(typed(wire.answer(seconds), WeightReply))
            except ReceiverLost as error:
                lost = error
        if lost is not None:
            raise ReceiverLost(self.name, str(lost))
        error = next((reply.error for reply in replies if reply.error is not None), None)
        checksum = joined([str(reply.checksum) for reply in replies]) if len(replies) > 1 else replies[0].checksum
        in_group = all(reply.in_group for reply in replies)
        return plain(msgspec.structs.replace(replies[0], error=error, checksum=checksum, in_group=in_group))


class Engine:
    """The ranks of an engine, and the sockets to them."""

    def __init__(self, tensor: int, stages: int = 1) -> None:
        pairs = [socket.socketpair() for _ in range(tensor * stages)]
        self.sockets = [ours for ours, _ in pairs]
        self.processes = []
        for rank, (_, theirs) in enumerate(pairs):
            with theirs:
                self.processes.append(Process(serve_rank, theirs, rank, tensor, stages))

    def close(self) -> None:
        for process in self.processes:
            process.kill()
            process.wait()
        for each in self.sockets:
            each.close()


def train_rank(
    rank: int, shape: tuple[int, int], port: int, tensor: int, stages: int, engines: list[list[socket.socket]],
    commands: socket.socket | None,
) -> None:  # fmt: skip
    """A training rank; the first has the sockets to the engines and publishes on command."""
    world = shape[0] * shape[1]
    os.environ |= {
        "RANK": str(rank), "LOCAL_RANK": str(rank), "WORLD_SIZE": str(world), "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": str(port),
    }  # fmt: skip
    torch.set_num_threads(1)
    resources = ResourcesTable(data_parallel=shape[0], tensor_parallel=shape[1], timeout=SECONDS * 2)
    with join(resources, "cpu") as ranks:
        module = model(0)
        shards = None if ranks.mesh is None else Shards(copy.deepcopy(module), ranks)
        weights = shard_weights(module, shards)
        orders = Orders(ranks.everyone)
        channel = ReshardChannel(
            lambda: weights, lambda layout: engine_parts(layout, tensor, stages), orders, seconds=SECONDS
        )

        def become(seed: int) -> None:
            for name, parameter in model(seed).named_parameters():
                if shards is None:
                    module.get_parameter(name).data.copy_(parameter.data)
                else:
                    like, part = shards.parameters[name], parameter.data
                    for cut in cuts(like):
                        part = cut.of(part)
                    like.detach().to_local().copy_(part)

        def bare() -> dict[int, int]:
            """Bytes that this rank sends, by the engine's rank in the group."""
            (plan,) = channel._plans.values()
            return {
                world + to: sum(bucket.nbytes for bucket in buckets(pieces))
                for (sender, to), pieces in plan.routes.items()
                if sender == rank
            }

        if commands is None:
            while (seed := orders.value(None)) is not None:
                if seed < 0:
                    ranks.everyone.gather_values(bare())
                    assert channel._group is not None
                    send_bare(channel._group, bare())
                else:
                    become(seed)
        else:
            wires = [
                [SocketWire(f"engine {i} rank {r}", each) for r, each in enumerate(sockets)]
                for i, sockets in enumerate(engines)
            ]

            def respond(message: dict[str, Any]) -> dict[str, Any]:
                if "ask" in message:  # send a message to each rank of an engine
                    replies = []
                    for wire in wires[message["engine"]]:
                        wire.send(message["ask"])
                        replies.append(wire.answer(SECONDS))
                    return {"found": replies}
                if "ask_one" in message:
                    wire = wires[message["engine"]][message["rank"]]
                    wire.send(message["ask_one"])
                    return wire.answer(SECONDS)
                if "bare" in message:
                    orders.value(-1)
                    sent = ranks.everyone.gather_values(bare(), dict[int, int])
                    engine, group = wires[message["engine"]], channel._group
                    assert group is not None
                    sizes = {
                        str(to): {str(sender): by[to] for sender, by in enumerate(sent) if to in by}
                        for to in range(world, world + len(engine))
                    }
                    begun = time.perf_counter()
                    for wire in engine:
                        wire.send({"bare": sizes})
                    send_bare(group, bare())
                    for wire in engine:
                        wire.answer(SECONDS)
                    return {"seconds": time.perf_counter() - begun, "sizes": sizes}
                seed = message["seed"]
                orders.value(seed)
                become(seed)
                chosen = [EngineWire(f"engine {i}", wires[i]) for i in message["engines"]]
                try:
                    done = channel.publish(weights, message["version"], known(chosen))
                    return {"bytes": done.bytes, "seconds": done.seconds, "extra": done.extra_bytes}
                except PlauditError as error:
                    return {"error": str(error), "kind": type(error).__name__}

            made: dict[str, EngineWire] = {}

            def known(chosen: Sequence[EngineWire]) -> list[EngineWire]:
                return [made.setdefault(each.name, each) for each in chosen]

            serve_wire(commands, respond)
            orders.value(None)
        channel.close()


class Training:
    """All training ranks; `ask` sends a message to the first."""

    def __init__(self, shape: tuple[int, int], engines: Sequence[Engine], tensor: int, stages: int = 1) -> None:
        with socket.socket() as probe:
            probe.bind(("127.0.0.1", 0))
            port = probe.getsockname()[1]
        self._commands, theirs = socket.socketpair()
        sockets = [engine.sockets for engine in engines]
        self.processes = []
        with theirs:
            for rank in range(shape[0] * shape[1]):
                arguments = (sockets, theirs) if rank == 0 else ([], None)
                self.processes.append(Process(train_rank, rank, shape, port, tensor, stages, *arguments))
        self._wire = SocketWire("training rank 0", self._commands)

    def ask(self, **message: Any) -> dict[str, Any]:
        self._wire.send(message)
        return self._wire.answer(4 * SECONDS)

    def close(self) -> None:
        self._commands.close()
        for process in self.processes:
            if process.wait(5.0) is None:
                process.kill()
                process.wait()


@contextmanager
def running(
    shape: tuple[int, int], tensor: int, stages: int = 1, engines: int = 1
) -> Iterator[tuple[Training, list[Engine]]]:
    made = [Engine(tensor, stages) for _ in range(engines)]
    training = Training(shape, made, tensor, stages)
    try:
        yield training, made
    finally:
        training.close()
        for engine in made:
            engine.close()
