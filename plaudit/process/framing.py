"""Frames on a byte stream: a length, then one MessagePack message. No pickle.

Token ids and values are sent as raw little-endian buffers in a message: a frame has many sequences, so the transfer
overhead is paid once per batch instead of once per item.
"""

from __future__ import annotations

import struct
from collections.abc import Iterator, Sequence
from typing import Any, Generic, TypeVar

import msgspec
import numpy as np

LIMIT = 1 << 30  # bytes in a frame
F = TypeVar("F")
LENGTH = struct.Struct("<I")
_ENCODER = msgspec.msgpack.Encoder()


def pack(frame: Any) -> bytes:
    body = _ENCODER.encode(frame)
    if len(body) > LIMIT:
        raise ValueError(f"a frame has {len(body)} bytes; the limit is {LIMIT}")
    return LENGTH.pack(len(body)) + body


class FrameReader(Generic[F]):
    """Reads frames from a byte stream."""

    def __init__(self, decoder: msgspec.msgpack.Decoder[F]) -> None:
        self._decoder = decoder
        self._buffer = bytearray()

    def feed(self, data: bytes) -> Iterator[F]:
        self._buffer += data
        while len(self._buffer) >= LENGTH.size:
            (length,) = LENGTH.unpack_from(self._buffer)
            if length > LIMIT:
                raise ValueError(f"a frame has {length} bytes; the limit is {LIMIT}")
            end = LENGTH.size + length
            if len(self._buffer) < end:
                return
            frame = self._decoder.decode(memoryview(self._buffer)[LENGTH.size : end].tobytes())
            del self._buffer[:end]
            yield frame


def as_bytes(rows: Sequence[Sequence[int]]) -> bytes:
    return b"".join(np.asarray(row, dtype="<i4").tobytes() for row in rows)


def cut(data: bytes, lengths: Sequence[int]) -> Iterator[list[int]]:
    """The lists that were joined by `as_bytes`."""
    numbers = np.frombuffer(data, dtype="<i4").tolist()
    at = 0
    for length in lengths:
        yield numbers[at : at + length]
        at += length
    if at != len(numbers):
        raise ValueError(f"lengths add up to {at}; expected {len(numbers)}, the number of values")
