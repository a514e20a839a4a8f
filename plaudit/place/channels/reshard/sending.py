"""The training ranks' side of a reshard: each sends every engine rank the slices that it needs of the sender's shards.

    main rank -> engines         prepare, join   as for the collective channel: a group of all training and engine ranks
              -> training ranks  join            the same
              -> engines         take            the splits of tensors over the training ranks; all answer at the end
              -> training ranks  send            each reports the checksums of what it sent

Routes are planned once, from the two layouts (routes.py). Nothing is gathered: no rank ever has more than it trains,
and it sends directly from its shards. All bytes are checksummed on both sides, for every pair of ranks, while the next
ones are in flight. A receiver or a training rank that dies breaks the group; the next publication makes a new one.
"""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import replace
from typing import Any, Literal

import msgspec
import torch
from torch import Tensor
from torch.distributed.tensor import DTensor

from plaudit.errors import ChannelError, WeightsRefused
from plaudit.place.channels.channel import DEADLINE, Exchange, Publication, Publisher, Wire
from plaudit.place.channels.collective import GRACE_SECONDS, WINDOW_BYTES
from plaudit.place.channels.group import ChannelGroup, Pending, Rendezvous
from plaudit.place.channels.messages import CollectivePrepare, Invitation, ReshardTake
from plaudit.place.channels.reshard.receiving import joined
from plaudit.place.channels.reshard.routes import (
    Box,
    Bucket,
    Split,
    TensorPart,
    TrainingSide,
    buckets,
    fingerprint,
    routes,
)
from plaudit.place.channels.weights import Layout, Weights
from plaudit.train.optim.sharding import split_of
from plaudit.train.run.checksum import Checksum, as_bytes
from plaudit.train.run.orders import Orders
from plaudit.train.run.ranks import Group


class JoinOrder(msgspec.Struct, tag="join", frozen=True):
    invitation: Invitation
    seconds: float


class SendOrder(msgspec.Struct, tag="send", frozen=True):
    engines: int
    seconds: float


class Outcome(msgspec.Struct, frozen=True):
    """Of an order at one rank. checksums: of what it sent to each engine rank."""

    error: str | None = None
    checksums: dict[int, str] = {}
    extra_bytes: int = 0


