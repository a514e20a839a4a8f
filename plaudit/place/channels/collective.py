"""Weights by broadcast of torch.distributed, over gloo or NCCL: between processes or machines.

    trainer -> receivers   prepare   layout and version; all answer whether they are in the group
                           join      if one is not: a new group, with its id and address
                           take      then the broadcasts; all answer with a checksum

A tensor of a mebibyte or more is sent by itself, from its own memory into the engine's own memory where both are
contiguous on the group's device; smaller ones are packed into flat buckets. Sharded tensors are gathered one by one,
when they are sent. All bytes are checksummed on both sides, while the next bucket is in flight.

A receiver that dies breaks the group at once (or at the deadline, if it was only stopped). The wires report which one
it was, and the next publication makes a new group of the remaining receivers.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator, Sequence
from typing import Literal, NamedTuple

import torch
from msgspec.structs import replace
from torch import Tensor

from plaudit.errors import WeightsRefused
from plaudit.place.channels.channel import (
    DEADLINE,
    Exchange,
    Publication,
    Publisher,
    Received,
    Target,
    Wire,
    check_acknowledged,
)
from plaudit.place.channels.group import ChannelGroup, GroupBroken, Pending, Rendezvous
from plaudit.place.channels.messages import CollectivePrepare, CollectiveTake
from plaudit.place.channels.weights import ALIGNMENT, Entry, Layout, Weights
from plaudit.train.run.checksum import BLOCK_BYTES, Checksum, as_bytes

BUCKET_BYTES = 1 << 20  # smaller tensors are packed together up to this size
PIECE_BYTES = 16 * BLOCK_BYTES  # larger ones are sent in pieces: one is checksummed while the next is in flight
WINDOW_BYTES = 4 * PIECE_BYTES  # in flight at once: enough to send while a side computes checksums or waits
GRACE_SECONDS = 5.0  # for live receivers to answer after the deadline


class CollectiveChannel:
    """backend   "gloo", or "nccl" where trainer and every receiver have a GPU of their own
    host      this machine's address, at which receivers connect to the trainer
    """

    def __init__(
        self, backend: Literal["gloo", "nccl"] = "gloo", *, host: str = "127.0.0.1", seconds: float = DEADLINE
    ) -> None:
        self.backend = backend
        self.host = host
        self._publisher = Publisher(seconds)
        self._rendezvous: Rendezvous | None = None
        self._group: ChannelGroup | None = None
        self._members: list[Wire] = []

    def publish(self, weights: Weights, version: int, wires: Sequence[Wire]) -> Publication:
        exchange = self._publisher.begin(version)
        pairs = iter(weights)
        try:
            if not wires:
                return Publication(version, exchange.elapsed, weights.nbytes, 0)
            return self._publish(weights.layout, pairs, exchange, wires)
        except BaseException:
            self._drop_group()
            raise
        finally:
            for _ in pairs:  # ranks that gather with this one wait for it
                pass

    def close(self) -> None:
        self._drop_group()
        self._rendezvous = None

    def _publish(
        self, layout: Layout, pairs: Iterator[tuple[str, Tensor]], exchange: Exchange, wires: Sequence[Wire]
    ) -> Publication:
        group = self._joined_group(exchange, wires, layout)
        exchange.send(wires, layout, CollectiveTake(group.id, exchange.left))
        checksum = Checksum()
        try:
            largest = _send(group, layout, pairs, checksum, exchange)
        except GroupBroken as error:
            # The wires report the cause: dead receivers are lost, live ones answer that the group broke for them too.
            exchange.answers(wires, GRACE_SECONDS)
            raise WeightsRefused(f"{error}; every receiver is alive: publish again") from error
        answers = exchange.answers(wires)
        check_acknowledged(wires, answers, exchange.version, checksum.hexdigest())
        extra = largest + sum(answer.extra_bytes for answer in answers)
        return Publication(exchange.version, exchange.elapsed, layout.nbytes, extra)

    def _joined_group(self, exchange: Exchange, wires: Sequence[Wire], layout: Layout) -> ChannelGroup:
        """A group of exactly these receivers: the existing one, or a new one."""
        group = self._group
        have = None if group is None else group.id
        answers = exchange.request(wires, layout, CollectivePrepare(have))
        if group is not None and list(wires) == self._members and all(answer.in_group for answer in answers):
            return group
        self._drop_group()
        if self._rendezvous is None:
            self._rendezvous = Rendezvous(self.host, exchange.seconds)
        invitation = self._rendezvous.invitation(self.backend, 1 + sum(wire.ranks for wire in wires))
        rank = 1
        for wire in wires:
            join = replace(invitation, rank=rank, seconds=exchange.left)
            exchange.send([wire], layout, CollectivePrepare(join=join))
            rank += wire.ranks
        try:
            if not exchange.lost:  # otherwise the others would wait for a group that cannot form
                self._group = ChannelGroup(invitation, 0, exchange.left, self._rendezvous.store)
        except GroupBroken as error:
            exchange.answers(wires, GRACE_SECONDS)
            raise WeightsRefused(f"{error}; every receiver is alive: publish again") from error
        exchange.answers(wires)
        assert self._group is not None, "losses are raised with the answers"
        self._members = list(wires)
        return self._group

    def _drop_group(self) -> None:
        if self._group is not None:
            self._group.close()
        self._group, self._members = None, []


class CollectiveSide:
    def __init__(self) -> None:
        self._group: ChannelGroup | None = None

    def prepare(self, body: CollectivePrepare) -> bool:
        """Whether this receiver is in the group."""
        if body.join is not None:
            self.close()
            self._group = ChannelGroup(body.join, body.join.rank, body.join.seconds)
        return self._group is not None and self._group.id == body.group

    def group(self, id: str) -> ChannelGroup:
        if self._group is None or self._group.id != id:
            raise WeightsRefused(f"the engine is not in the group {id}: publish again")
        return self._group

    def take(self, body: CollectiveTake, layout: Layout, target: Target) -> Received:
        group = self.group(body.group)
        arrivals = _Arrivals(group, layout, target, body.seconds)
        try:
            target.load(arrivals)
        except BaseException:
            self.close()  # so that no other rank waits for this one
            raise
        if group.device.type == "cuda":
            torch.cuda.synchronize()
        return Received(arrivals.checksum.hexdigest(), arrivals.extra_bytes)

    def close(self) -> None:
        if self._group is not None:
            self._group.close()
        self._group = None


class _Arrivals:
    """Iterates over the tensors that are not in the target's own memory yet; all of them are checksummed."""

    def __init__(self, group: ChannelGroup, layout: Layout, target: Target, seconds: float) -> None:
        self.group = group
        self.layout = layout
        self.target = target
        self.seconds = seconds
        self.checksum = Checksum()
        self.extra_bytes = 0

    def __iter__(self) -> Iterator[tuple[str, Tensor]]:
        under_way = _InFlight()
        for entries in self.layout.buckets(BUCKET_BYTES):
            flat, own = self._memory(entries)
            if not own:
                under_way.hold(flat)
            for piece, last in _pieces(flat):
                complete = _Bucket(entries, flat) if last and not own else None
                under_way.add(self.group.broadcast(piece, self.seconds), complete)
                while under_way.full:
                    yield from self._arrived(*under_way.pop())
        while under_way:
            yield from self._arrived(*under_way.pop())
        self.extra_bytes = under_way.most_copies

    def _memory(self, bucket: tuple[Entry, ...]) -> tuple[Tensor, bool]:
        """The memory to receive a bucket in, and whether it is the target's own."""
        home = self.target.home(bucket[0].name) if len(bucket) == 1 else None
        if home is not None and home.device.type == self.group.device.type and home.numel():
            return as_bytes(home), True
        return torch.empty(_packed_size(bucket), dtype=torch.uint8, device=self.group.device), False

    def _arrived(self, pending: Pending, complete: _Bucket | None) -> Iterator[tuple[str, Tensor]]:
        self.checksum.update(pending.wait(self.seconds))
        if complete is not None:
            for entry, view in _unpacked(complete.entries, complete.flat):
                yield entry.name, view


