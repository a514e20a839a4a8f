"""Messages between a trainer's channel and a receiver. Wires transfer them as plain data.

trainer -> receiver   WeightMessage: the layout of the weights, and one of the five bodies
receiver -> trainer   WeightReply, to each of them
"""

from __future__ import annotations

from typing import Any, TypeVar

import msgspec

from plaudit.place.channels.weights import Layout

M = TypeVar("M", bound=msgspec.Struct)


class CpuHandle(msgspec.Struct, tag="cpu", frozen=True):
    """A segment of host memory: a file descriptor of the process that created it."""

    pid: int
    file: int
    inode: int
    size: int


class CudaHandle(msgspec.Struct, tag="cuda", frozen=True):
    """A segment of a GPU's memory, by CUDA IPC."""

    ipc: bytes
    size: int
    gpu: str


SegmentHandle = CpuHandle | CudaHandle


class Invitation(msgspec.Struct, frozen=True):
    """To a group of ranks; with the receiver's rank, or the first of its ranks, and the seconds to join."""

    host: str
    port: int
    group: str
    backend: str
    size: int
    rank: int = 0
    seconds: float = 0.0


class DiskTake(msgspec.Struct, tag="disk", frozen=True):
    path: str


class SharedTake(msgspec.Struct, tag="shared", frozen=True):
    """stays      the segment contains the trainer's own tensors
    checksum   whether one is requested
    """

    segment: SegmentHandle
    stays: bool
    checksum: bool


class CollectivePrepare(msgspec.Struct, tag="prepare", frozen=True):
    """Is the receiver in this group? Or: join this one."""

    group: str | None = None
    join: Invitation | None = None


class CollectiveTake(msgspec.Struct, tag="collective", frozen=True):
    group: str
    seconds: float


class ReshardTake(msgspec.Struct, tag="reshard", frozen=True):
    """ranks    training ranks, which come first in the group
    splits   of each tensor over them (reshard/routes.py)
    parts    for every engine rank, a fingerprint of what it is sent
    stages   number of pipeline stages, each with equally many ranks
    homes    for several stages, the stage of each tensor
    """

    group: str
    seconds: float
    ranks: int
    splits: dict[str, tuple[tuple[int, int, int], ...]]
    parts: tuple[str, ...]
    stages: int = 1
    homes: dict[str, int] = {}


Body = DiskTake | SharedTake | CollectivePrepare | CollectiveTake | ReshardTake


class WeightMessage(msgspec.Struct, frozen=True):
    exchange: str
    publisher: str
    version: int
    layout: Layout
    body: Body


class WeightReply(msgspec.Struct, frozen=True):
    """error      why the message was refused
    checksum   of what was received; None where none was requested
    """

    exchange: str
    error: str | None = None
    version: int | None = None
    checksum: str | None = None
    extra_bytes: int = 0
    in_group: bool = False


def plain(message: msgspec.Struct) -> dict[str, Any]:
    data: dict[str, Any] = msgspec.to_builtins(message, builtin_types=(bytes,))
    return data


def typed(data: dict[str, Any], kind: type[M]) -> M:
    return msgspec.convert(data, kind, builtin_types=(bytes,))
