"""The CUDA back end: flash attention for prompts, a paged kernel for decoding, whole decode steps as CUDA graphs.

In a decode window the host only replays graphs: the model, sampling, stop tests and length counts run on the device for
all steps of the window. Results are copied back in chunks, and the host processes one while the device computes the
next. Graphs contain addresses, so they are captured again whenever the cache or the weights have moved.
"""

from __future__ import annotations

import warnings
from collections import deque
from collections.abc import Callable, Hashable, Iterator, Sequence
from contextlib import AbstractContextManager, nullcontext

import torch
from torch import Tensor

from plaudit.core import kernels
from plaudit.core.device.backend import Copy, DecodeBatch, Decoded, Span
from plaudit.core.device.mixing import GraphStates, Mixing
from plaudit.core.device.paged import KVCache, PagedBackend, PagedLayout, Step
from plaudit.core.model import differentiable
from plaudit.core.model.attention import Layout, Rule
from plaudit.core.model.decoder import Decoder
from plaudit.core.model.fusion import Fusion
from plaudit.core.model.mixers import Mixer
from plaudit.core.model.operations import Rotation
from plaudit.core.model.packing import Packed, grouped_layout
from plaudit.core.model.varlen import VarlenLayout, supported
from plaudit.core.sampling.sampler import Drawn, Sampler
from plaudit.core.states import StateBank

BUCKETS = (1, 2, 4, 8, 16, 24, 32, 48, 64, 96, 128, 192, 256, 320, 384, 448, 512, 640, 768, 896, 1024)
STOPS = 8  # maximum of stop tokens per row on the device; batches with more are decoded step by step
WINDOW = 256  # maximum number of steps without returning to the host
QUEUED_STEPS = 16  # steps in a chunk: they are launched together and their results copied back together
QUEUE_DEPTH = 2  # chunks that are queued before the host reads the first of them
MIN_ALIVE = 0.75  # a window ends early once a smaller share of its rows is alive: fewer rows are faster
MOST_ANGLES = 1 << 17  # positions whose cos and sin are cached: 64 MB for heads of 128
PROGRAMS = 264  # two per multiprocessor; with fewer, attention over long rows is split


class StoredLayout(VarlenLayout):
    """A layout that stores new keys and values in the cache first; attention reads them from there."""

    def __init__(self, step: Step, cache: KVCache, device: torch.device, mixing: Mixing | None = None) -> None:
        def grouped() -> Layout:
            plain = grouped_layout(step.shapes, step.slots, device)
            return PagedLayout(plain.groups, plain.restore, cache=cache, slots=step.new, copies=step.copies)

        self.cache, self.mixing = cache, mixing
        self.paged = PagedLayout((), torch.empty(0), cache=cache, slots=step.new, copies=step.copies)
        # If nothing was cached before, the new keys are all keys, and they are contiguous.
        alone = step.copies is None and not any(before for _, _, before in step.shapes)
        super().__init__(step.shapes, step.slots, device, grouped, end_to_end=alone)

    def mix(self, mixer: Mixer, hidden: Tensor) -> Tensor:
        assert self.mixing is not None
        return self.mixing.mix(mixer, hidden)

    def attend_wanted(
        self, layer: int, wanted: Tensor, query: Tensor, keys: Tensor, values: Tensor, rule: Rule
    ) -> Tensor:
        if not supported(query, values, rule):  # the groups count their keys by slots of the cache
            keys, values = self.cache.keys[layer], self.cache.values[layer]
        return super().attend_wanted(layer, wanted, query, keys, values, rule)

    def context(self, layer: int, key: Tensor, value: Tensor) -> tuple[Tensor, Tensor]:
        stored = self.paged.context(layer, key, value)
        return stored if self.key_rows is not None else (key, value)


