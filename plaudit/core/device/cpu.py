"""The CPU back end: packed linear layers, SDPA over groups of like length, KV gathered block by block."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import torch
from torch import Tensor

from plaudit.core.device.backend import Copy, DecodeBatch, Decoded, Span
from plaudit.core.device.cpu_decode import DecodeWindow
from plaudit.core.device.mixing import Mixing, Walk
from plaudit.core.device.paged import PagedBackend, PagedLayout
from plaudit.core.model.decoder import Decoder
from plaudit.core.model.packing import Packed, packed_layout

NOISE = 2 * 2**20  # bytes of noise made at once: a small vocabulary's steps are too short for a call each


class CpuBackend(PagedBackend):
    block_size = 16
    budget = 2048
    max_running = 256
    look_every = window = 8

    def __init__(self, decoder: Decoder) -> None:
        super().__init__(decoder)
        self._window: DecodeWindow | None = None  # of the last decode, while nothing else wrote to the blocks

    def rows(self, packed: Packed, wanted: Tensor) -> Tensor:
        return self.wanted.hidden(packed.input_ids, packed.position_ids, packed.layout, wanted)

    def close(self) -> None:
        self._window = None
        super().close()

    def kv_bytes(self, reached: int) -> int:
        # Zeros that nobody has written over take no memory on the host.
        if self._cache is None:
            return 0
        states = self.states.reached * self.decoder.state_bytes() if self.states else 0
        return reached * self.block_size * self.decoder.token_bytes() + states

    def write(self, slots: Tensor, keys: Sequence[Tensor], values: Sequence[Tensor]) -> None:
        self._window = None
        super().write(slots, keys, values)

    def forward(self, spans: Sequence[Span], copies: Sequence[Copy]) -> Tensor:
        self._window = None  # the blocks of its rows may be given to others
        step = self.arrange(spans, copies)
        plain = packed_layout(step.shapes, step.slots, "cpu")
        layout = PagedLayout(plain.groups, plain.restore, cache=self.cache, slots=step.new, copies=step.copies)
        if self.states is not None:
            layout.mixing = Mixing(self.states, self.bank, spans, copies)
        return self.wanted.hidden(step.input_ids, step.position_ids, layout, step.wanted)

    def decode(self, batch: DecodeBatch, steps: int) -> Iterator[Decoded]:
        window = self._window
        if window is None or not window.goes_on(batch, steps):
            window = self._window = DecodeWindow(self.cache, batch, steps, self.block_size)
            if self.states is not None:
                at = batch.positions.tolist()  # which are the tokens before each row's last
                window.walk = Walk(self.states, self.bank, batch.tables.tolist(), at)
        sampler = batch.sampler
        at_once = max(1, NOISE // (len(batch.lengths) * self.decoder.vocab_size * 4))
        noted = []
        for step in range(steps):
            window.next()
            if step % at_once == 0:
                ahead = torch.arange(min(at_once, steps - step))[:, None]
                noise = sampler.noise(batch.drawn + ahead)
            hidden = self.decoder.hidden(batch.tokens[None], batch.positions[None], window)
            drawn = sampler.draw(self.decoder.logits(hidden), batch.drawn, noise[step % at_once])
            noted.append((drawn, batch.alive))
            batch.advance(drawn.tokens)
            if window.walk is not None:
                window.walk.advance(noted[-1][1], batch.alive)
            if not bool(batch.alive.any()):
                break
        window.store()
        yield Decoded.of(noted)
