"""Weights through a directory that both sides see: a local disk, or a filesystem shared by machines.

    DIRECTORY/version-000012/model.safetensors    header, then the tensors in the order of the layout
                             publication.json     version, publisher, checksum

A publication is written under a temporary name and renamed, so that it is complete or absent. It is not synced to the
disk: a machine crash may lose a publication, which the restarted trainer makes again from its checkpoint. A process
crash loses nothing, since the pages belong to the kernel. The reader verifies every byte, and so detects a shared
filesystem that shows a file before its contents. When all receivers have a version, the previous one is retired: the
next publication overwrites its file, in half the time of a new file, whose pages and blocks must first be allocated,
and it is removed at the end. The newest stays, in the format that every engine can load.
"""

from __future__ import annotations

import json
import os
import shutil
import struct
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any, BinaryIO

import torch
from torch import Tensor

from plaudit.errors import StorageError, WeightsRefused
from plaudit.place.channels.channel import DEADLINE, Publication, Publisher, Received, Target, Wire, check_acknowledged
from plaudit.place.channels.messages import DiskTake
from plaudit.place.channels.weights import Layout, Weights
from plaudit.train.run.checksum import BLOCK_BYTES, Checksum, as_bytes, memory_of

WEIGHTS, ABOUT = "model.safetensors", "publication.json"
CHUNK_BYTES = 16 * BLOCK_BYTES
DTYPES = {
    "bool": "BOOL", "uint8": "U8", "int8": "I8", "int16": "I16", "int32": "I32", "int64": "I64", "float16": "F16",
    "bfloat16": "BF16", "float32": "F32", "float64": "F64", "float8_e4m3fn": "F8_E4M3", "float8_e5m2": "F8_E5M2",
}  # fmt: skip


class DiskChannel:
    """directory   created if absent; used by this channel alone"""

    def __init__(self, directory: str | Path, *, seconds: float = DEADLINE) -> None:
        self.directory = Path(directory).absolute()
        self._publisher = Publisher(seconds)
        self._spare = self.directory / f".spare-{self._publisher.id}"

    def publish(self, weights: Weights, version: int, wires: Sequence[Wire]) -> Publication:
        exchange = self._publisher.begin(version)
        if not wires:
            for _ in weights:  # another rank writes; this one helps to gather
                pass
            return Publication(version, exchange.elapsed, weights.nbytes, 0)
        path, checksum = self._write(weights, version)
        answers = exchange.request(wires, weights.layout, DiskTake(str(path)))
        check_acknowledged(wires, answers, version, checksum)
        seconds = exchange.elapsed
        self._retire_all_but(path)
        return Publication(version, seconds, weights.nbytes, sum(answer.extra_bytes for answer in answers))

    def close(self) -> None:
        """The newest version stays for later readers."""
        shutil.rmtree(self._spare, ignore_errors=True)

    def _write(self, weights: Weights, version: int) -> tuple[Path, str]:
        final = self.directory / f"version-{version:06d}"
        pairs = iter(weights)
        try:
            self._spare.mkdir(parents=True, exist_ok=True)
            checksum = Checksum()
            with open(self._spare / WEIGHTS, "wb", buffering=0, opener=_reopened) as file:
                _write_whole(file, header(weights.layout))
                for _, tensor in pairs:
                    for chunk in _chunks(tensor.cpu()):
                        checksum.update(chunk)
                        _write_whole(file, memory_of(chunk))
                file.truncate()
            about = {"version": version, "publisher": self._publisher.id, "checksum": checksum.hexdigest()}
            (self._spare / ABOUT).write_text(json.dumps(about), encoding="utf-8")
            if final.exists():  # the same version again
                shutil.rmtree(final)
            self._spare.rename(final)
        except OSError as error:
            shutil.rmtree(self._spare, ignore_errors=True)
            raise StorageError(
                f"cannot write the weights of version {version} to {self.directory}: {error.strerror}; free disk space "
                "or set another directory"
            ) from error
        finally:
            for _ in pairs:  # ranks that gather with this one wait for it
                pass
        return final, checksum.hexdigest()

    def _retire_all_but(self, path: Path) -> None:
        """One of them becomes the next version's spare file; others, for instance of a killed trainer, are removed."""
        for other in (*self.directory.glob("version-*"), *self.directory.glob(".spare-*")):
            if other in (path, self._spare):
                continue
            if self._spare.exists():
                shutil.rmtree(other, ignore_errors=True)
            else:
                other.rename(self._spare)


