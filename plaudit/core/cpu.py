"""The CPU back end: packed linear layers, SDPA over groups of like length, KV gathered block by block."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from plaudit.core.backend import Copy, DecodeBatch, Decoded, Span
from plaudit.core.cpu_decode import DecodeWindow
from plaudit.core.packing import Packed, packed_layout
from plaudit.core.paged import PagedBackend, PagedLayout


class CpuBackend(PagedBackend):
    block_size = 16
    budget = 2048
    max_running = 256
    look_every = 8

    def rows(self, packed: Packed, wanted: Tensor) -> Tensor:
        return self.wanted.hidden(packed.input_ids, packed.position_ids, packed.layout, wanted)

    def forward(self, spans: Sequence[Span], copies: Sequence[Copy]) -> Tensor:
        step = self.arrange(spans, copies)
        plain = packed_layout(step.shapes, step.slots, "cpu")
        layout = PagedLayout(plain.groups, plain.restore, cache=self.cache, slots=step.new, copies=step.copies)
        return self.wanted.hidden(step.input_ids, step.position_ids, layout, step.wanted)

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
