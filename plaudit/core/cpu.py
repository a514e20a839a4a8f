"""The CPU back end: packed linear layers, SDPA over groups of like length, KV gathered block by block."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from plaudit.core.attention import Layout
from plaudit.core.backend import Backend, Copy, DecodeBatch, Decoded, Span
from plaudit.core.cpu_decode import DecodeWindow, KVCache
from plaudit.core.decoder import Decoder
from plaudit.core.packing import Packed, packed_layout
from plaudit.core.wanted import WantedRows


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


class CpuBackend(Backend):
    block_size = 16
    budget = 2048
    max_running = 256
    look_every = 8

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
        window = DecodeWindow(self.cache, batch, steps, self.block_size)
        tokens, logprobs, raw, alive = [], [], [], []
        for _ in range(steps):
            window.at(batch.positions)
            hidden = self.decoder.hidden(batch.tokens[None], batch.positions[None], window)
            drawn = batch.sampler.draw(self.decoder.logits(hidden), batch.drawn)
            tokens.append(drawn.tokens)
            logprobs.append(drawn.logprobs)
            raw.append(drawn.raw_logprobs)
            alive.append(batch.alive)
            batch.advance(drawn.tokens)
            if not bool(batch.alive.any()):
                break
        window.store()
        return Decoded(torch.stack(tokens), torch.stack(logprobs), torch.stack(raw), torch.stack(alive))
