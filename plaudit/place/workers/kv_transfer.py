"""KV of prompts in memory that another process can map: shared memory on a CPU, CUDA IPC on a GPU."""

from __future__ import annotations

import secrets
from collections.abc import Iterator
from typing import Any

import msgspec
import torch
from torch import Tensor

from plaudit.core import Engine
from plaudit.core.kv.handover import Handover
from plaudit.errors import ChannelError
from plaudit.place.channels.messages import SegmentHandle, plain
from plaudit.place.channels.segment import Segment, make_segment, open_segment

ALIGNMENT = 64  # bytes
KV = "kv"  # where a begun sample has its prompt's parcel, in `extra`


_HERE: dict[str, Parcel] = {}  # of this process: CUDA cannot open its own handles, and nothing needs to be mapped


class Parcel:
    """A prompt's KV, as whoever has computed it sends it. `message` is plain data, from which `opened` makes the
    Handover again; the memory must stay until the other side has taken it in."""

    def __init__(self, handover: Handover) -> None:
        tensors = [*handover.keys, *handover.values, *handover.state]
        self.segment: Segment | None = None
        self.message: dict[str, Any] = {
            "id": secrets.token_hex(8), "tokens": list(handover.tokens), "version": handover.version,
            "salt": handover.salt, "segment": None, "layers": len(handover.keys),
            "shapes": [list(tensor.shape) for tensor in tensors],
            "dtypes": [str(tensor.dtype).removeprefix("torch.") for tensor in tensors],
        }  # fmt: skip
        if tensors:
            size = sum(_aligned(tensor.nbytes) for tensor in tensors)
            self.segment = make_segment(size, tensors[0].device)
            self.message["segment"] = plain(self.segment.handle)
            for view, tensor in zip(_views(self.segment.memory, self.message), tensors, strict=True):
                view.copy_(tensor)
            if self.segment.memory.is_cuda:
                torch.cuda.synchronize(self.segment.memory.device)
        _HERE[self.message["id"]] = self

    def close(self) -> None:
        _HERE.pop(self.message["id"], None)
        if self.segment is not None:
            self.segment.close()


class OpenedParcel:
    """`handover` has views of the sender's memory: take it in before it is closed."""

    def __init__(self, message: dict[str, Any]) -> None:
        own = _HERE.get(message["id"])
        self._segment: Segment | None = None
        if own is None and message["segment"] is not None:
            self._segment = open_segment(msgspec.convert(message["segment"], SegmentHandle))
        segment = self._segment if own is None else own.segment
        tensors = [] if segment is None else list(_views(segment.memory, message))
        layers: int = message["layers"]
        self.handover = Handover(
            tuple(message["tokens"]), message["version"], tensors[:layers], tensors[layers : 2 * layers],
            message["salt"], tensors[2 * layers :],
        )  # fmt: skip

    def close(self) -> None:
        if self._segment is not None:
            self._segment.close()


def take(engine: Engine, message: dict[str, Any]) -> None:
    """Import a prompt's KV. If it was lost with its engine, or is of other weights, the engine computes the prompt."""
    try:
        parcel = OpenedParcel(message)
    except ChannelError:
        return
    try:
        if parcel.handover.tokens and parcel.handover.version == engine.version:
            engine.import_kv(parcel.handover)
    finally:
        parcel.close()


def _views(memory: Tensor, message: dict[str, Any]) -> Iterator[Tensor]:
    place = 0
    for shape, name in zip(message["shapes"], message["dtypes"], strict=True):
        dtype: torch.dtype = getattr(torch, name)
        size = dtype.itemsize
        for length in shape:
            size *= length
        yield memory[place : place + size].view(dtype).view(shape)
        place += _aligned(size)


def _aligned(size: int) -> int:
    return -(-size // ALIGNMENT) * ALIGNMENT
