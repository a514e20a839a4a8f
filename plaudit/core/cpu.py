"""The CPU back end: packed linear layers, SDPA over groups of like length, KV gathered block by block."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from plaudit.core.attention import Layout, Rule, attend_group
from plaudit.core.backend import Backend, Copy, DecodeBatch, Decoded, Span
from plaudit.core.decoder import Decoder
from plaudit.core.packing import Packed, packed_layout
from plaudit.core.wanted import WantedRows


@dataclass
class KVCache:
    """Per layer, keys and values as (slots, kv heads, dim); block b is slots b * size .. (b + 1) * size - 1."""

    keys: list[Tensor]
    values: list[Tensor]


@dataclass
class PagedLayout(Layout):
    """New keys and values are stored first; the groups' keys are slots of the cache."""

    cache: KVCache | None = None
    slots: Tensor | None = None  # (T,) where each new token goes
    copies: tuple[Tensor, Tensor] | None = None  # source and target slots

    def context(self, layer: int, key: Tensor, value: Tensor) -> tuple[Tensor, Tensor]:
        assert self.cache is not None
        assert self.slots is not None
        keys, values = self.cache.keys[layer], self.cache.values[layer]
        keys.index_copy_(0, self.slots, key)
        values.index_copy_(0, self.slots, value)
        if self.copies is not None:
            source, target = self.copies
            keys.index_copy_(0, target, keys.index_select(0, source))
            values.index_copy_(0, target, values.index_select(0, source))
        return keys, values


@dataclass
class DecodeGroup:
    """Rows of the decode batch with like lengths."""

    rows: Tensor | None  # (B,) which rows; None: all, in order
    blocks: Tensor  # (B * N,) their blocks, flattened
    count: int  # N


class DecodeLayout(Layout):
    """One query per sequence. Whole blocks are gathered, which is several times faster than token by token."""

    def __init__(self, cache: KVCache, block_size: int, groups: Sequence[DecodeGroup], restore: Tensor | None) -> None:
        super().__init__((), torch.empty(0))
        self.cache = cache
        self.block_size = block_size
        self.decode_groups = groups
        self.back = restore
        self.slots = torch.empty(0)
        self.positions = torch.empty(0)

    def at(self, slots: Tensor, positions: Tensor) -> None:
        self.slots, self.positions = slots, positions
        self._masks.clear()

    def attend(self, layer: int, query: Tensor, key: Tensor, value: Tensor, rule: Rule) -> Tensor:
        keys, values = self.cache.keys[layer], self.cache.values[layer]
        keys.index_copy_(0, self.slots, key)
        values.index_copy_(0, self.slots, value)
        outputs = []
        for i, group in enumerate(self.decode_groups):
            q = query if group.rows is None else query.index_select(0, group.rows)
            k, v = self._gather(keys, group), self._gather(values, group)
            outputs.append(attend_group(q[:, None], k, v, self._mask(i, rule.window, query.dtype), rule)[:, 0])
        out = torch.cat(outputs) if len(outputs) > 1 else outputs[0]
        return out if self.back is None else out.index_select(0, self.back)

    def _gather(self, cache: Tensor, group: DecodeGroup) -> Tensor:
        """(B, N * block_size, heads, dim)."""
        heads, dim = cache.shape[1:]
        whole = cache.view(-1, self.block_size * heads * dim).index_select(0, group.blocks)
        return whole.view(-1, group.count * self.block_size, heads, dim)

    def _mask(self, index: int, window: int | None, dtype: torch.dtype) -> Tensor:
        group = self.decode_groups[index]
        length = group.count * self.block_size
        if window is not None and window >= length:
            window = None
        made = self._masks.get((index, window, dtype))
        if made is None:
            at = self.positions if group.rows is None else self.positions.index_select(0, group.rows)
            key = torch.arange(length)
            hidden = key > at[:, None]
            if window is not None:
                hidden |= key <= at[:, None] - window
            made = torch.zeros(hidden.shape, dtype=dtype).masked_fill_(hidden, float("-inf"))[:, None, None]
            self._masks[index, window, dtype] = made
        return made


