"""What the HTTP process and a worker say to each other, over a socket pair: length-prefixed MessagePack, no pickle.

    front -> worker   Start, then Works, GenerateFrame, Cancel
    worker -> front   Hello (loaded), Ready (warmed up), Alive (every second), Results; or Failed, and the end

A critic's worker takes Evaluate, Learn and Keep in place of Works and GenerateFrame, and answers with Results too.
"""

from __future__ import annotations

import time
from collections.abc import Iterable
from typing import Any

import msgspec

from plaudit.process.framing import FrameReader, as_bytes, cut, pack
from plaudit.process.worker import Alive, Failed
from plaudit.records import Likely

__all__ = ["Alive", "Failed", "as_bytes", "cut", "pack"]


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
    types: list[bytes] = []  # of each sequence, where an encoder's tokens have types
    timed: bool = False  # somebody wants to know how long each takes


class Sampling(msgspec.Struct, array_like=True, frozen=True):
    """Of `SamplingParams` what a caller may choose, under the same names."""

    max_tokens: int
    temperature: float
    n: int = 1
    top_k: int = 0
    top_p: float = 1.0
    min_p: float = 0.0
    stop: tuple[str, ...] = ()
    stop_token_ids: tuple[int, ...] = ()
    min_tokens: int = 0
    logit_bias: dict[int, float] = {}
    seed: int | None = None
    ignore_eos: bool = False
    repetition_penalty: float = 1.0
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0
    allowed_token_ids: tuple[int, ...] | None = None
    json_schema: str | None = None
    regex: str | None = None
    top_logprobs: int = 0
    prompt_logprobs: int | None = None


class GenerateFrame(msgspec.Struct, tag=True, array_like=True):
    """A sequence to continue. With `stream` its samples come piece by piece, else each in one."""

    id: int
    tokens: bytes  # int32
    sampling: Sampling
    salt: str
    stream: bool = False
    timed: bool = False


class TextPiece(msgspec.Struct, array_like=True):
    """What is new of one sample: tokens from the `at`-th on, text from the character `begin` on. A worker that has died
    is followed by one that begins again, so a piece may say what was said before."""

    id: int
    index: int
    at: int
    tokens: list[int]
    logprobs: list[float]  # of the model's own distribution
    begin: int
    text: str
    finish: str = ""  # why it has ended; "" as long as it goes on
    top: list[Likely] = []  # of the tokens, where it is asked for
    prompt: tuple[float, ...] | None = (
        None  # log-probs of the prompt, in a sample that comes whole, and its likeliest tokens
    )
    prompt_top: tuple[Likely, ...] | None = None


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
    """Of each id either a (rows, columns) block of `values`, or pieces of a continuation, or an error. `texts` are a
    critic's."""

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
    pieces: list[TextPiece] = []
    seconds: dict[int, float] = {}  # by id: since it came, where that was asked for


Frame = (
    Start | Hello | Ready | Alive | Failed | Works | GenerateFrame | Cancel | Waiting | Evaluate | Learn | Keep
    | Results
)  # fmt: skip
DECODER: msgspec.msgpack.Decoder[Frame] = msgspec.msgpack.Decoder(Frame)


class Unpacker(FrameReader[Frame]):
    """Of these frames."""

    def __init__(self) -> None:
        super().__init__(DECODER)


class Timer:
    """How long a worker has what somebody wants to know it of."""

    def __init__(self) -> None:
        self._taken: dict[int, float] = {}

    def take(self, ids: Iterable[int]) -> None:
        now = time.monotonic()
        self._taken.update((id, now) for id in ids)

    def end(self, ids: Iterable[int]) -> dict[int, float]:
        """Seconds, by id. Of several samples of a prompt the first to end counts."""
        if not self._taken:
            return {}
        now = time.monotonic()
        return {id: now - self._taken.pop(id) for id in ids if id in self._taken}
