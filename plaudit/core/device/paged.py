"""The paged KV cache of every device: its tensors, and the slots of a step's tokens."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import chain

import numpy as np
import torch
from torch import Tensor

from plaudit.core.device.backend import Backend, Copy, Span
from plaudit.core.device.mixing import Mixing
from plaudit.core.model.attention import Layout
from plaudit.core.model.decoder import Decoder
from plaudit.core.model.last_layer import WantedRows
from plaudit.core.model.mixers import Mixer
from plaudit.core.model.packing import send
from plaudit.core.states import StateBank, StateTable


@dataclass
class KVCache:
    """Keys and values per layer, (slots, kv heads, dim); block b is slots b * size .. (b + 1) * size - 1. Values that
    are part of the keys have width 0 (Rule.latent)."""

    keys: list[Tensor]
    values: list[Tensor]


@dataclass
class PagedLayout(Layout):
    """A layout that stores new keys and values first; the groups' keys are slots of the cache."""

    cache: KVCache | None = None
    slots: Tensor | None = None  # (T,) the slot of each new token
    copies: tuple[Tensor, Tensor] | None = None  # source and target slots
    mixing: Mixing | None = None  # of a model with recurrent layers

    def mix(self, mixer: Mixer, hidden: Tensor) -> Tensor:
        assert self.mixing is not None
        return self.mixing.mix(mixer, hidden)

    def context(self, layer: int, key: Tensor, value: Tensor) -> tuple[Tensor, Tensor]:
        assert self.cache is not None
        assert self.slots is not None
        keys, values = self.cache.keys[layer], self.cache.values[layer]
        for kept, new in ((keys, key), (values, value)):
            if not kept.shape[2]:  # values that are part of the keys
                continue
            kept.index_copy_(0, self.slots, new)
            if self.copies is not None:
                source, target = self.copies
                kept.index_copy_(0, target, kept.index_select(0, source))
        return keys, values


@dataclass(frozen=True)
class Step:
    """The spans of a step as one packed row."""

    shapes: list[tuple[int, int, int]]  # first row, new tokens, tokens before, per span
    slots: list[np.ndarray]  # per span, the slot of each of its tokens, earlier ones included
    new: Tensor  # (T,) the slots of the row's tokens
    copies: tuple[Tensor, Tensor] | None
    input_ids: Tensor  # (1, T)
    position_ids: Tensor  # (1, T)
    wanted: Tensor  # (W,) rows to return


class PagedBackend(Backend):
    def __init__(self, decoder: Decoder) -> None:
        super().__init__(decoder)
        self.wanted = WantedRows(decoder)
        self._cache: KVCache | None = None
        self._bank: StateBank | None = None
        self.states = StateTable(self.block_size) if decoder.states else None

    @property
    def cache(self) -> KVCache:
        if self._cache is None:
            raise RuntimeError("the KV cache is closed")
        return self._cache

    def open(self, blocks: int) -> None:
        slots, device, dtype = (blocks + self.spare) * self.block_size, self.decoder.device, self.decoder.dtype

        def made(heads: int, dim: int) -> Tensor:
            # Zeros, not uninitialized memory: a masked key still gets a weight of 0, and 0 * nan is nan.
            return torch.zeros(slots, heads, dim, dtype=dtype, device=device)

        layers = self.decoder.layers
        self._cache = KVCache(
            [made(layer.kv_heads, layer.key_dim) for layer in layers],
            [made(layer.kv_heads, layer.value_dim) for layer in layers],
        )
        if self.states is not None:
            rows = self.state_rows(self.states.running)
            self._bank = StateBank(self.decoder.states, self.states.slots, device, rows)

    @property
    def bank(self) -> StateBank:
        if self._bank is None:
            raise RuntimeError("the states have no memory: the KV cache is closed")
        return self._bank

    def close(self) -> None:
        self._cache = self._bank = None

    def kv_bytes(self, reached: int) -> int:
        if self._cache is None:
            return 0
        states = 0 if self._bank is None else self._bank.nbytes
        return sum(layer.nbytes for layer in (*self._cache.keys, *self._cache.values)) + states

    def read(self, slots: Tensor) -> tuple[list[Tensor], list[Tensor]]:
        keys = [each.index_select(0, slots) for each in self.cache.keys]
        return keys, [each.index_select(0, slots) for each in self.cache.values]

    def write(self, slots: Tensor, keys: Sequence[Tensor], values: Sequence[Tensor]) -> None:
        for cached, incoming in zip((*self.cache.keys, *self.cache.values), (*keys, *values), strict=True):
            if cached.shape[2]:
                cached.index_copy_(0, slots, incoming.to(cached.device))

    def copy(self, copies: Sequence[Copy]) -> None:
        source, target = send(_copied(copies, self.block_size), self.decoder.device)
        for kept in (*self.cache.keys, *self.cache.values):
            if kept.shape[2]:
                kept.index_copy_(0, target, kept.index_select(0, source))

    def arrange(self, spans: Sequence[Span], copies: Sequence[Copy]) -> Step:
        # A search has many spans of one token each; creating an array for each would dominate.
        device, size = self.decoder.device, self.block_size
        lengths, before = [len(s.tokens) for s in spans], [s.start for s in spans]
        counts, total = np.array(lengths), sum(lengths)
        starts = counts.cumsum() - counts
        block_counts = np.array([len(s.blocks) for s in spans])
        blocks = _end_to_end([s.blocks for s in spans], int(block_counts.sum()))
        every = (blocks[:, None] * size + np.arange(size)).ravel()
        begins = (block_counts.cumsum() - block_counts) * size
        slots = [every[b : b + n] for b, n in zip(begins.tolist(), (counts + before).tolist(), strict=True)]
        positions = np.arange(total) + np.repeat(before - starts, counts)
        new = every[positions + np.repeat(begins, counts)]
        both = send(_copied(copies, size), device) if copies else None
        tokens = _end_to_end([s.tokens for s in spans], total)
        firsts = starts.tolist()
        wanted = [first + row for first, s in zip(firsts, spans, strict=True) for row in s.wanted]
        return Step(
            shapes=list(zip(firsts, lengths, before, strict=True)),
            slots=slots,
            new=send(new, device),
            copies=None if both is None else (both[0], both[1]),
            input_ids=send(tokens, device)[None],
            position_ids=send(positions, device)[None],
            wanted=send(np.array(wanted, dtype=np.int64), device),
        )


def _copied(copies: Sequence[Copy], size: int) -> np.ndarray:
    """(2, n): the source and the target slot of each copied token."""
    starts = np.array([(c.source * size + c.first, c.target * size + c.first) for c in copies]).T
    counts = np.array([c.tokens for c in copies])
    within = np.arange(counts.sum()) - np.repeat(counts.cumsum() - counts, counts)
    both: np.ndarray = np.repeat(starts, counts, axis=1) + within
    return both


def _end_to_end(parts: Sequence[Sequence[int] | np.ndarray], count: int) -> np.ndarray:
    """Concatenate; the parts are all sequences of numbers or all arrays."""
    if isinstance(parts[0], np.ndarray):
        return np.concatenate(parts, dtype=np.int64)
    return np.fromiter(chain.from_iterable(parts), dtype=np.int64, count=count)