class CpuBackend(Backend):
    block_size = 16

    def __init__(self, decoder: Decoder) -> None:
        super().__init__(decoder)
        self._cache: KVCache | None = None
        self._wanted = WantedRows(decoder)

    @property
    def cache(self) -> KVCache:
        if self._cache is None:
            raise RuntimeError("the KV cache is closed")
        return self._cache

    def open(self, blocks: int) -> None:
        # Zeros and not whatever was there: a masked key still meets a weight of 0, and 0 * nan is nan.
        slots, dtype = blocks * self.block_size, self.decoder.dtype
        layers = self.decoder.layers
        self._cache = KVCache(
            [torch.zeros(slots, layer.kv_heads, layer.key_dim, dtype=dtype) for layer in layers],
            [torch.zeros(slots, layer.kv_heads, layer.value_dim, dtype=dtype) for layer in layers],
        )

    def close(self) -> None:
        self._cache = None

    def rows(self, packed: Packed, wanted: Tensor) -> Tensor:
        return self._wanted.hidden(packed.input_ids, packed.position_ids, packed.layout, wanted)

    def forward(self, spans: Sequence[Span], copies: Sequence[Copy]) -> Tensor:
        layout = self._layout(spans, copies)
        tokens = torch.tensor([[t for span in spans for t in span.tokens]])
        positions = torch.from_numpy(np.concatenate([np.arange(s.start, s.start + len(s.tokens)) for s in spans]))
        starts = np.cumsum([0, *(len(s.tokens) for s in spans)])
        wanted = [int(start) + row for start, span in zip(starts, spans, strict=False) for row in span.wanted]
        return self._wanted.hidden(tokens, positions[None], layout, torch.tensor(wanted, dtype=torch.long))

    def _layout(self, spans: Sequence[Span], copies: Sequence[Copy]) -> PagedLayout:
        size = self.block_size
        offsets = np.arange(size)
        slots = [(np.array(s.blocks)[:, None] * size + offsets).ravel()[: s.start + len(s.tokens)] for s in spans]
        starts = np.cumsum([0, *(len(s.tokens) for s in spans)])
        shapes = [(int(first), len(s.tokens), s.start) for first, s in zip(starts, spans, strict=False)]
        plain = packed_layout(shapes, slots, "cpu")
        new = np.concatenate([at[s.start :] for at, s in zip(slots, spans, strict=True)])
        pairs = [(c.source * size + i, c.target * size + i) for c in copies for i in range(c.first, c.first + c.tokens)]
        both = torch.tensor(pairs).T if pairs else None
        return PagedLayout(
            plain.groups, plain.restore, cache=self.cache, slots=torch.from_numpy(new),
            copies=None if both is None else (both[0], both[1]),
        )  # fmt: skip

    def decode(self, batch: DecodeBatch, steps: int) -> Decoded:
        layout = self._decode_layout(batch, steps)
        tokens, logprobs, raw, alive = [], [], [], []
        for _ in range(steps):
            blocks = batch.tables.gather(1, (batch.positions // self.block_size)[:, None])[:, 0]
            layout.at(blocks * self.block_size + batch.positions % self.block_size, batch.positions)
            hidden = self.decoder.hidden(batch.tokens[None], batch.positions[None], layout)
            drawn = batch.sampler.draw(self.decoder.logits(hidden), batch.drawn)
            tokens.append(drawn.tokens)
            logprobs.append(drawn.logprobs)
            raw.append(drawn.raw_logprobs)
            alive.append(batch.alive)
            batch.advance(drawn.tokens)
            if not bool(batch.alive.any()):
                break
        return Decoded(torch.stack(tokens), torch.stack(logprobs), torch.stack(raw), torch.stack(alive))

    def _decode_layout(self, batch: DecodeBatch, steps: int) -> DecodeLayout:
        """Group rows so that none gathers more than about twice what it needs."""
        held = batch.tables.shape[1]
        needs = [min(-(-(length + steps - 1) // self.block_size), held) for length in batch.lengths]
        order = sorted(range(len(needs)), key=lambda i: (needs[i], i))
        members: list[list[int]] = []
        for i in order:
            if members and needs[i] <= needs[members[-1][0]] * 1.5 + 2:
                members[-1].append(i)
            else:
                members.append([i])
        if len(members) == 1:
            count = max(needs)
            return DecodeLayout(
                self.cache, self.block_size, [DecodeGroup(None, batch.tables[:, :count].flatten(), count)], None
            )
        groups = []
        for rows in members:
            count = max(needs[i] for i in rows)
            at = torch.tensor(rows)
            groups.append(DecodeGroup(at, batch.tables[at, :count].flatten(), count))
        back = torch.empty(len(needs), dtype=torch.long)
        back[torch.tensor([i for rows in members for i in rows])] = torch.arange(len(needs))
        return DecodeLayout(self.cache, self.block_size, groups, back)