class DecodeLayout(Layout):
    """The layout of decode steps: one query per row, over the blocks of its table."""

    def __init__(
        self, cache: KVCache, size: int, tables: Tensor, positions: Tensor, splits: int,
        bank: StateBank | None = None,
    ) -> None:  # fmt: skip
        super().__init__((), torch.empty(0))
        self.cache, self.size, self.tables, self.positions, self.splits = cache, size, tables, positions, splits
        self.bank = bank

    def mix(self, mixer: Mixer, hidden: Tensor) -> Tensor:
        assert self.bank is not None
        carry = self.bank.rows(mixer.layer, len(self.positions))
        mixed = mixer(hidden[0][:, None], carry).transpose(0, 1)
        self.bank.keep_rows(mixer.layer, carry)
        return mixed

    def attend(self, layer: int, query: Tensor, key: Tensor, value: Tensor, rule: Rule) -> Tensor:
        keys, values = self.cache.keys[layer], self.cache.values[layer]
        kernels.store_decoded(key, value, keys, values, self.tables, self.positions, self.size)
        return self._read(layer, query, rule)

    def attend_rotated(
        self, layer: int, rotation: Rotation, query: Tensor, key: Tensor, value: Tensor, rule: Rule
    ) -> Tensor:
        keys, values = self.cache.keys[layer], self.cache.values[layer]
        query = kernels.rotate_and_store(
            query, key, value, rotation.cos, rotation.sin, keys, values, self.tables, self.positions, self.size
        )
        return self._read(layer, query, rule)

    def _read(self, layer: int, query: Tensor, rule: Rule) -> Tensor:
        if rule.latent is not None:
            assert rule.scale is not None
            return kernels.latent_attention(
                query, self.cache.keys[layer], rule.latent, self.positions, scale=rule.scale, tables=self.tables,
                size=self.size, splits=self.splits,
            )  # fmt: skip
        return kernels.decode_attention(
            query, self.cache.keys[layer], self.cache.values[layer], self.tables, self.positions, self.size,
            scale=rule.scale or query.shape[-1] ** -0.5, splits=self.splits, window=rule.window, softcap=rule.softcap,
            sinks=rule.sinks,
        )  # fmt: skip


