"""A score cache keyed by the SHA-256 of everything that a score depends on. Limited in bytes, with LRU eviction."""

from __future__ import annotations

import hashlib
from array import array
from collections import OrderedDict
from collections.abc import Sequence

import numpy as np

OVERHEAD = 200  # bytes of an entry besides its values


def work_key(
    version: str, tokens: Sequence[int], positions: Sequence[int], columns: Sequence[int] | None, salt: str,
    logprobs: bool = False, types: bytes = b"",
) -> bytes:  # fmt: skip
    """The whole digest is the key and is compared in full, so two works never share an entry."""
    sizes = f"{len(tokens)} {len(positions)} {'-' if columns is None else len(columns)}"
    numbers = array("q", tokens)
    numbers.extend(positions)
    numbers.extend(columns or ())
    about = f"{version}\0{salt}\0{sizes} {logprobs}\0".encode()
    return hashlib.sha256(b"".join((about, numbers, types))).digest()


def step_keys(
    version: str, tokens: Sequence[int], positions: Sequence[int], columns: Sequence[int] | None, salt: str,
    logprobs: bool,
) -> list[bytes]:  # fmt: skip
    """A key for each position, of the tokens up to it, which is independent of later tokens. They cannot equal a
    work's key, because a version begins with a digit."""
    about = "-" if columns is None else " ".join(map(str, columns))
    digest = hashlib.sha256(f"step\0{version}\0{salt}\0{about} {logprobs}\0".encode())
    keys: list[bytes] = []
    start = 0
    for position in positions:
        digest.update(array("q", tokens[start : position + 1]))
        keys.append(digest.digest())
        start = position + 1
    return keys


class ScoreCache:
    def __init__(self, limit_bytes: int) -> None:
        self.limit_bytes = limit_bytes
        self.bytes = 0
        self._values: OrderedDict[bytes, np.ndarray] = OrderedDict()

    def get(self, key: bytes) -> np.ndarray | None:
        values = self._values.get(key)
        if values is not None:
            self._values.move_to_end(key)
        return values

    def put(self, key: bytes, values: np.ndarray) -> None:
        if key in self._values or values.nbytes + OVERHEAD > self.limit_bytes:
            return
        self._values[key] = values
        self.bytes += values.nbytes + OVERHEAD
        while self.bytes > self.limit_bytes:
            _, dropped = self._values.popitem(last=False)
            self.bytes -= dropped.nbytes + OVERHEAD

    def __len__(self) -> int:
        return len(self._values)