def take_from_disk(body: DiskTake, layout: Layout, target: Target) -> Received:
    """Reads directly into the target's own memory where possible."""
    path = Path(body.path) / WEIGHTS
    checksum, extra = Checksum(), 0

    def arrivals(file: BinaryIO) -> Iterator[tuple[str, Tensor]]:
        nonlocal extra
        for name, tensor, own in _read(file, layout, target, checksum, path):
            if not own:
                extra = max(extra, tensor.nbytes)
                yield name, tensor

    try:
        with path.open("rb", buffering=0) as file:
            expected = header(layout)
            if file.read(len(expected)) != expected:
                raise WeightsRefused(f"{path} holds other tensors than its publication.json states: publish again")
            target.load(arrivals(file))
            if file.read(1):
                raise WeightsRefused(f"{path} is longer than its publication.json states: publish again")
    except OSError as error:
        raise WeightsRefused(
            f"cannot read {path}: {error.strerror}; trainer and engine must see the same directory"
        ) from error
    return Received(checksum.hexdigest(), extra)


def header(layout: Layout) -> bytes:
    """The start of a safetensors file: the length of a JSON text, and the text, padded to eight bytes."""
    tensors: dict[str, Any] = {"__metadata__": {"format": "pt"}}
    end = 0
    for entry in layout.entries:
        if entry.dtype not in DTYPES:
            raise WeightsRefused(f"{entry.name!r} is {entry.dtype}, which safetensors does not support")
        begin, end = end, end + entry.nbytes
        tensors[entry.name] = {
            "dtype": DTYPES[entry.dtype], "shape": list(entry.shape), "data_offsets": [begin, end],
        }  # fmt: skip
    text = json.dumps(tensors, separators=(",", ":")).encode()
    text += b" " * (-len(text) % 8)
    return struct.pack("<Q", len(text)) + text


def _read(
    file: BinaryIO, layout: Layout, target: Target, checksum: Checksum, path: Path
) -> Iterator[tuple[str, Tensor, bool]]:
    """Each tensor, and whether it is in the target's own memory already."""
    for entry in layout.entries:
        home = target.home(entry.name)
        own = home is not None and home.device.type == "cpu"
        tensor = home if home is not None and own else torch.empty(entry.shape, dtype=entry.torch_dtype)
        for chunk in _chunks(tensor):
            _read_whole(file, memory_of(chunk), entry.name, path)
            checksum.update(chunk)
        yield entry.name, tensor, own


def _reopened(path: str, flags: int) -> int:
    """Opens an existing file without truncating it first."""
    return os.open(path, flags & ~os.O_TRUNC, 0o644)


def _chunks(tensor: Tensor) -> Iterator[Tensor]:
    """The bytes in pieces that are still in the cache when they are checksummed and written, or read and
    checksummed."""
    data = as_bytes(tensor)
    for start in range(0, data.numel(), CHUNK_BYTES):
        yield data[start : start + CHUNK_BYTES]


def _read_whole(file: BinaryIO, memory: memoryview, name: str, path: Path) -> None:
    done = 0
    while done < len(memory):
        count = file.readinto(memory[done:])  # type: ignore[attr-defined]
        if not count:
            raise WeightsRefused(f"{path} ends within {name!r}: publish again")
        done += count


def _write_whole(file: BinaryIO, data: bytes | memoryview) -> None:
    done = 0
    while done < len(data):
        done += file.write(data[done:])
