"""A checksum of weights that costs less than moving them: about the speed of reading memory.

The bytes of a tensor are rows of 1,024 64-bit words. All row sums and all column sums (modulo 2^64), and the rest that
fills no row, go into BLAKE2b. Caught are a changed word, changed bytes within one row, lost, doubled or moved pieces,
swapped words. What escapes needs four words at the corners of a rectangle that change by +d, -d, -d, +d: no fault of a
disk or a link does that, though somebody who wants to could. Integer sums have no order, so that a CPU and a GPU agree.
"""

from __future__ import annotations

import hashlib
from collections import deque
from concurrent.futures import Future, ThreadPoolExecutor

import torch
from torch import Tensor

WORDS = 1024  # in a row: 8 KiB
BLOCK = 64  # rows that are summed while they are in the cache


class Checksum:
    """Fed with the tensors of a publication in their order. How their bytes were cut on the way makes no difference."""

    def __init__(self) -> None:
        self._hash = hashlib.blake2b(digest_size=16)

    def update(self, tensor: Tensor) -> None:
        data = as_bytes(tensor)
        whole = data.numel() // (8 * WORDS) * (8 * WORDS)
        self._hash.update(data.numel().to_bytes(8, "little"))
        if whole:
            rows = _words(data[:whole]).view(-1, WORDS)
            across, down = _sums(rows)
            self._hash.update(memory_of(across.cpu()))
            self._hash.update(memory_of(down.cpu()))
        if whole < data.numel():
            self._hash.update(memory_of(data[whole:].cpu()))

    def hexdigest(self) -> str:
        return self._hash.hexdigest()


class Summing:
    """A checksum made by a thread of its own, while the caller writes or reads the next tensor."""

    def __init__(self) -> None:
        self._checksum = Checksum()
        self._thread = ThreadPoolExecutor(1)
        self._last: deque[Future[None]] = deque()

    def __enter__(self) -> Summing:
        return self

    def __exit__(self, *error: object) -> None:
        self._thread.shutdown()

    def update(self, tensor: Tensor) -> None:
        """The tensor must keep its values until the one after the next is given."""
        self._last.append(self._thread.submit(self._checksum.update, tensor))
        if len(self._last) > 2:
            self._last.popleft().result()

    def hexdigest(self) -> str:
        while self._last:
            self._last.popleft().result()
        return self._checksum.hexdigest()


def as_bytes(tensor: Tensor) -> Tensor:
    """(n,) uint8 over the same memory, if it is contiguous; else over a copy."""
    return tensor.detach().contiguous().view(-1).view(torch.uint8)


def memory_of(tensor: Tensor) -> memoryview:
    """The bytes of a contiguous tensor on the CPU, to read from or write to."""
    return memoryview(tensor.view(-1).view(torch.uint8).numpy())  # type: ignore[arg-type]


def _words(data: Tensor) -> Tensor:
    if data.data_ptr() % 8 or data.storage_offset() % 8:
        data = data.clone()
    return data.view(torch.int64)


def _sums(rows: Tensor) -> tuple[Tensor, Tensor]:
    if rows.is_cuda:
        return rows.sum(1), rows.sum(0)
    across = torch.empty(len(rows), dtype=torch.int64)
    down = torch.zeros(WORDS, dtype=torch.int64)
    for start in range(0, len(rows), BLOCK):
        block = rows[start : start + BLOCK]
        torch.sum(block, 1, out=across[start : start + BLOCK])
        down += block.sum(0)
    return across, down
