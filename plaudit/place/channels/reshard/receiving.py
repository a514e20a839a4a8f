"""The engine's side of a reshard: buckets of all training ranks at once, directly into the engine's own memory."""

from __future__ import annotations

import hashlib
import time
from collections import deque
from collections.abc import Iterator, Sequence

import torch
from torch import Tensor

from plaudit.errors import WeightsRefused
from plaudit.place.channels.channel import Received
from plaudit.place.channels.group import ChannelGroup, Pending
from plaudit.place.channels.messages import ReshardTake
from plaudit.place.channels.reshard.routes import Bucket, Split, TensorPart, TrainingSide, buckets, fingerprint, routes
from plaudit.place.channels.target import ModuleTarget, PartTarget
from plaudit.place.channels.weights import Layout
from plaudit.train.run.checksum import Checksum, as_bytes

AHEAD = 2  # buckets of a rank that are posted ahead: one is checksummed and written while the next is received


class ReshardSide:
    """What this rank of an engine receives in every publication, planned at the first."""

    def __init__(self) -> None:
        self._planned: tuple[object, dict[tuple[int, int], list[TensorPart]]] | None = None

    def take(
        self, body: ReshardTake, group: ChannelGroup, layout: Layout, target: ModuleTarget | PartTarget
    ) -> Received:
        """Receive what this rank needs from the ranks that have it."""
        planned = self._routes(body, group.rank, layout, target)
        streams = [_Stream(group, sender, pieces, target) for (sender, _), pieces in sorted(planned.items())]
        until = time.monotonic() + body.seconds
        # Streams are read in turn, as they are written: all ranks post the buckets of a round before they wait for any
        # of it, so that no cycle of waits arises.
        left = streams
        while left := [stream for stream in left if stream.ahead()]:
            for stream in left:
                stream.take(until - time.monotonic())
        if group.device.type == "cuda":
            torch.cuda.synchronize()
        extra = sum(stream.most_copies for stream in streams)
        return Received(joined([stream.checksum.hexdigest() for stream in streams]), extra)

    def _routes(
        self, body: ReshardTake, rank: int, layout: Layout, target: ModuleTarget | PartTarget
    ) -> dict[tuple[int, int], list[TensorPart]]:
        of = (layout.digest, rank, body.ranks, body.splits, body.parts)
        if self._planned is None or self._planned[0] != of:
            splits = {name: tuple(Split(*each) for each in cuts) for name, cuts in body.splits.items()}
            training = TrainingSide(body.ranks, splits, body.stages, body.homes)
            number, needs = rank - training.ranks, target.needs(layout)
            if body.parts[number] != fingerprint(needs):
                raise WeightsRefused(
                    "the trainer planned other shards for this engine rank than it has: start both from one recipe "
                    "and model directory"
                )
            self._planned = of, routes(layout, training, {number: needs})
        return self._planned[1]


def joined(checksums: Sequence[str]) -> str:
    """Combines several checksums, in order."""
    return hashlib.sha256(" ".join(checksums).encode()).hexdigest()[:32]


class _Stream:
    """Buckets from one training rank."""

    def __init__(
        self, group: ChannelGroup, sender: int, pieces: Sequence[TensorPart], target: ModuleTarget | PartTarget
    ) -> None:
        self.group = group
        self.sender = sender
        self.target = target
        self.checksum = Checksum()
        self.most_copies = 0
        self._coming = self._posted(buckets(pieces))
        self._waiting: deque[tuple[Pending, Bucket, Tensor | None]] = deque()

    def ahead(self) -> bool:
        """Post the next receives; returns whether more will follow."""
        while len(self._waiting) < AHEAD and (posted := next(self._coming, None)) is not None:
            self._waiting.append(posted)
        return bool(self._waiting)

    def take(self, seconds: float) -> None:
        pending, bucket, copy = self._waiting.popleft()
        self.checksum.update(pending.wait(seconds))
        if copy is not None and bucket.last:
            for piece, place in bucket.places():
                data = copy[place : place + piece.nbytes].view(piece.entry.torch_dtype).view(piece.box.shape)
                for view in self.target.views(piece.entry.name, piece.box):
                    view.copy_(data)

    def _posted(self, coming: Iterator[Bucket]) -> Iterator[tuple[Pending, Bucket, Tensor | None]]:
        """Each with the memory of its pieces, where that is not the target's own."""
        memory, own = torch.empty(0), False
        for bucket in coming:
            if bucket.start == 0:
                memory, own = self._memory(bucket)
            flat = memory[bucket.start : bucket.end]
            yield self.group.receive(flat, self.sender), bucket, None if own else memory

    def _memory(self, bucket: Bucket) -> tuple[Tensor, bool]:
        """The memory for all pieces of a bucket, and whether it is the target's own."""
        if len(bucket.pieces) == 1:
            (piece,) = bucket.pieces
            views = self.target.views(piece.entry.name, piece.box)
            if len(views) == 1 and views[0].is_contiguous() and views[0].device.type == self.group.device.type:
                return as_bytes(views[0]), True
        size = bucket.packed_size
        self.most_copies = max(self.most_copies, AHEAD * size)
        return torch.empty(size, dtype=torch.uint8, device=self.group.device), False