class _Bucket(NamedTuple):
    """A bucket in separate memory."""

    entries: tuple[Entry, ...]
    flat: Tensor


class _InFlight:
    """Broadcasts in flight, in order, each with the bucket that it completes, if that has separate memory.

    full          whether the limit in flight is reached
    most_copies   peak memory of such buckets
    """

    def __init__(self) -> None:
        self._waiting: deque[tuple[Pending, _Bucket | None]] = deque()
        self._bytes = self._copies = self.most_copies = 0

    def hold(self, flat: Tensor) -> None:
        """Keep a bucket's separate memory until the bucket is complete."""
        self._copies += flat.nbytes
        self.most_copies = max(self.most_copies, self._copies)

    def add(self, pending: Pending, bucket: _Bucket | None) -> None:
        self._waiting.append((pending, bucket))
        self._bytes += pending.flat.nbytes

    def pop(self) -> tuple[Pending, _Bucket | None]:
        pending, bucket = self._waiting.popleft()
        self._bytes -= pending.flat.nbytes
        self._copies -= 0 if bucket is None else bucket.flat.nbytes
        return pending, bucket

    @property
    def full(self) -> bool:
        return self._bytes >= WINDOW_BYTES

    def __bool__(self) -> bool:
        return bool(self._waiting)


def _send(
    group: ChannelGroup, layout: Layout, pairs: Iterator[tuple[str, Tensor]], checksum: Checksum, exchange: Exchange
) -> int:
    """Send all tensors, in buckets; returns the peak memory of copies."""
    under_way = _InFlight()
    for bucket in layout.buckets(BUCKET_BYTES):
        tensors = [next(pairs)[1] for _ in bucket]
        flat = _packed(bucket, tensors, group.device)
        copied = flat.data_ptr() != tensors[0].data_ptr()
        if copied:
            under_way.hold(flat)
        for piece, last in _pieces(flat):
            complete = _Bucket(bucket, flat) if last and copied else None
            under_way.add(group.broadcast(piece, exchange.left), complete)
            checksum.update(piece)
            while under_way.full:
                under_way.pop()[0].wait(exchange.left)
    while under_way:
        under_way.pop()[0].wait(exchange.left)
    return under_way.most_copies


