"""Which slice of which tensor goes from which training rank to which engine rank: a pure function of the two layouts.

A slice of a tensor is a box: a range in every dimension. On the training side a tensor is split over the dimensions of
a mesh, one after the other (`Split`); ranks that have the same box are replicas, of which one sends. On the engine's
side a rank has one box of a tensor or none. A piece is the intersection of two boxes. Both sides compute the same
pieces in the same order, so that only their bytes are transferred.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from math import prod
from typing import NamedTuple

from plaudit.models.weights import Cut
from plaudit.place.channels.weights import Entry, Layout
from plaudit.train.run.checksum import BLOCK_BYTES

PIECE_BYTES = 16 * BLOCK_BYTES  # larger pieces are sent in buckets: one is checksummed while the next is in flight
PACKED_BYTES = 1 << 20  # smaller pieces for one rank are packed together up to this size
ALIGNMENT = 16  # alignment of pieces that are packed together, whatever their dtypes


class Box(NamedTuple):
    """start .. end - 1 of every dimension."""

    starts: tuple[int, ...]
    ends: tuple[int, ...]

    @property
    def shape(self) -> tuple[int, ...]:
        return tuple(end - start for start, end in zip(self.starts, self.ends, strict=True))

    def within(self, outer: Box) -> tuple[slice, ...]:
        """Its slices in the memory of an enclosing box."""
        places = zip(self.starts, self.ends, outer.starts, strict=True)
        return tuple(slice(start - first, end - first) for start, end, first in places)


def whole_box(shape: Sequence[int]) -> Box:
    return Box((0,) * len(shape), tuple(shape))


def meeting(one: Box, other: Box) -> Box | None:
    starts = tuple(map(max, one.starts, other.starts))
    ends = tuple(map(min, one.ends, other.ends))
    return Box(starts, ends) if all(start < end for start, end in zip(starts, ends, strict=True)) else None


def cut_box(box: Box, dim: int, index: int, count: int) -> Box:
    """Shard `index` of `count` along a dimension, as torch.chunk splits: the last ones may be smaller, or empty."""
    start, end = box.starts[dim], box.ends[dim]
    size = -(-(end - start) // count)
    return _ranged(box, dim, *(min(start + i * size, end) for i in (index, index + 1)))


def _ranged(box: Box, dim: int, start: int, end: int) -> Box:
    """The box with another range of one dimension."""
    return Box((*box.starts[:dim], start, *box.starts[dim + 1 :]), (*box.ends[:dim], end, *box.ends[dim + 1 :]))


def kept_box(whole: Box, cut: Cut) -> Box:
    return _ranged(whole, cut.dim, cut.start, cut.end)


class Split(NamedTuple):
    """A split over one dimension of a mesh along one dimension of the tensor: `parts` ranks have one shard each, and
    each of these ranks is `stride` after the previous one."""

    stride: int
    parts: int
    dim: int


@dataclass(frozen=True)
class TrainingSide:
    """ranks    how many
    splits   of each tensor, in order; a tensor that is not listed is whole on each rank
    stages   number of pipeline stages with equally many consecutive ranks
    homes    for several stages, the stage of each tensor; one that is not listed is on all
    """

    ranks: int
    splits: Mapping[str, tuple[Split, ...]]
    stages: int = 1
    homes: Mapping[str, int] = field(default_factory=dict)

    def box(self, entry: Entry, rank: int) -> Box:
        box = whole_box(entry.shape)
        for split in self.splits.get(entry.name, ()):
            box = cut_box(box, split.dim, rank // split.stride % split.parts, split.parts)
        return box

    def holders(self, entry: Entry) -> dict[Box, list[int]]:
        """The ranks that have each box."""
        ranks_by_box: dict[Box, list[int]] = {}
        each, home = self.ranks // self.stages, self.homes.get(entry.name)
        for rank in range(self.ranks) if home is None else range(home * each, (home + 1) * each):
            ranks_by_box.setdefault(self.box(entry, rank), []).append(rank)
        return ranks_by_box


class TensorPart(NamedTuple):
    entry: Entry
    box: Box

    @property
    def nbytes(self) -> int:
        return prod(self.box.shape) * self.entry.torch_dtype.itemsize


def routes(
    layout: Layout, training: TrainingSide, needs: Mapping[int, Mapping[str, Box]]
) -> dict[tuple[int, int], list[TensorPart]]:
    """By (training rank, engine rank), in the order of the entries. `needs`: per engine rank, by entry. Replicas take
    turns from entry to entry and from engine rank to engine rank, so that all of them send."""
    parts: dict[tuple[int, int], list[TensorPart]] = {}
    for number, entry in enumerate(layout.entries):
        holders = training.holders(entry)
        for receiver, boxes in needs.items():
            if entry.name not in boxes:
                continue
            for box, ranks in holders.items():
                met = meeting(box, boxes[entry.name])
                if met is not None:
                    sender = ranks[(number + receiver) % len(ranks)]
                    parts.setdefault((sender, receiver), []).append(TensorPart(entry, met))
    return parts


class Bucket(NamedTuple):
    """Bytes that are sent together: `start` .. `end` - 1 of consecutive whole pieces, or of a single one."""

    pieces: tuple[TensorPart, ...]
    start: int
    end: int

    @property
    def nbytes(self) -> int:
        return self.end - self.start

    @property
    def packed_size(self) -> int:
        """Bytes of all of its pieces."""
        return packed_size(self.pieces)

    @property
    def last(self) -> bool:
        """Whether it completes its pieces."""
        return self.end == self.packed_size

    def places(self) -> Iterator[tuple[TensorPart, int]]:
        """Its pieces, and the offset of each among its bytes if complete."""
        place = 0
        for piece in self.pieces:
            yield piece, place
            place += _aligned(piece.nbytes)


def packed_size(pieces: Sequence[TensorPart]) -> int:
    return sum(_aligned(piece.nbytes) for piece in pieces) if len(pieces) > 1 else pieces[0].nbytes


def _aligned(size: int) -> int:
    return -(-size // ALIGNMENT) * ALIGNMENT


def buckets(pieces: Sequence[TensorPart]) -> Iterator[Bucket]:
    """The stream from one rank to another."""
    small: list[TensorPart] = []
    for piece in pieces:
        large = piece.nbytes >= PACKED_BYTES
        if small and (large or packed_size([*small, piece]) > PACKED_BYTES):
            yield Bucket(tuple(small), 0, packed_size(small))
            small = []
        if large:
            for start in range(0, piece.nbytes, PIECE_BYTES):
                yield Bucket((piece,), start, min(start + PIECE_BYTES, piece.nbytes))
        else:
            small.append(piece)
    if small:
        yield Bucket(tuple(small), 0, packed_size(small))


def needed(layout: Layout, names: Iterable[str], cuts: Mapping[str, Cut]) -> dict[str, Box]:
    """What an engine rank with these names of a module needs, by entry; `cuts` as of `keep_part`."""
    entries = {entry.name: entry for entry in layout.entries}
    boxes: dict[str, Box] = {}
    for name in names:
        entry = entries.get(layout.aliases.get(name, name))
        if entry is None:  # it stays as it is
            continue
        whole = whole_box(entry.shape)
        box = whole if (cut := cuts.get(name)) is None else kept_box(whole, cut)
        boxes[entry.name] = box if boxes.get(entry.name, box) == box else whole  # tied names may be split differently
    return boxes


def fingerprint(needs: Mapping[str, Box]) -> str:
    """Of what an engine rank needs: it and the trainer must agree."""
    text = "\n".join(f"{name} {box.starts} {box.ends}" for name, box in sorted(needs.items()))
    return hashlib.sha256(text.encode()).hexdigest()[:16]
