"""The messages between the HTTP process and a worker, over a socket pair: length-prefixed MessagePack, no pickle.

        server -> worker   Start, then Works, GenerateFrame, Cancel
        worker -> server   Hello (loaded), Ready (warmed up), Alive (every second), Results; or Failed, then exit

A critic's worker accepts Evaluate, Learn and Keep instead of Works and GenerateFrame, and also answers with Results.
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
    """The model is loaded. Includes the loaded tokenizer, so that both sides tokenise identically."""

    digest: str  # of everything that can change a score: reward.version
    facts: dict[str, Any]
    budget: int  # tokens per step
    tokenizer: bytes
    tokenizer_options: dict[str, Any]


class Ready(msgspec.Struct, tag=True, array_like=True):
    pass


class Works(msgspec.Struct, tag=True, array_like=True):
    """Sequences to score: `lengths` splits `tokens`, `counts` splits `positions`."""

    ids: list[int]
    lengths: list[int]
    tokens: bytes  # int32
    counts: list[int]
    positions: bytes  # int32
    columns: list[tuple[int, ...] | None]
    logprobs: list[bool]
    salts: list[str]
    types: list[bytes] = []  # of each sequence, for encoders with token types
    timed: bool = False  # report the duration of each


class Sampling(msgspec.Struct, array_like=True, frozen=True):
    """The subset of `SamplingParams` that a caller may set, under the same names."""

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
    include_stop: bool = False


class GenerateFrame(msgspec.Struct, tag=True, array_like=True):
    """A sequence to continue. With `stream` its samples are sent in pieces, otherwise each in one piece."""

    id: int
    tokens: bytes  # int32
    sampling: Sampling
    salt: str
    stream: bool = False
    timed: bool = False


class TextPiece(msgspec.Struct, array_like=True):
    """New tokens of one sample, from index `at`, and new text, from character `begin`. A restarted worker begins
    again, so pieces may repeat earlier ones."""

    id: int
    index: int
    at: int
    tokens: list[int]
    logprobs: list[float]  # under the model's unmodified distribution
    begin: int
    text: str
    finish: str = ""  # the finish reason; "" while unfinished
    top: list[Likely] = []  # likeliest tokens, if requested
    prompt: tuple[float, ...] | None = (
        None  # log-probs of the prompt and its likeliest tokens, in a sample sent as a whole
    )
    prompt_top: tuple[Likely, ...] | None = None
    prompt_ranks: tuple[int, ...] | None = None
    stop: str = ""  # the stop string that ended the text


class Cancel(msgspec.Struct, tag=True, array_like=True):
    ids: list[int]


class Waiting(msgspec.Struct, tag=True, array_like=True):
    """The number of tokens queued in the server, for autoscaling."""

    tokens: int


class Evaluate(msgspec.Struct, tag=True, array_like=True):
    """Sequences whose values are requested: `lengths` splits `tokens`; or texts, which the worker tokenises."""

    id: int
    lengths: list[int]
    tokens: bytes  # int32
    texts: list[str] | None = None
    add_end: bool = False


class Learn(msgspec.Struct, tag=True, array_like=True):
    """A critic's training step: the last three fields have an entry for each token after a sequence's prompt."""

    id: int
    lengths: list[int]
    tokens: bytes  # int32
    prompts: list[int]
    mask: bytes  # bool
    returns: bytes  # float32
    values: bytes  # float32, from when the tokens were sampled
    update_id: str
    updates: int | None


class Keep(msgspec.Struct, tag=True, array_like=True):
    """Save a critic's whole state; or, with the name of a saved one, restore it."""

    id: int
    load: str | None = None


class Results(msgspec.Struct, tag=True, array_like=True):
    """For each id a (rows, columns) block of `values`, pieces of a continuation, or an error. `texts` are used by
    critics."""

    ids: list[int]
    rows: list[int]
    columns: list[int]
    values: bytes  # float32
    errors: list[tuple[int, str, str]]
    texts: list[tuple[int, str]]
    tokens_computed: int
    tokens_shared: int
    steps: int
    budget: int  # current tokens per step: reduced after an out-of-memory error
    pieces: list[TextPiece] = []
    seconds: dict[int, float] = {}  # by id: duration in the worker, if requested


Frame = (
    Start | Hello | Ready | Alive | Failed | Works | GenerateFrame | Cancel | Waiting | Evaluate | Learn | Keep
    | Results
)  # fmt: skip
DECODER: msgspec.msgpack.Decoder[Frame] = msgspec.msgpack.Decoder(Frame)


class Unpacker(FrameReader[Frame]):
    """Reads these frames."""

    def __init__(self) -> None:
        super().__init__(DECODER)


class Timer:
    """Measures the time a worker spends on jobs that request it."""

    def __init__(self) -> None:
        self._taken: dict[int, float] = {}

    def take(self, ids: Iterable[int]) -> None:
        now = time.monotonic()
        self._taken.update((id, now) for id in ids)

    def end(self, ids: Iterable[int]) -> dict[int, float]:
        """Seconds by id. For several samples of a prompt the first to end counts."""
        if not self._taken:
            return {}
        now = time.monotonic()
        return {id: now - self._taken.pop(id) for id in ids if id in self._taken}