def _packed(bucket: tuple[Entry, ...], tensors: Sequence[Tensor], device: torch.device) -> Tensor:
    """Their bytes in one row, each aligned. One tensor that is already contiguous and aligned is not copied."""
    if len(bucket) == 1 and tensors[0].numel():
        return as_bytes(tensors[0].to(device))
    flat = torch.empty(_packed_size(bucket), dtype=torch.uint8, device=device)
    for (_, view), tensor in zip(_unpacked(bucket, flat), tensors, strict=True):
        view.copy_(tensor)
    return flat


def _packed_size(bucket: tuple[Entry, ...]) -> int:
    if len(bucket) == 1:
        return max(bucket[0].nbytes, 1)
    return max(sum(_aligned(entry.nbytes) for entry in bucket), 1)


def _unpacked(bucket: tuple[Entry, ...], flat: Tensor) -> Iterator[tuple[Entry, Tensor]]:
    place = 0
    for entry in bucket:
        yield entry, flat[place : place + entry.nbytes].view(entry.torch_dtype).view(entry.shape)
        place += _aligned(entry.nbytes)


def _aligned(size: int) -> int:
    return -(-size // ALIGNMENT) * ALIGNMENT


def _pieces(flat: Tensor) -> Iterator[tuple[Tensor, bool]]:
    """In order, each with whether it is the last."""
    size = flat.numel()
    for start in range(0, size, PIECE_BYTES):
        yield flat[start : start + PIECE_BYTES], start + PIECE_BYTES >= size
