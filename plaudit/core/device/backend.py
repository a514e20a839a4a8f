"""The interface between the engine and a device (KV storage, attention, decode loop).

The scheduler, the prefix tree, the sampler and the engine use only this interface. A back end owns the KV tensors and
the attention over them, and nothing else: it is given block numbers, and the weights belong to the module.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from plaudit.core.model.decoder import Decoder
from plaudit.core.model.packing import Packed
from plaudit.core.sampling.sampler import Drawn, Sampler
from plaudit.core.states import StateTable
from plaudit.errors import RequestError


@dataclass(frozen=True)
class Span:
    """The tokens of one sequence that a step computes. Token i of the sequence is stored in blocks[i // block_size]."""

    tokens: Sequence[int] | np.ndarray  # the new ones
    start: int  # position of the first; the KV of all tokens before it is in the blocks, or is stored in this step
    blocks: Sequence[int] | np.ndarray  # enough for start + len(tokens) tokens
    wanted: Sequence[int] | np.ndarray = ()  # the new tokens whose hidden rows are returned, counted from `start`


@dataclass(frozen=True)
class Copy:
    """Copy on write: tokens first .. first + tokens - 1 of one block to the same offsets of another. The source may be
    written in the same step, so a layer copies after it has stored its new keys and before attention."""

    source: int
    target: int
    first: int
    tokens: int


def copies_into(target: int, source: int, tokens: int, planned: Mapping[int, Sequence[Copy]]) -> list[Copy]:
    """The copies of the first `tokens` tokens of a block into another. All copies of a step happen at once, so tokens
    that the source itself receives by a copy in this step are copied from their origin. planned: the copies so far, by
    target block."""
    copies = []
    own = 0
    for earlier in planned.get(source, ()):
        if earlier.first < tokens:
            end = min(earlier.first + earlier.tokens, tokens)
            copies.append(Copy(earlier.source, target, earlier.first, end - earlier.first))
            own = max(own, end)
    if own < tokens:
        copies.append(Copy(source, target, own, tokens - own))
    return copies


@dataclass
class DecodeBatch:
    """Sequences that decode one token per step, as columns. The back end advances it in place.

    tokens     (B,) the last token of each, whose KV is not yet stored
    positions  (B,) its position in the sequence
    drawn      (B,) how many tokens the sequence has generated before this step; the sampler's position
    left       (B,) how many more tokens it may generate
    alive      (B,) False from the step after a stop token or the last allowed one; finished rows no longer advance
    stops      (B, S) tokens that end a row, padded with -1
    tables     (B, N) blocks, enough for `positions + steps` tokens of every row, padded with 0
    """

    tokens: Tensor
    positions: Tensor
    drawn: Tensor
    left: Tensor
    alive: Tensor
    stops: Tensor
    tables: Tensor
    sampler: Sampler
    lengths: Sequence[int]  # positions + 1 at the start, on the host

    def advance(self, tokens: Tensor) -> None:
        """Use the drawn tokens as the next input. Rows that end keep their last token and position, so that they keep
        writing the same KV to the same slot and never touch a block of another sequence."""
        self.sampler.note(tokens)
        ended = (self.stops == tokens[:, None]).any(dim=1)
        self.alive = self.alive & ~ended & (self.left > 1)
        step = self.alive.long()
        self.tokens = torch.where(self.alive, tokens, self.tokens)
        self.positions = self.positions + step
        self.drawn = self.drawn + step
        self.left = self.left - step


@dataclass(frozen=True)
class Decoded:
    """The drawn token and its log-probs, per step and row. Row b is valid while `alive` is true."""

    tokens: Tensor  # (steps, B) int64
    logprobs: Tensor  # (steps, B)
    raw_logprobs: Tensor  # (steps, B)
    alive: Tensor  # (steps, B) bool: whether the row was alive before the step
    tempered: Tensor | None = None  # (steps, B), see Drawn
    top: tuple[Tensor, Tensor] | None = None  # (steps, B, N)

    @classmethod
    def of(cls, draws: Sequence[tuple[Drawn, Tensor]]) -> Decoded:
        """Stack the draws of each step, with the rows alive before it, on the host."""
        columns = zip(*((d.tokens, d.logprobs, d.raw_logprobs, alive) for d, alive in draws), strict=True)
        tokens, logprobs, raws, alive = (torch.stack(column).cpu() for column in columns)
        tempered = [d.tempered for d, _ in draws if d.tempered is not None]
        tops = [d.top for d, _ in draws if d.top is not None]
        top = tuple(torch.stack(column).cpu() for column in zip(*tops, strict=True)) if tops else None
        return cls(tokens, logprobs, raws, alive, torch.stack(tempered).cpu() if tempered else None, top)  # type: ignore[arg-type]


class Backend(ABC):
    block_size: int
    spare: int = 0  # blocks that the back end uses itself, included in `kv_bytes`
    # Defaults of the Engine's arguments; see Engine.
    budget: int
    max_running: int
    look_every: int
    window: int  # maximum of decode steps without returning to the host, if nothing waits for it
    exact: bool = True  # see Engine
    states: StateTable | None = None  # of a model with recurrent layers
    overlaps: bool = False  # forward() returns before the device has computed it

    def __init__(self, decoder: Decoder) -> None:
        self.decoder = decoder

    def record_experts(self) -> None:
        """Record the experts of every token next to its KV, from the first open() on."""
        raise RequestError(
            f"experts can be recorded only on a CPU, but this engine's back end is a {type(self).__name__} on "
            f"{self.decoder.device}: leave out train.routing_replay"
        )

    def experts_at(self, blocks: Sequence[int], tokens: int) -> bytes | None:
        """The recorded experts (Sample.experts) of the first `tokens` tokens in these blocks; None if not recorded."""
        return None

    @abstractmethod
    def open(self, blocks: int) -> None:
        """Allocate KV for this many blocks. Called before the first forward, and again after close()."""

    def state_rows(self, running: int) -> int:
        """The number of states, in addition to the slots, that `running` sequences need to decode."""
        return 0

    @abstractmethod
    def close(self) -> None:
        """Free the KV."""

    @abstractmethod
    def kv_bytes(self, reached: int) -> int:
        """KV memory in use, if the first `reached` blocks have been written to."""

    @abstractmethod
    def read(self, slots: Tensor) -> tuple[list[Tensor], list[Tensor]]:
        """Keys and values per layer, (slots, kv heads, dim). Slot i of block b is b * block_size + i."""

    @abstractmethod
    def write(self, slots: Tensor, keys: Sequence[Tensor], values: Sequence[Tensor]) -> None:
        """Store KV that was computed elsewhere."""

    @abstractmethod
    def copy(self, copies: Sequence[Copy]) -> None:
        """Copy on write, outside of a forward."""

    @abstractmethod
    def rows(self, packed: Packed, wanted: Tensor) -> Tensor:
        """A forward that stores nothing: the wanted hidden rows, (W, hidden)."""

    @abstractmethod
    def forward(self, spans: Sequence[Span], copies: Sequence[Copy]) -> Tensor:
        """Compute the spans' tokens, store their KV, and return the wanted hidden rows of all spans, concatenated."""

    @abstractmethod
    def decode(self, batch: DecodeBatch, steps: int) -> Iterator[Decoded]:
        """Draw up to `steps` tokens for every row without returning to the host, or fewer if many rows have ended.
        Yields them in pieces: while the host reads one, a device computes the next."""