class ReshardChannel:
    """weights   this rank's shards, under the names of the whole module
    parts     what each rank of an engine needs, by entry
    orders    by which the main rank makes the others take part; it alone publishes
    stages    of a pipeline: which stage has which tensor, and its splits there
    """

    def __init__(
        self, weights: Callable[[], Weights], parts: Callable[[Layout], list[dict[str, Box]]],
        orders: Orders, backend: Literal["gloo", "nccl"] = "gloo", *, host: str = "127.0.0.1",
        seconds: float = DEADLINE, stages: Callable[[], TrainingSide] | None = None,
    ) -> None:  # fmt: skip
        self.weights = weights
        self.stages = stages
        self.parts = parts
        self.orders = orders
        self.ranks = orders.group
        self.backend = backend
        self.host = host
        self._publisher = Publisher(seconds)
        self._rendezvous: Rendezvous | None = None
        self._group: ChannelGroup | None = None
        self._members: list[Wire] = []
        self._plans: dict[tuple[str, int], RoutePlan] = {}
        if self.ranks.index:
            orders.carry_out = self._carry_out

    def publish(self, weights: Weights, version: int, wires: Sequence[Wire]) -> Publication:
        exchange = self._publisher.begin(version)
        try:
            return self._publish(weights, exchange, wires)
        except BaseException:
            self._drop_group()
            raise

    def close(self) -> None:
        self._drop_group()
        self._rendezvous = None

    def _publish(self, weights: Weights, exchange: Exchange, wires: Sequence[Wire]) -> Publication:
        layout, plan = weights.layout, self._plan(weights, len(wires))
        group = self._joined_group(exchange, wires, layout)
        parts = tuple(fingerprint(needs) for needs in plan.needs)
        splits: dict[str, Any] = dict(plan.training.splits)
        training = plan.training
        take = ReshardTake(
            group.id, exchange.left, training.ranks, splits, parts, training.stages, dict(training.homes)
        )
        exchange.send(wires, layout, take)
        outcomes = self._all_carry_out(SendOrder(len(wires), exchange.left), exchange, wires)
        answers = exchange.answers(wires)
        checksums = plan.expected([outcome.checksums for outcome in outcomes])
        for wire, answer in zip(wires, answers, strict=True):
            mine, checksums = checksums[: wire.ranks], checksums[wire.ranks :]
            sent = mine[0] if len(mine) == 1 else joined(mine)
            if (answer.version, answer.checksum) != (exchange.version, sent):
                raise WeightsRefused(
                    f"{wire.name} has version {answer.version} with checksum {answer.checksum}, expected version "
                    f"{exchange.version} with {sent}: the weights were damaged on the way; publish again"
                )
        extra = sum(outcome.extra_bytes for outcome in outcomes) + sum(answer.extra_bytes for answer in answers)
        return Publication(exchange.version, exchange.elapsed, layout.nbytes, extra)

    def _joined_group(self, exchange: Exchange, wires: Sequence[Wire], layout: Layout) -> ChannelGroup:
        """A group of all training ranks and these receivers: the existing one, or a new one."""
        group = self._group
        answers = exchange.request(wires, layout, CollectivePrepare(None if group is None else group.id))
        if group is not None and list(wires) == self._members and all(answer.in_group for answer in answers):
            return group
        self._drop_group()
        if self._rendezvous is None:
            self._rendezvous = Rendezvous(self.host, exchange.seconds)
        rank = self.ranks.size
        invitation = self._rendezvous.invitation(self.backend, rank + sum(wire.ranks for wire in wires))
        for wire in wires:
            join = msgspec.structs.replace(invitation, rank=rank, seconds=exchange.left)
            exchange.send([wire], layout, CollectivePrepare(join=join))
            rank += wire.ranks
        if not exchange.lost:  # otherwise the others would wait for a group that cannot form
            self._all_carry_out(JoinOrder(invitation, exchange.left), exchange, wires)
        exchange.answers(wires)
        assert self._group is not None, "losses are raised with the answers"
        self._members = list(wires)
        return self._group

    def _all_carry_out(self, order: JoinOrder | SendOrder, exchange: Exchange, wires: Sequence[Wire]) -> list[Outcome]:
        """On every training rank, including this one."""
        self.orders.give(msgspec.msgpack.encode(order))
        outcomes: list[Outcome] = self.ranks.gather_values(self._outcome(order), Outcome)
        for rank, outcome in enumerate(outcomes):
            if outcome.error is not None:
                # The wires report the cause: dead receivers are lost, live ones answer that the group broke for them
                # too.
                self._drop_group()
                with suppress(WeightsRefused):
                    exchange.answers(wires, GRACE_SECONDS)
                raise WeightsRefused(f"training rank {rank}: {outcome.error}; every receiver is alive: publish again")
        return outcomes

    def _carry_out(self, data: bytes) -> None:
        """Executed on all ranks but the main one."""
        order = msgspec.msgpack.decode(data, type=JoinOrder | SendOrder)
        self.ranks.gather_values(self._outcome(order), Outcome)

    def _outcome(self, order: JoinOrder | SendOrder) -> Outcome:
        try:
            if isinstance(order, JoinOrder):
                self._drop_group()
                store = None if self._rendezvous is None else self._rendezvous.store
                self._group = ChannelGroup(order.invitation, self.ranks.index, order.seconds, store)
                return Outcome()
            return self._send(self.weights(), order)
        except ChannelError as error:
            self._drop_group()  # so that no other rank waits for this one
            return Outcome(str(error))

    def _send(self, weights: Weights, order: SendOrder) -> Outcome:
        assert self._group is not None, "the main rank sends to a group that all have joined"
        plan, group, rank = self._plan(weights, order.engines), self._group, self.ranks.index
        until = time.monotonic() + order.seconds
        streams = {
            receiver: _Stream(weights, plan.training, rank, pieces, group.device)
            for (sender, receiver), pieces in sorted(plan.routes.items())
            if sender == rank
        }
        under_way: deque[Pending] = deque()
        bytes_under_way = 0
        for receiver, flat in _in_turn(streams):
            under_way.append(group.send(flat, self.ranks.size + receiver))
            bytes_under_way += flat.nbytes
            streams[receiver].checksum.update(flat)
            while bytes_under_way > WINDOW_BYTES:
                bytes_under_way -= under_way.popleft().wait(until - time.monotonic()).nbytes
        for pending in under_way:
            pending.wait(until - time.monotonic())
        checksums = {receiver: stream.checksum.hexdigest() for receiver, stream in streams.items()}
        return Outcome(None, checksums, max((stream.most_copies for stream in streams.values()), default=0))

    def _plan(self, weights: Weights, engines: int) -> RoutePlan:
        key = weights.layout.digest, engines
        if key not in self._plans:
            training = TrainingSide(self.ranks.size, {}) if self.stages is None else self.stages()
            training = replace(training, splits={**training.splits, **_splits(weights, self.ranks)})
            self._plans[key] = RoutePlan(weights.layout, training, self.parts(weights.layout) * engines)
        return self._plans[key]

    def _drop_group(self) -> None:
        if self._group is not None:
            self._group.close()
        self._group, self._members = None, []


