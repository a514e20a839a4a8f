"""The weights of a publication: named tensors with their layout, iterated bucket by bucket.

A name that shares its storage with an earlier one is an alias of it: its bytes are transferred once. A sharded tensor
(DTensor) is gathered when its bucket is due, so that no rank ever has the whole model; every rank of its mesh must
then iterate.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from math import prod
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from plaudit.errors import WeightsRefused

BUCKET_BYTES = 32 << 20
ALIGNMENT = 512  # bytes, as torch's GPU allocator: kernels are chosen by alignment


@dataclass(frozen=True, slots=True)
class Entry:
    name: str
    dtype: str  # torch's name without "torch."
    shape: tuple[int, ...]

    @property
    def torch_dtype(self) -> torch.dtype:
        dtype = getattr(torch, self.dtype, None)
        if not isinstance(dtype, torch.dtype):
            raise WeightsRefused(f"tensor {self.name!r} has dtype {self.dtype[:20]!r}, which torch does not know")
        return dtype

    @property
    def nbytes(self) -> int:
        return prod(self.shape) * self.torch_dtype.itemsize


@dataclass(frozen=True)
class Layout:
    """entries   tensors that are transferred, in order
    aliases   further names of them: name -> name of an entry
    part      other tensors stay as the receiver has them: for instance what a LoRA run has changed
    since     the version that the receiver must have for it
    packed    of entries that are changes of a tensor (delta.py): that tensor's own entry
    """

    entries: tuple[Entry, ...]
    aliases: Mapping[str, str]
    part: bool = False
    since: int | None = None
    packed: Mapping[str, Entry] = field(default_factory=dict)

    @property
    def nbytes(self) -> int:
        return sum(entry.nbytes for entry in self.entries)

    @property
    def digest(self) -> str:
        entries = [[e.name, e.dtype, list(e.shape)] for e in self.entries]
        text = json.dumps({"entries": entries, "aliases": dict(self.aliases)}, sort_keys=True)
        return hashlib.sha256(text.encode()).hexdigest()[:16]

    def offsets(self) -> tuple[list[int], int]:
        """Offset of each entry in a single segment, aligned; and the segment's size."""
        places, end = [], 0
        for entry in self.entries:
            places.append(end)
            end += -(-entry.nbytes // ALIGNMENT) * ALIGNMENT
        return places, max(end, ALIGNMENT)

    def buckets(self, size: int = BUCKET_BYTES) -> Iterator[tuple[Entry, ...]]:
        """Entries in order, as many as fit into `size` bytes; a larger one is a bucket by itself."""
        bucket: list[Entry] = []
        filled = 0
        for entry in self.entries:
            if bucket and filled + entry.nbytes > size:
                yield tuple(bucket)
                bucket, filled = [], 0
            bucket.append(entry)
            filled += entry.nbytes
        if bucket:
            yield tuple(bucket)


class Weights:
    """tensors   by name; plain or DTensor, on any device. Not copied: what is published are their current values."""

    def __init__(self, tensors: Mapping[str, Tensor], part: bool = False) -> None:
        self.tensors: dict[str, Tensor] = {}
        aliases: dict[str, str] = {}
        first: dict[Any, str] = {}
        for name, tensor in tensors.items():
            original = first.setdefault(_identity(tensor), name)
            if original == name:
                self.tensors[name] = tensor.detach()
            else:
                aliases[name] = original
        entries = (Entry(n, str(t.dtype).removeprefix("torch."), tuple(t.shape)) for n, t in self.tensors.items())
        self.layout = Layout(tuple(entries), aliases, part)

    @classmethod
    def of(cls, module: nn.Module) -> Weights:
        """Parameters and persistent buffers, as in the module's state_dict."""
        return cls(named_tensors(module))

    @classmethod
    def trained(cls, module: nn.Module) -> Weights:
        """Those that an optimizer may change."""
        return cls({name: tensor for name, tensor in named_tensors(module).items() if tensor.requires_grad}, part=True)

    @property
    def nbytes(self) -> int:
        return self.layout.nbytes

    @property
    def sharded(self) -> bool:
        return any(isinstance(tensor, DTensor) for tensor in self.tensors.values())

    def __iter__(self) -> Iterator[tuple[str, Tensor]]:
        """One whole tensor after the other; of sharded ones only the current one is in memory."""
        for name, tensor in self.tensors.items():
            yield name, tensor.full_tensor() if isinstance(tensor, DTensor) else tensor

    def buckets(self, size: int = BUCKET_BYTES) -> Iterator[tuple[tuple[str, Tensor], ...]]:
        """The same in buckets, those of `Layout.buckets`."""
        pairs = iter(self)
        for bucket in self.layout.buckets(size):
            yield tuple(next(pairs) for _ in bucket)


def named_tensors(module: nn.Module) -> dict[str, Tensor]:
    """All names, those of tied tensors too."""
    tensors: dict[str, Tensor] = module.state_dict(keep_vars=True)
    return {name: tensor for name, tensor in tensors.items() if isinstance(tensor, Tensor)}


def _identity(tensor: Tensor) -> Any:
    """Equal for two names of the same memory."""
    if isinstance(tensor, DTensor):
        local = tensor.to_local()
        # A rank may have no part of a small tensor: then only the object identifies it.
        return ("shard", local.data_ptr(), tensor.shape, local.stride()) if local.numel() else id(tensor)
    if not tensor.numel() or tensor.device.type == "meta":
        return id(tensor)
    return tensor.device, tensor.dtype, tensor.data_ptr(), tensor.shape, tensor.stride()
