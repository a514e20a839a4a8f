"""Where tensors wait that are not on the device: pinned host memory beside a GPU, a file beside the CPU."""

from __future__ import annotations

import os
import tempfile
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol

import torch
from torch import Tensor

from plaudit.errors import StorageError

_ALIGNED = 512  # bytes: where a tensor begins in its store


class Store(Protocol):
    """Holds one set of tensors at a time."""

    def save(self, tensors: Sequence[Tensor]) -> None:
        """Copy them here. They may be freed at once."""

    def load(self) -> list[Tensor]:
        """New tensors on the device, equal to the bit to those that were saved."""

    def load_ahead(self) -> list[Tensor] | None:
        """The same, not to be used before `arrived`; None where nothing can be done beside the computing."""

    def arrived(self) -> None:
        """Wait for what was loaded ahead."""

    def close(self) -> None:
        """Give up what is here."""


@dataclass(frozen=True, slots=True)
class StoredTensor:
    """A tensor in a store, and how it lay in memory."""

    offset: int
    size: int
    dtype: torch.dtype
    shape: torch.Size
    stride: tuple[int, ...]
    device: torch.device

    def empty(self) -> Tensor:
        return torch.empty_strided(self.shape, self.stride, dtype=self.dtype, device=self.device)

    def of(self, flat: Tensor) -> Tensor:
        """Its values in a store of bytes."""
        return flat[self.offset : self.offset + self.size].view(self.dtype).view(self.shape)


def places_for(tensors: Sequence[Tensor]) -> tuple[list[StoredTensor], int]:
    places, offset = [], 0
    for tensor in tensors:
        size = tensor.numel() * tensor.element_size()
        places.append(StoredTensor(offset, size, tensor.dtype, tensor.shape, tensor.stride(), tensor.device))
        offset += -(-size // _ALIGNED) * _ALIGNED
    return places, offset


class HostStore:
    """Pinned host memory, taken once and kept. Copies out are in the order of the computing, so that the memory they
    leave can be used by what follows; copies in may run beside it."""

    def __init__(self, device: torch.device) -> None:
        self.device = device
        self._host = torch.empty(0, dtype=torch.uint8)
        self._places: list[StoredTensor] = []
        self._stream: torch.cuda.Stream | None = None
        self._arrival: torch.cuda.Event | None = None

    def save(self, tensors: Sequence[Tensor]) -> None:
        self._places, size = places_for(tensors)
        if size > len(self._host):
            self._take(size)
        for tensor, place in zip(tensors, self._places, strict=True):
            place.of(self._host).copy_(tensor, non_blocking=True)
        torch.cuda.current_stream(self.device).synchronize()  # its seconds are the move's, not those of the next phase

    def load(self) -> list[Tensor]:
        tensors = self._copied()
        torch.cuda.current_stream(self.device).synchronize()
        return tensors

    def load_ahead(self) -> list[Tensor]:
        if self._stream is None:
            self._stream = torch.cuda.Stream(self.device)  # type: ignore[no-untyped-call]
        memory = [place.empty() for place in self._places]
        # That memory may be in use by work that is queued before; and its owner, once here, is used after.
        self._stream.wait_stream(torch.cuda.current_stream(self.device))
        with torch.cuda.stream(self._stream):
            for tensor, place in zip(memory, self._places, strict=True):
                tensor.copy_(place.of(self._host), non_blocking=True)
            self._arrival = torch.cuda.Event()  # type: ignore[no-untyped-call]
            self._arrival.record(self._stream)
        return memory

    def arrived(self) -> None:
        if self._arrival is not None:
            self._arrival.synchronize()
            self._arrival = None

    def _copied(self) -> list[Tensor]:
        tensors = [place.empty() for place in self._places]
        for tensor, place in zip(tensors, self._places, strict=True):
            tensor.copy_(place.of(self._host), non_blocking=True)
        return tensors

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
    """A file without a name: it is gone with the process, however that ends."""

    def __init__(self, directory: Path) -> None:
        self.directory = directory
        self._file = tempfile.TemporaryFile(dir=directory)  # noqa: SIM115 (the store's for as long as it lives)
        self._places: list[StoredTensor] = []

    def save(self, tensors: Sequence[Tensor]) -> None:
        self._places, _ = places_for(tensors)
        for tensor, place in zip(tensors, self._places, strict=True):
            self._write(_bytes_of(tensor.contiguous()), place.offset)

    def load(self) -> list[Tensor]:
        tensors = []
        for place in self._places:
            whole = torch.empty(place.shape, dtype=place.dtype)
            self._read(_bytes_of(whole), place.offset)
            tensors.append(whole if whole.stride() == place.stride else place.empty().copy_(whole))
        return tensors

    def load_ahead(self) -> None:
        return None

    def arrived(self) -> None: ...

    def close(self) -> None:
        self._file.close()

    def _write(self, data: memoryview, offset: int) -> None:
        while data:
            try:
                done = os.pwrite(self._file.fileno(), data, offset)
            except OSError as error:
                raise StorageError(
                    f"cannot write {len(data)} bytes of a resting model under {self.directory}: {error.strerror}; free "
                    'some space, or set placement.name = "colocated"'
                ) from error
            data, offset = data[done:], offset + done

    def _read(self, into: memoryview, offset: int) -> None:
        while into:
            done = os.preadv(self._file.fileno(), [into], offset)
            if not done:
                raise StorageError(f"a resting model under {self.directory} is cut short: the disk may be full")
            into, offset = into[done:], offset + done


def _bytes_of(tensor: Tensor) -> memoryview:
    return tensor.detach().view(-1).view(torch.uint8).numpy().data


def new_store(device: torch.device, directory: Path) -> Store:
    return HostStore(device) if device.type == "cuda" else FileStore(directory)