class RoutePlan:
    """needs   of each engine rank"""

    def __init__(self, layout: Layout, training: TrainingSide, needs: list[dict[str, Box]]) -> None:
        self.training = training
        self.needs = needs
        self.routes = routes(layout, training, dict(enumerate(needs)))

    def expected(self, sent: Sequence[Mapping[int, str]]) -> list[str]:
        """The checksum of each engine rank, combined from the training ranks that send to it."""
        receivers = range(len(self.needs))
        return [joined([checksums[r] for checksums in sent if r in checksums]) for r in receivers]


class _Stream:
    """Buckets from this rank to one engine rank."""

    def __init__(
        self, weights: Weights, training: TrainingSide, rank: int, pieces: Sequence[TensorPart], device: torch.device
    ) -> None:
        self.weights = weights
        self.training = training
        self.rank = rank
        self.device = device
        self.checksum = Checksum()
        self.most_copies = 0
        self.flats = self._flats(buckets(pieces))

    def _flats(self, coming: Iterator[Bucket]) -> Iterator[Tensor]:
        memory = torch.empty(0)
        for bucket in coming:
            if bucket.start == 0:
                memory = self._memory(bucket)
            yield memory[bucket.start : bucket.end]

    def _memory(self, bucket: Bucket) -> Tensor:
        """All pieces of a bucket in one row. A contiguous, aligned one is not copied."""
        if len(bucket.pieces) == 1:
            view = self._view(bucket.pieces[0])
            flat = as_bytes(view.to(self.device))
        else:
            flat = torch.empty(bucket.packed_size, dtype=torch.uint8, device=self.device)
            for piece, place in bucket.places():
                view = self._view(piece)
                flat[place : place + piece.nbytes].view(view.dtype).view(view.shape).copy_(view)
        if flat.data_ptr() != view.data_ptr():
            self.most_copies = max(self.most_copies, flat.nbytes + WINDOW_BYTES)
        return flat

    def _view(self, piece: TensorPart) -> Tensor:
        tensor = self.weights.tensors[piece.entry.name]
        local = tensor.to_local() if isinstance(tensor, DTensor) else tensor
        return local[piece.box.within(self.training.box(piece.entry, self.rank))]


def _in_turn(streams: Mapping[int, _Stream]) -> Iterator[tuple[int, Tensor]]:
    """One bucket for each engine rank in turn."""
    left = dict(streams)
    while left:
        for receiver in list(left):
            flat = next(left[receiver].flats, None)
            if flat is None:
                del left[receiver]
            else:
                yield receiver, flat


def _splits(weights: Weights, ranks: Group) -> dict[str, tuple[Split, ...]]:
    """The splits of tensors over the ranks, checked against this rank's shards."""
    splits: dict[str, tuple[Split, ...]] = {}
    for entry in weights.layout.entries:
        tensor = weights.tensors[entry.name]
        if isinstance(tensor, DTensor):
            splits[entry.name] = tuple(Split(*cut) for cut in split_of(tensor))
            local = tuple(tensor.to_local().shape)
            box = TrainingSide(ranks.size, splits).box(entry, ranks.index)
            if box.shape != local:
                raise WeightsRefused(
                    f"{entry.name!r} is {list(local)} of {list(entry.shape)} on training rank {ranks.index}, but "
                    f'{tensor.placements} implies {list(box.shape)}: set placement.channel = "collective"'
                )
    return splits
