"""What the HTTP process and a worker say to each other, over a socket pair: length-prefixed MessagePack, no pickle.

    front -> worker   Start, then Works, Prompt, Cancel
    worker -> front   Hello (loaded), Ready (warmed up), Alive (every second), Results; or Failed, and the end

A critic's worker takes Evaluate, Learn and Keep in place of Works and Prompt, and answers with Results too.

Token ids and values travel as raw little-endian buffers inside the message: many works go in one frame, so the cost of
crossing is paid once per batch and not once per item.
"""

from __future__ import annotations

import struct
from collections.abc import Iterator, Sequence
from typing import Any, Generic, TypeVar

import msgspec
import numpy as np

LIMIT = 1 << 30  # bytes in a frame
_LENGTH = struct.Struct("<I")


class Start(msgspec.Struct, tag=True, array_like=True):
    """The configuration of the model to load: a reward table as plain data."""

    table: dict[str, Any]


class Hello(msgspec.Struct, tag=True, array_like=True):
    """Loaded. The tokenizer travels as it was loaded, so that both sides split text alike."""

    digest: str  # of all that can change a score: reward.version
    facts: dict[str, Any]
    budget: int  # tokens of one step
    tokenizer: bytes
    tokenizer_options: dict[str, Any]


class Ready(msgspec.Struct, tag=True, array_like=True):
    pass


class Alive(msgspec.Struct, tag=True, array_like=True):
    """The process runs. Sent by a thread of its own, so a long step does not look like a stopped process."""


class Failed(msgspec.Struct, tag=True, array_like=True):
    """The model cannot be loaded; `message` is for the user."""

    message: str


class Works(msgspec.Struct, tag=True, array_like=True):
    """Sequences to read: `lengths` cuts `tokens`, `counts` cuts `positions`."""

    ids: list[int]
    lengths: list[int]
    tokens: bytes  # int32
    counts: list[int]
    positions: bytes  # int32
    columns: list[tuple[int, ...] | None]
    logprobs: list[bool]
    salts: list[str]


class GenerateFrame(msgspec.Struct, tag=True, array_like=True):
    """A sequence to continue, for a judge."""

    id: int
    tokens: bytes  # int32
    max_tokens: int
    temperature: float
    salt: str


class Cancel(msgspec.Struct, tag=True, array_like=True):
    ids: list[int]


class Waiting(msgspec.Struct, tag=True, array_like=True):
    """How many tokens the front has in its queue, for those who decide how many replicas there are."""

    tokens: int


class Evaluate(msgspec.Struct, tag=True, array_like=True):
    """Sequences whose values are asked for: `lengths` cuts `tokens`; or texts, which the worker tokenises."""

    id: int
    lengths: list[int]
    tokens: bytes  # int32
    texts: list[str] | None = None
    add_end: bool = False


class Learn(msgspec.Struct, tag=True, array_like=True):
    """An update of a critic: of each sequence the tokens behind its prompt have an entry in the last three."""

    id: int
    lengths: list[int]
    tokens: bytes  # int32
    prompts: list[int]
    mask: bytes  # bool
    returns: bytes  # float32
    values: bytes  # float32, as they were when the tokens were sampled
    update_id: str
    updates: int | None


class Keep(msgspec.Struct, tag=True, array_like=True):
    """Write a critic's whole state; or, with the name of one that was written, go back to it."""

    id: int
    load: str | None = None


class Results(msgspec.Struct, tag=True, array_like=True):
    """Of each id either a (rows, columns) block of `values`, or new tokens in `tokens`, or an error."""

    ids: list[int]
    rows: list[int]
    columns: list[int]
    values: bytes  # float32
    errors: list[tuple[int, str, str]]
    texts: list[tuple[int, str]]
    tokens_computed: int
    tokens_shared: int
    steps: int
    budget: int  # tokens of one step, now: less after the memory has run out


Frame = (
    Start
    | Hello
    | Ready
    | Alive
    | Failed
    | Works
    | GenerateFrame
    | Cancel
    | Waiting
    | Evaluate
    | Learn
    | Keep
    | Results
)
F = TypeVar("F")
_ENCODER = msgspec.msgpack.Encoder()
_DECODER: msgspec.msgpack.Decoder[Frame] = msgspec.msgpack.Decoder(Frame)


def pack(frame: msgspec.Struct) -> bytes:
    body = _ENCODER.encode(frame)
    if len(body) > LIMIT:
        raise ValueError(f"a frame of {len(body)} bytes is more than the {LIMIT} that a worker takes")
    return _LENGTH.pack(len(body)) + body


class Stream(Generic[F]):
    """Frames out of a stream of bytes."""

    def __init__(self, decoder: msgspec.msgpack.Decoder[F]) -> None:
        self._decoder = decoder
        self._buffer = bytearray()

    def feed(self, data: bytes) -> Iterator[F]:
        self._buffer += data
        while len(self._buffer) >= _LENGTH.size:
            (length,) = _LENGTH.unpack_from(self._buffer)
            if length > LIMIT:
                raise ValueError(f"a frame of {length} bytes is more than the {LIMIT} that are taken")
            end = _LENGTH.size + length
            if len(self._buffer) < end:
                return
            frame = self._decoder.decode(memoryview(self._buffer)[_LENGTH.size : end].tobytes())
            del self._buffer[:end]
            yield frame


class Unpacker(Stream[Frame]):
    """Of these frames."""

    def __init__(self) -> None:
        super().__init__(_DECODER)


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
