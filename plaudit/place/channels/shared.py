"""Weights in memory mapped by trainer and engines of one machine: shared memory on a CPU, CUDA IPC on a GPU.

Two forms:

    SharedChannel(module)   The module's tensors are moved into one segment, once, and the engines' tensors become views
                            of it. A publication is a message and its answer: nothing is copied, and an engine needs no
                            weights of its own. The trainer writes where the engine reads, so engines must be paused
                            from the first change until the publication: the hybrid placement.
    SharedChannel()         Two segments. New weights are copied into the one that no engine uses, then all engines
                            switch: engines run meanwhile, and never see a mix of versions. The async placement.

On a GPU an engine of the second form copies from the segment instead of switching, since its CUDA graphs contain
addresses; it copies between two steps, and one segment is enough.

Names, shapes, dtypes and the version are checked each time, and in the first form that every tensor is still in the
segment. No bytes are transferred, so a full checksum is computed only on request.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import torch
from torch import Tensor, nn

from plaudit.errors import WeightsRefused
from plaudit.place.channels.channel import DEADLINE, Publication, Publisher, Received, Target, Wire, check_acknowledged
from plaudit.place.channels.messages import SegmentHandle, SharedTake
from plaudit.place.channels.segment import Segment, make_segment, open_segment
from plaudit.place.channels.target import ModuleTarget
from plaudit.place.channels.weights import Layout, Weights
from plaudit.train.run.checksum import Checksum


class SharedChannel:
    """module     whose tensors are in the segment from now on; None: two segments, and weights from anywhere
    checksum   whether all bytes are checksummed on both sides
    """

    def __init__(self, module: nn.Module | None = None, *, checksum: bool = False, seconds: float = DEADLINE) -> None:
        self.checksum = checksum
        self._publisher = Publisher(seconds)
        self._segments: list[Segment] = []
        self._layout: Layout | None = None
        self._current = 0
        self._filled: int | None = None  # the version in the current segment
        self._home = module is not None
        if module is not None:
            self._move_in(module)

    @property
    def in_place(self) -> bool:
        """Whether engines read the memory that the trainer writes."""
        return self._home

    def publish(self, weights: Weights, version: int, wires: Sequence[Wire]) -> Publication:
        exchange = self._publisher.begin(version)
        if not wires and weights.sharded:
            for _ in weights:  # another rank writes; this one helps to gather
                pass
            return Publication(version, exchange.elapsed, weights.nbytes, 0)
        if self._home:
            self._check_home(weights)
        elif version != self._filled:
            # The same version is sent again from the current segment: other engines may be using it.
            self._fill_spare(weights)
            self._filled = version
        segment = self._segments[self._current]
        if segment.memory.is_cuda:
            torch.cuda.synchronize(segment.memory.device)
        assert self._layout is not None
        exchange.send(wires, self._layout, SharedTake(segment.handle, self._home, self.checksum))
        mine = _sum(_views(self._layout, segment.memory)) if self.checksum else None
        answers = exchange.answers(wires)
        check_acknowledged(wires, answers, version, mine)
        extra = 0 if self._home else sum(s.memory.nbytes for s in self._segments)
        extra += sum(answer.extra_bytes for answer in answers)
        return Publication(version, exchange.elapsed, weights.nbytes, max(0, extra))

    def close(self) -> None:
        """The tensors of a module in the segment stay usable on a CPU; on a GPU they must not be used again."""
        for segment in self._segments:
            segment.close()
        self._segments = []

    @torch.no_grad()
    def _move_in(self, module: nn.Module) -> None:
        weights = Weights.of(module)
        if weights.sharded:
            raise WeightsRefused("a sharded module has no whole weights to share: use SharedChannel() without a module")
        target = ModuleTarget(module)
        target.check(weights.layout)
        self._prepare(weights)
        views = dict(_views(weights.layout, self._segments[0].memory))
        for name, tensor in weights:
            views[name].copy_(tensor)
        target.adopt(views.items())

    def _prepare(self, weights: Weights) -> None:
        """Segments for this layout: one if it contains the module or the engines copy, else two."""
        devices = {tensor.device for tensor in weights.tensors.values()}
        if len(devices) != 1:
            raise WeightsRefused(f"the weights are on {sorted(map(str, devices))}: sharing requires a single device")
        device = devices.pop()
        self._layout = weights.layout
        count = 1 if self._home or device.type == "cuda" else 2
        self._segments = [make_segment(weights.layout.offsets()[1], device) for _ in range(count)]
        self._current = 0

    def _check_home(self, weights: Weights) -> None:
        assert self._layout is not None
        if weights.layout != self._layout:
            raise WeightsRefused("the names, shapes or dtypes of the weights differ from those of the shared module")
        views = dict(_views(self._layout, self._segments[0].memory))
        for name, tensor in weights.tensors.items():
            if tensor.data_ptr() != views[name].data_ptr():
                raise WeightsRefused(
                    f"{name!r} is no longer in the shared memory: the module was moved or its tensors were replaced "
                    "since; make a new SharedChannel of it"
                )

    @torch.no_grad()
    def _fill_spare(self, weights: Weights) -> None:
        if self._layout is None:
            self._prepare(weights)
        elif weights.layout != self._layout:
            raise WeightsRefused("the names, shapes or dtypes of the weights differ from those published before")
        else:
            self._current = (self._current + 1) % len(self._segments)
        assert self._layout is not None
        views = dict(_views(self._layout, self._segments[self._current].memory))
        for name, tensor in weights:
            views[name].copy_(tensor)


class SharedSide:
    """Keeps segments open, by their handles, while the publisher uses them."""

    def __init__(self) -> None:
        self._publisher: str | None = None
        self._open: list[Segment] = []
        self._left: list[Segment] = []  # of an earlier publisher: closed when no tensor uses them any more

    def take(self, body: SharedTake, publisher: str, layout: Layout, target: Target) -> Received:
        segment = self._segment(publisher, body.segment)
        memory = segment.memory
        if memory.numel() != layout.offsets()[1]:
            raise WeightsRefused(
                f"the shared segment has {memory.numel()} bytes and its layout needs {layout.offsets()[1]}"
            )
        adopt = isinstance(target, ModuleTarget) and target.devices == {memory.device}
        adopt = adopt and (body.stays or not memory.is_cuda)
        if adopt and isinstance(target, ModuleTarget):
            target.adopt(_views(layout, memory))
        else:
            target.load(_views(layout, memory))
        if memory.is_cuda:
            torch.cuda.synchronize(memory.device)
        while self._left:
            self._left.pop().close()
        checksum = _sum(_views(layout, memory)) if body.checksum else None
        return Received(checksum, -layout.nbytes if adopt else 0)

    def close(self) -> None:
        for segment in self._left + self._open:
            segment.close()
        self._left, self._open = [], []

    def _segment(self, publisher: str, handle: SegmentHandle) -> Segment:
        if publisher != self._publisher:
            self._left += self._open
            self._publisher, self._open = publisher, []
        for segment in self._open:
            if segment.handle == handle:
                return segment
        self._open.append(open_segment(handle))
        return self._open[-1]


def _views(layout: Layout, memory: Tensor) -> Iterator[tuple[str, Tensor]]:
    for entry, place in zip(layout.entries, layout.offsets()[0], strict=True):
        flat = memory[place : place + entry.nbytes].view(entry.torch_dtype)
        yield entry.name, flat.view(entry.shape)


def _sum(tensors: Iterator[tuple[str, Tensor]]) -> str:
    checksum = Checksum()
    for _, tensor in tensors:
        checksum.update(tensor)
    return checksum.hexdigest()
