"""Frames on a byte stream: a length, then one MessagePack message. No pickle.

Token ids and values travel as raw little-endian buffers inside a message: many sequences go in one frame, so the cost
of crossing is paid once per batch and not once per item.
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
        raise ValueError(f"a frame of {len(body)} bytes is more than the {LIMIT} that are taken")
    return LENGTH.pack(len(body)) + body


class FrameReader(Generic[F]):
    """Frames out of a stream of bytes."""

    def __init__(self, decoder: msgspec.msgpack.Decoder[F]) -> None:
        self._decoder = decoder
        self._buffer = bytearray()

    def feed(self, data: bytes) -> Iterator[F]:
        self._buffer += data
        while len(self._buffer) >= LENGTH.size:
            (length,) = LENGTH.unpack_from(self._buffer)
            if length > LIMIT:
                raise ValueError(f"a frame of {length} bytes is more than the {LIMIT} that are taken")
            end = LENGTH.size + length
            if len(self._buffer) < end:
                return
            frame = self._decoder.decode(memoryview(self._buffer)[LENGTH.size : end].tobytes())
            del self._buffer[:end]
            yield frame


def as_bytes(rows: Sequence[Sequence[int]]) -> bytes:
    return b"".join(np.asarray(row, dtype="<i4").tobytes() for row in rows)


def cut(data: bytes, lengths: Sequence[int]) -> Iterator[list[int]]:
    """The lists that `as_bytes` joined."""
    numbers = np.frombuffer(data, dtype="<i4").tolist()
    at = 0
    for length in lengths:
        yield numbers[at : at + length]
        at += length
    if at != len(numbers):
        raise ValueError(f"lengths that add up to {at} for {len(numbers)} numbers")
