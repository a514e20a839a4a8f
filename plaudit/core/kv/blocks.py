"""The pool of KV blocks: allocation and reference counts."""

from __future__ import annotations

from collections.abc import Iterable

import numpy as np


class BlockPool:
    """Reference counts of a fixed number of blocks, independent of their contents."""

    def __init__(self, blocks: int) -> None:
        self.blocks = blocks
        self.reached = 0  # 1 + the highest block ever used
        self.reset()

    def reset(self) -> None:
        """Free every block, whatever its reference count."""
        self.refs = [0] * self.blocks
        self._free = list(range(self.blocks - 1, -1, -1))  # a stack: the block freed last is reused first

    @property
    def free(self) -> int:
        return len(self._free)

    @property
    def in_use(self) -> int:
        return self.blocks - len(self._free)

    def allocate(self) -> int:
        block = self._free.pop()
        self.refs[block] = 1
        self.reached = max(self.reached, block + 1)
        return block

    def retain(self, block: int) -> None:
        if self.refs[block] == 0:
            raise RuntimeError(f"block {block} is free and cannot be shared")
        self.refs[block] += 1

    def release(self, block: int) -> None:
        if self.refs[block] == 0:
            raise RuntimeError(f"block {block} was released twice")
        self.refs[block] -= 1
        if self.refs[block] == 0:
            self._free.append(block)

    def check(self, holders: Iterable[Iterable[int]]) -> None:
        """Raise unless every reference has a holder, every block without one is free, and no block is free twice."""
        refs = np.array(self.refs, dtype=np.int64)
        blocks = np.array([block for blocks in holders for block in blocks], dtype=np.int64)
        counts = np.bincount(blocks, minlength=self.blocks)
        wrong = np.flatnonzero(counts != refs)
        if len(wrong):
            block = int(wrong[0])
            raise RuntimeError(f"block {block} counts {refs[block]} references and has {counts[block]} holders")
        idle = np.flatnonzero(refs == 0)
        if not np.array_equal(np.sort(self._free), idle):
            raise RuntimeError(f"the free list has {len(self._free)} blocks, {len(idle)} have no holder")
