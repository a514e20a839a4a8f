"""The CPU back end: packed linear layers, SDPA over groups of similar length, KV gathered block by block."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext

import numpy as np
import torch
from torch import Tensor

from plaudit.algo.tokens.products import needs_steadying
from plaudit.core.device.backend import Copy, DecodeBatch, Decoded, Span
from plaudit.core.device.columns import columns_of
from plaudit.core.device.cpu_decode import STEPS, DecodeWindow
from plaudit.core.device.mixing import Mixing, WindowStates
from plaudit.core.device.paged import PagedBackend, PagedLayout
from plaudit.core.model import operations
from plaudit.core.model.decoder import Decoder
from plaudit.core.model.fusion import Fusion
from plaudit.core.model.packing import Packed, packed_layout
from plaudit.core.routing import Recorder, Routing

NOISE = 2 * 2**20  # bytes of noise computed at once: with a small vocabulary a call per step would dominate


class CpuBackend(PagedBackend):
    block_size = 16
    budget = 2048
    max_running = 256
    look_every = 8
    window = STEPS  # columns that are laid out at once

    def __init__(self, decoder: Decoder) -> None:
        super().__init__(decoder)
        if self.states is not None:  # states are stored only when the host takes over
            self.window = self.look_every
        self._fusion: Fusion | None = None
        self._window: DecodeWindow | None = None  # of the last decode, until anything else writes to the blocks
        self._routing: Routing | None = None  # of a mixture whose experts are recorded
        self._experts = torch.empty(0)  # recorded experts of each slot: (slots, routers, k)

    def record_experts(self) -> None:
        self._routing = Routing(self.decoder)
        self.decoder.record_bytes = self._routing.token_bytes
        self.wanted.layer = None  # the last layer's routers must choose for every row too

    def experts_at(self, blocks: Sequence[int], tokens: int) -> bytes | None:
        if self._routing is None:
            return None
        size = self.block_size
        slots = (torch.tensor(blocks, dtype=torch.long)[:, None] * size + torch.arange(size)).ravel()[:tokens]
        return self._experts[slots].numpy().tobytes() if tokens else b""

    def open(self, blocks: int) -> None:
        super().open(blocks)
        if self._routing is not None:
            empty = np.zeros((blocks * self.block_size, *self._routing.shape), self._routing.dtype)
            self._experts = torch.from_numpy(empty)

    def rows(self, packed: Packed, wanted: Tensor) -> Tensor:
        packed.layout.exact = self.steady
        with self._steadied(min(packed.input_ids.shape[1], len(wanted))):
            return self.wanted.hidden(packed.input_ids, packed.position_ids, packed.layout, wanted)

    def close(self) -> None:
        self._window, self._experts = None, torch.empty(0)
        super().close()

    def kv_bytes(self, reached: int) -> int:
        # Zero pages that were never written take no host memory.
        if self._cache is None:
            return 0
        states = self.states.reached * self.decoder.state_bytes() if self.states else 0
        return reached * self.block_size * self.decoder.token_bytes() + states

    def write(self, slots: Tensor, keys: Sequence[Tensor], values: Sequence[Tensor]) -> None:
        self._window = None
        super().write(slots, keys, values)

    def copy(self, copies: Sequence[Copy]) -> None:
        self._window = None
        super().copy(copies)

    def forward(self, spans: Sequence[Span], copies: Sequence[Copy]) -> Tensor:
        self._window = None  # its rows' blocks may now belong to other sequences
        step = self.arrange(spans, copies)
        plain = packed_layout(step.shapes, step.slots, "cpu")
        layout = PagedLayout(
            plain.groups, plain.restore, exact=self.steady, cache=self.cache, slots=step.new, copies=step.copies
        )  # fmt: skip
        if self.states is not None:
            layout.mixing = Mixing(self.states, self.bank, spans, copies)
        with self._steadied(min(len(step.new), len(step.wanted))), self._recorded(lambda: step.new):
            rows = self.wanted.hidden(step.input_ids, step.position_ids, layout, step.wanted)
        if self._routing is not None and step.copies is not None:
            source, target = step.copies
            self._experts[target] = self._experts[source]
        return rows

    @contextmanager
    def _recorded(self, slots_of: Callable[[], Tensor], counts: Tensor | None = None) -> Iterator[None]:
        """Record the experts of the enclosed pass for these slots; of those only where `counts` is true, if given."""
        if self._routing is None:
            yield
            return
        recorder = Recorder()
        with self._routing.by(recorder):
            yield
        slots, chosen = slots_of(), recorder.rows().to(self._experts.dtype)
        self._experts[slots if counts is None else slots[counts]] = chosen if counts is None else chosen[counts]

    @property
    def steady(self) -> bool:
        """Whether a row must have the same bits in any batch and in a learner."""
        return self.exact and self.decoder.kind == "causal" and self.decoder.dtype == torch.float32

    def _steadied(self, rows: int) -> AbstractContextManager[None]:
        """A context for passes of `rows` rows by the module itself: with the learner's operations, and few rows padded
        if the library uses another kernel for them. A lean trunk does this itself."""
        if not self.steady or self.decoder.lean is not None:
            return nullcontext()
        if self._fusion is None:
            self._fusion = Fusion(self.decoder.trunk, operations)
        return self._fusion.applied(needs_steadying(rows, self.decoder.device))

    def decode(self, batch: DecodeBatch, steps: int) -> Iterator[Decoded]:
        window = self._window
        if window is None or not window.goes_on(batch, steps):
            window = self._window = DecodeWindow(self.cache, batch, steps, self.block_size, self.steady)
            if self.states is not None:
                at = batch.positions.tolist()  # number of tokens before each row's last
                window.states = WindowStates(self.states, self.bank, batch.tables.tolist(), at)
        sampler = batch.sampler
        at_once = max(1, NOISE // (len(batch.lengths) * self.decoder.vocab_size * 4))
        noted = []
        lean = self.decoder.lean
        with nullcontext() if lean is None else lean.stepping(columns_of(lean, len(batch.lengths), steps)):
            for step in range(steps):
                window.next()
                if step % at_once == 0:
                    ahead = torch.arange(min(at_once, steps - step))[:, None]
                    noise = sampler.noise(batch.drawn + ahead)
                with self._steadied(len(batch.lengths)), self._recorded(window.slots, batch.alive):
                    hidden = self.decoder.hidden(batch.tokens[None], batch.positions[None], window)
                drawn = sampler.draw(self.decoder.logits(hidden), batch.drawn, noise[step % at_once])
                noted.append((drawn, batch.alive))
                batch.advance(drawn.tokens)
                if window.states is not None:
                    window.states.advance(noted[-1][1], batch.alive)
                if not bool(batch.alive.any() if (step + 1) % self.look_every else batch.alive.all()):
                    break  # every look_every steps also if only some rows have ended: the others continue without them
        window.store()
        yield Decoded.of(noted)