class DecodeGraph:
    """A decode step for up to `rows` rows, captured as two graphs: the model, and the draw that advances the rows. A
    model that synchronizes with the host during a step is not captured and runs eagerly."""

    def __init__(self, backend: CudaBackend, rows: int, blocks: int) -> None:
        device = backend.decoder.device
        self.backend, self.rows = backend, rows
        self.tokens, self.positions, self.drawn, self.left = (
            torch.zeros(rows, dtype=torch.int64, device=device) for _ in range(4)
        )
        self.alive = torch.zeros(rows, dtype=torch.bool, device=device)
        self.stops = torch.full((rows, STOPS), -1, dtype=torch.int64, device=device)
        self.tables = torch.full((rows, blocks), backend.scratch, dtype=torch.int32, device=device)
        self.keys = torch.zeros(rows, dtype=torch.int64, device=device)
        self.inverse = torch.ones(rows, device=device)
        self.greedy = torch.zeros(rows, dtype=torch.bool, device=device)
        self.step = torch.zeros((), dtype=torch.int64, device=device)
        self.outputs = (
            torch.zeros(WINDOW, rows, dtype=torch.int64, device=device), torch.zeros(WINDOW, rows, device=device),
            torch.zeros(WINDOW, rows, device=device), torch.zeros(WINDOW, rows, dtype=torch.bool, device=device),
            torch.zeros(WINDOW, rows, device=device),
        )  # fmt: skip
        self.results = tuple(torch.empty(x.shape, dtype=x.dtype, pin_memory=True) for x in self.outputs)
        kv_heads = max(layer.kv_heads for layer in backend.decoder.layers)
        splits = max(1, min(16, PROGRAMS // (rows * kv_heads)))
        bank = backend.bank if backend.states is not None else None
        self.layout = DecodeLayout(backend.cache, backend.block_size, self.tables, self.positions, splits, bank)
        self.layout.angles = backend.angles
        self.truncation: kernels.Truncation | None = None
        self._capture()

    def _capture(self) -> None:
        stream = torch.cuda.Stream()  # type: ignore[no-untyped-call]
        stream.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(stream):  # warm-up: kernels compile and libraries select algorithms before the capture
            self.logits = self._model()
            synchronizes = self._synchronizes()
            self._draw()
        torch.cuda.current_stream().wait_stream(stream)
        if synchronizes is None:
            self.compute = self._recorded(self._compute)
        else:
            self.backend.note_eager(synchronizes)
            self.compute = lambda: self.logits.copy_(self._model())
        self.draw = self._recorded(self._draw)

    def _synchronizes(self) -> str | None:
        """The error message if a step of the model synchronizes with the device, which a graph cannot; else None."""
        before = torch.cuda.get_sync_debug_mode()
        with warnings.catch_warnings(action="ignore"):  # the prototype warning
            torch.cuda.set_sync_debug_mode("error")
        try:
            self.logits = self._model()
        except RuntimeError as error:
            if "synchronizing" not in str(error):
                raise
            return str(error).splitlines()[0]
        finally:
            torch.cuda.set_sync_debug_mode(before)
        return None

    def _compute(self) -> None:
        self.logits = self._model()

    def _recorded(self, work: Callable[[], None]) -> Callable[[], object]:
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph, pool=self.backend.pool):
            work()
        return graph.replay

    def _model(self) -> Tensor:
        decoder = self.backend.decoder
        with self.backend.fused():
            hidden = decoder.hidden(self.tokens[None], self.positions[None], self.layout)
        return decoder.logits(hidden)

    def _draw(self) -> None:
        self._sample(None)

    def _draw_truncated(self) -> None:
        assert self.truncation is not None
        self.truncation.find(self.logits, self.inverse)
        self._sample(self.truncation)

    def _sample(self, truncation: kernels.Truncation | None) -> None:
        state = (self.tokens, self.positions, self.drawn, self.left, self.alive)
        kernels.sample(
            self.logits, self.keys, self.inverse, self.greedy, state, self.stops, self.step, self.outputs, truncation
        )
        self.step += 1

    def load(self, batch: DecodeBatch) -> None:
        rows = len(batch.lengths)
        for mine, theirs in (
            (self.tokens, batch.tokens), (self.positions, batch.positions), (self.drawn, batch.drawn),
            (self.left, batch.left), (self.alive, batch.alive), (self.keys, batch.sampler.keys),
            (self.inverse, batch.sampler.inverse[:, 0]), (self.greedy, batch.sampler.greedy),
        ):  # fmt: skip
            mine[:rows].copy_(theirs)
        self.alive[rows:] = False
        self.positions[rows:] = 0
        self.tables[:rows, : batch.tables.shape[1]].copy_(batch.tables)
        self.tables[rows:, 0] = self.backend.scratch
        self.stops.fill_(-1)
        if batch.stops.shape[1] <= STOPS:
            self.stops[:rows, : batch.stops.shape[1]].copy_(batch.stops)

    def _load_truncation(self, sampler: Sampler) -> Callable[[], object]:
        """The draw for these rows. Few runs truncate, so its graph is captured on first use."""
        if not len(sampler.filtered):
            return self.draw
        if self.truncation is None:
            self.truncation = kernels.Truncation(self.rows, self.logits.shape[1], self.logits.device)
            self.step.zero_()
            self._draw_truncated()  # compiles
            self.draw_truncated = self._recorded(self._draw_truncated)
        self.truncation.load(sampler.filtered, sampler.top_k[:, 0], sampler.top_p[:, 0], sampler.min_p[:, 0])
        return self.draw_truncated

    def run(self, batch: DecodeBatch, steps: int) -> Iterator[Decoded]:
        """Run all steps on the device, or fewer once few rows are alive; that is read one chunk late, so that the
        device is busy while the host reads."""
        draw = self._load_truncation(batch.sampler)
        self.load(batch)
        self.step.zero_()
        rows = len(batch.lengths)
        queued: deque[tuple[slice, torch.cuda.Event]] = deque()
        for start in range(0, steps, QUEUED_STEPS):
            if len(queued) == QUEUE_DEPTH:
                yield (piece := self._read(*queued.popleft(), rows))
                if int(piece.alive[-1].sum()) < MIN_ALIVE * rows:
                    break
            queued.append(self._queue(slice(start, min(start + QUEUED_STEPS, steps)), draw))
        while queued:
            yield self._read(*queued.popleft(), rows)

    def _queue(self, chunk: slice, draw: Callable[[], object]) -> tuple[slice, torch.cuda.Event]:
        for _ in range(chunk.start, chunk.stop):
            self.compute()
            draw()
        for theirs, mine in zip(self.outputs, self.results, strict=True):
            mine[chunk].copy_(theirs[chunk], non_blocking=True)
        event = torch.cuda.Event()  # type: ignore[no-untyped-call]
        event.record()
        return chunk, event

    def _read(self, chunk: slice, event: torch.cuda.Event, rows: int) -> Decoded:
        event.synchronize()
        tokens, logprobs, raws, alive, tempered = (each[chunk, :rows] for each in self.results)
        return Decoded(tokens, logprobs, raws, alive, tempered)

    def run_stepwise(self, batch: DecodeBatch, steps: int) -> Iterator[Decoded]:
        """For options that the kernel does not support: the model as a graph, the sampler in torch, step by step."""
        self.load(batch)
        rows = len(batch.lengths)
        noted: list[tuple[Drawn, Tensor]] = []
        for _ in range(steps):
            self.compute()
            drawn = batch.sampler.draw(self.logits[:rows], batch.drawn)
            noted.append((drawn, batch.alive))
            batch.advance(drawn.tokens)
            self.tokens[:rows].copy_(batch.tokens)
            self.positions[:rows].copy_(batch.positions)
        yield Decoded.of(noted)


class CudaBackend(PagedBackend):
    block_size = 64
    spare = 1  # a scratch block for the rows that only pad a graph's batch
    budget = 32768
    max_running = 1024
    look_every = 32
    window = WINDOW
    overlaps = True

    def __init__(self, decoder: Decoder) -> None:
        super().__init__(decoder)
        self.fusion = Fusion(decoder.trunk, differentiable)
        self.scratch = 0
        self._graphs: dict[int, DecodeGraph] = {}
        self._drop_graphs()
        self._captured: tuple[Hashable, ...] = ()  # the adapters and weight addresses in the captured graphs
        self._eager = False

    def open(self, blocks: int) -> None:
        super().open(blocks)
        self.scratch = blocks
        reach = min(self.decoder.max_positions, blocks * self.block_size)
        self._table_width = -(-reach // self.block_size)
        lean = self.decoder.lean
        with torch.inference_mode():
            self.angles = None if lean is None or reach > MOST_ANGLES else lean.angles(reach)

    def close(self) -> None:
        self._drop_graphs()
        super().close()

    def fused(self) -> AbstractContextManager[None]:
        """The context of a forward pass. A lean trunk with only its own products needs no replaced operations, nor the
        interception of torch calls."""
        lean = self.decoder.lean
        if lean is None or not lean.plain:
            return self.fusion.applied(self.exact)
        lean.operations.steady = self.exact
        return nullcontext()

    def _drop_graphs(self) -> None:
        """Drop the graphs and their memory pool: the allocator no longer knows an emptied pool."""
        self._graphs.clear()
        self.pool = torch.cuda.graph_pool_handle()

    def note_eager(self, cause: str) -> None:
        if not self._eager:
            self._eager = True
            name = type(self.decoder.module).__name__
            warnings.warn(f"{name} decodes without CUDA graphs, which is slower: {cause}", stacklevel=2)

    def rows(self, packed: Packed, wanted: Tensor) -> Tensor:
        with self.fused():
            return self.wanted.hidden(packed.input_ids, packed.position_ids, packed.layout, wanted)

    def forward(self, spans: Sequence[Span], copies: Sequence[Copy]) -> Tensor:
        step = self.arrange(spans, copies)
        mixing = None if self.states is None else Mixing(self.states, self.bank, spans, copies)
        layout = StoredLayout(step, self.cache, self.decoder.device, mixing)
        with self.fused():
            return self.wanted.hidden(step.input_ids, step.position_ids, layout, step.wanted)

    def decode(self, batch: DecodeBatch, steps: int) -> Iterator[Decoded]:
        graph = self._graph(len(batch.lengths))
        if batch.sampler.by_kernel and batch.stops.shape[1] <= STOPS:
            pieces = graph.run(batch, min(steps, WINDOW))
        else:
            pieces = graph.run_stepwise(batch, min(steps, self.look_every))
        return pieces if self.states is None else self._with_states(batch, pieces)

    def _with_states(self, batch: DecodeBatch, pieces: Iterator[Decoded]) -> Iterator[Decoded]:
        """Store the states before the host reads any token, after which it may reuse their blocks."""
        assert self.states is not None
        states = GraphStates(self.states, self.bank, batch.tables.tolist(), [n - 1 for n in batch.lengths])
        done = list(pieces)
        states.store(sum(len(piece.tokens) for piece in done), done[-1].alive[-1].tolist())
        yield from done

    def state_rows(self, running: int) -> int:
        return _bucket(running)

    def _graph(self, rows: int) -> DecodeGraph:
        captured = (self.decoder.adapter_state(), *(p.data_ptr() for p in self.decoder.module.parameters()))
        if captured != self._captured:
            self._drop_graphs()
            self._captured = captured
        bucket = _bucket(rows)
        if bucket not in self._graphs:
            self._graphs[bucket] = DecodeGraph(self, bucket, self._table_width)
        return self._graphs[bucket]


def _bucket(rows: int) -> int:
    return next((b for b in BUCKETS if b >= rows), -(-rows // 256) * 256)
