"""Storage for offloaded tensors: pinned host memory for a GPU, a file for the CPU."""

from __future__ import annotations

import os
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Protocol

import torch
from torch import Tensor

from plaudit.errors import StorageError
from plaudit.train.run.checksum import memory_of

_ALIGNED = 512  # bytes: where a tensor begins in its store


class Store(Protocol):
    """Holds one set of memories at a time, which are given and taken as flat tensors of bytes."""

    beside: bool
    """Whether it can load while others compute."""

    def save(self, memories: Sequence[Tensor]) -> None:
        """Copy them here. They may be freed at once."""

    def load(self, memories: Sequence[Tensor]) -> None:
        """Write into them what was saved of each."""

    def load_ahead(self, memories: Sequence[Tensor]) -> None:
        """The same while others compute: not to be used before `arrived`."""

    def arrived(self) -> None:
        """Wait for what was loaded ahead."""

    def close(self) -> None:
        """Give up what is here."""


def places_for(memories: Sequence[Tensor]) -> tuple[list[int], int]:
    """Where each begins in a store, and the size of it."""
    places, offset = [], 0
    for memory in memories:
        places.append(offset)
        offset += -(-memory.nbytes // _ALIGNED) * _ALIGNED
    return places, offset


class HostStore:
    """Pinned host memory, taken once and kept. Copies out are in the order of the computing, so that the memory they
    leave can be used by what follows; copies in may run beside it."""

    beside = True

    def __init__(self, device: torch.device) -> None:
        self.device = device
        self._host = torch.empty(0, dtype=torch.uint8)
        self._stream: torch.cuda.Stream | None = None
        self._arrival: torch.cuda.Event | None = None

    def save(self, memories: Sequence[Tensor]) -> None:
        places, size = places_for(memories)
        if size > len(self._host):
            self._take(size)
        for memory, place in zip(memories, places, strict=True):
            self._host[place : place + memory.nbytes].copy_(memory, non_blocking=True)
        torch.cuda.current_stream(self.device).synchronize()  # its seconds are the move's, not those of the next phase

    def load(self, memories: Sequence[Tensor]) -> None:
        self._copy(memories)
        torch.cuda.current_stream(self.device).synchronize()

    def load_ahead(self, memories: Sequence[Tensor]) -> None:
        if self._stream is None:
            self._stream = torch.cuda.Stream(self.device)  # type: ignore[no-untyped-call]
        # That memory may be in use by work that is queued before; and its owner, once here, is used after.
        self._stream.wait_stream(torch.cuda.current_stream(self.device))
        with torch.cuda.stream(self._stream):
            self._copy(memories)
            self._arrival = torch.cuda.Event()  # type: ignore[no-untyped-call]
            self._arrival.record(self._stream)

    def arrived(self) -> None:
        if self._arrival is not None:
            self._arrival.synchronize()
            self._arrival = None

    def _copy(self, memories: Sequence[Tensor]) -> None:
        for memory, place in zip(memories, places_for(memories)[0], strict=True):
            memory.copy_(self._host[place : place + memory.nbytes], non_blocking=True)

    def _take(self, size: int) -> None:
        self.close()
        # Registered and not allocated as pinned: torch rounds such allocations up to a power of two.
        self._host = torch.empty(size, dtype=torch.uint8)
        torch.cuda.check_error(int(torch.cuda.cudart().cudaHostRegister(self._host.data_ptr(), size, 0)))  # type: ignore[no-untyped-call]

    def close(self) -> None:
        self.arrived()
        if len(self._host):
            torch.cuda.check_error(int(torch.cuda.cudart().cudaHostUnregister(self._host.data_ptr())))  # type: ignore[no-untyped-call]
            self._host = torch.empty(0, dtype=torch.uint8)


class FileStore:
    """A file without a name, which is freed with the process, however that ends."""

    beside = False

    def __init__(self, directory: Path) -> None:
        self.directory = directory
        self._file = tempfile.TemporaryFile(dir=directory)  # noqa: SIM115 (the store's for as long as it lives)

    def save(self, memories: Sequence[Tensor]) -> None:
        for memory, place in zip(memories, places_for(memories)[0], strict=True):
            self._write(memory_of(memory), place)

    def load(self, memories: Sequence[Tensor]) -> None:
        for memory, place in zip(memories, places_for(memories)[0], strict=True):
            self._read(memory_of(memory), place)

    def load_ahead(self, memories: Sequence[Tensor]) -> None:
        self.load(memories)

    def arrived(self) -> None: ...

    def close(self) -> None:
        self._file.close()

    def _write(self, data: memoryview, offset: int) -> None:
        while data:
            try:
                done = os.pwrite(self._file.fileno(), data, offset)
            except OSError as error:
                raise StorageError(
                    f"cannot write {len(data)} bytes of an offloaded model to {self.directory}: {error.strerror}; free "
                    'disk space, or set placement.name = "colocated"'
                ) from error
            data, offset = data[done:], offset + done

    def _read(self, into: memoryview, offset: int) -> None:
        while into:
            done = os.preadv(self._file.fileno(), [into], offset)
            if not done:
                raise StorageError(f"an offloaded model in {self.directory} is truncated: the disk may be full")
            into, offset = into[done:], offset + done


def new_store(device: torch.device, directory: Path) -> Store:
    return HostStore(device) if device.type == "cuda" else FileStore(directory)
