"""A checksum of weights that runs at memory bandwidth, so it costs less than transferring them.

Bytes are arranged in rows of 1,021 64-bit words. The column sums (modulo 2^64) of every 64 rows go into SHA-256, and so
do the last bytes that fill no row. A changed word is always detected, and so is lost or duplicated data. Swapped pieces
are detected because 1,021 is prime: pages, packets and sectors have sizes that are powers of two, and within 64 rows no
two of them above 512 bytes lie in the same columns. Not detected are changes of +d and -d to words a multiple of 8,168
bytes apart within half a megabyte: no fault does that, though an attacker could. Integer sums do not depend on order,
so a CPU and a GPU agree.
"""

from __future__ import annotations

import ctypes
import hashlib
import platform

import numpy as np
import torch
from torch import Tensor

WORDS, ROWS = 1021, 64
ROW_BYTES, BLOCK_BYTES = 8 * WORDS, 8 * WORDS * ROWS
X86 = platform.machine() in ("x86_64", "AMD64")  # where torch's sum is 1.5 times as fast as numpy's

_NOTHING = ctypes.c_char()


class Checksum:
    """Incremental checksum of tensors in order; both sides must split the data in the same way."""

    def __init__(self) -> None:
        self._hash = hashlib.sha256()

    def update(self, tensor: Tensor) -> None:
        data = as_bytes(tensor)
        size = data.numel()
        blocks = size // BLOCK_BYTES * BLOCK_BYTES
        rows = size // ROW_BYTES * ROW_BYTES
        self._hash.update(size.to_bytes(8, "little"))
        if blocks:
            self._add(_column_sums(_words(data[:blocks]).view(-1, ROWS, WORDS)))
        if blocks < rows:
            self._add(_column_sums(_words(data[blocks:rows]).view(1, -1, WORDS)))
        if rows < size:
            self._add(data[rows:])

    def hexdigest(self) -> str:
        return self._hash.hexdigest()[:32]

    def _add(self, tensor: Tensor) -> None:
        self._hash.update(memory_of(tensor.cpu()))


def as_bytes(tensor: Tensor) -> Tensor:
    """Return the tensor's bytes (n,) uint8, without a copy if it is contiguous."""
    return tensor.detach().contiguous().view(-1).view(torch.uint8)


def memory_of(tensor: Tensor) -> memoryview:
    """Return a writable view of a contiguous CPU tensor's bytes. Not through numpy, after which the tensor's memory can
    no longer be released (memory/residency.py)."""
    data = (ctypes.c_char * tensor.nbytes).from_address(tensor.data_ptr() or ctypes.addressof(_NOTHING))
    data.tensor = tensor  # type: ignore[attr-defined]  # keeps the tensor alive as long as the view
    return memoryview(data).cast("B")


def _column_sums(words: Tensor) -> Tensor:
    """(n, rows, words) -> (n, words)."""
    if words.device.type == "cpu" and not X86:  # numpy adds row by row, on ARM five times as fast as torch's sum
        return torch.from_numpy(np.add.reduce(words.numpy(), axis=1))
    return words.sum(1)


def _words(data: Tensor) -> Tensor:
    if data.data_ptr() % 8 or data.storage_offset() % 8:
        data = data.clone()
    return data.view(torch.int64)
