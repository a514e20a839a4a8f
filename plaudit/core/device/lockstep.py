"""Ranks that run one model together: rank 0 has the engine and sends every step to the others.

    rank 0    scheduler, prefix tree, sampler   ->  Leader: one message, then the forward pass over its own heads
    others    follow()                          <-  receive the message, run the same forward pass over theirs

A step (token ids, positions, blocks) is validated and packed before anything is sent, as one flat array of numbers, so
no request can make ranks diverge. Hidden rows are complete on every rank of the last stage and are sent to rank 0, so
only rank 0 reads and samples. Every exchange has the timeout of its process group; a group that has lost a rank stops
computing. Between steps rank 0 sends a heartbeat that all ranks must answer.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from itertools import chain, pairwise

import numpy as np
import torch
import torch.distributed as dist
from torch import Tensor

from plaudit.core.device.backend import Backend, Copy, DecodeBatch, Decoded, Span
from plaudit.core.model.packing import Packed, packed_layout, send
from plaudit.core.model.stages import receive as receive_rows
from plaudit.core.model.stages import send as send_rows
from plaudit.errors import RankLost, RequestError, one_line

OPEN, CLOSE, FORWARD, ROWS, HEARTBEAT, END, WEIGHTS, COPY = range(8)
HEARTBEAT_SECONDS = 1.0
REPLY_BYTES = 1024  # maximum size of a rank's reply to a weights message
MIN_CAPACITY = 2048  # numbers in the first exchange of a message; a longer message needs a second exchange


@dataclass
class RankGroups:
    """messages   a gloo group for the steps' messages
    tensors    the group of a stage, which all-reduces products: gloo for a CPU, NCCL for GPUs
    stages     the group of all ranks, which sends rows from stage to stage; None if there is one stage
    last       the rank that has the final rows
    on_loss    called by the heartbeat with the reason when a rank is lost
    capacity   numbers in the first exchange of a message
    beats      whether rank 0 sends heartbeats; off if the other ranks do other work between two uses of the engine
    """

    rank: int
    size: int
    messages: dist.ProcessGroup
    tensors: dist.ProcessGroup
    on_loss: Callable[[str], None] | None = None
    stages: dist.ProcessGroup | None = None
    last: int = 0
    capacity: int = MIN_CAPACITY
    beats: bool = True

    def send(self, kind: int, *parts: np.ndarray) -> None:
        opening = np.array([0, kind, len(parts), *map(len, parts)], dtype=np.int32)
        count = opening[0] = len(opening) + sum(map(len, parts))
        flat = np.zeros(max(count, self.capacity), dtype=np.int32)
        np.concatenate([opening, *parts], out=flat[:count], casting="unsafe")
        dist.broadcast(torch.from_numpy(flat[: self.capacity]), group=self.messages, group_src=0)
        if count > self.capacity:
            dist.broadcast(torch.from_numpy(flat[self.capacity :]), group=self.messages, group_src=0)
        self._resize(count)

    def receive(self) -> tuple[int, list[np.ndarray]]:
        flat = np.zeros(self.capacity, dtype=np.int32)
        dist.broadcast(torch.from_numpy(flat), group=self.messages, group_src=0)
        count = int(flat[0])
        if count > self.capacity:
            rest = np.zeros(count - self.capacity, dtype=np.int32)
            dist.broadcast(torch.from_numpy(rest), group=self.messages, group_src=0)
            flat = np.concatenate([flat, rest])
        self._resize(count)
        first = 3 + int(flat[2])
        ends = first + np.cumsum(flat[3:first])
        return int(flat[1]), np.split(flat[first:count], ends[:-1] - first) if len(ends) else []

    def _resize(self, count: int) -> None:
        """Adapt the capacity to the last message, whose length both sides know: the next one is probably as long."""
        self.capacity = max(MIN_CAPACITY, 1 << (count - 1).bit_length())

    def returned(self, rows: Tensor) -> Tensor:
        """On rank 0, the rows of the last stage; every rank passes as many rows of its own."""
        if self.stages is not None and len(rows):
            if self.rank == 0:
                return receive_rows(rows, self.last, self.stages)
            if self.rank == self.last:
                send_rows(rows, 0, self.stages)
        return rows

    def barrier(self) -> None:
        dist.barrier(self.messages)

    def gathered(self, reply: bytes) -> list[bytes]:
        """The replies of all ranks, on every rank."""
        own = torch.zeros(4 + REPLY_BYTES, dtype=torch.uint8)
        own[: 4 + len(reply)] = torch.frombuffer(bytearray(len(reply).to_bytes(4, "little") + reply), dtype=torch.uint8)
        rows = [torch.empty_like(own) for _ in range(self.size)]
        dist.all_gather(rows, own, self.messages)
        sent = (row.numpy().tobytes() for row in rows)
        return [row[4 : 4 + int.from_bytes(row[:4], "little")] for row in sent]


class Leader(Backend):
    """Rank 0's back end. Decoding is one forward pass per token, because rank 0 samples on the host; returning to the
    host after every step costs nothing extra."""

    def __init__(self, inner: Backend, channel: RankGroups) -> None:
        super().__init__(inner.decoder)
        self.inner = inner
        self.channel = channel
        self.block_size, self.spare = inner.block_size, inner.spare
        self.budget, self.max_running = inner.budget, inner.max_running
        self.look_every = self.window = inner.look_every
        self._lock = threading.Lock()
        self._lost = ""
        self._last_sent = time.monotonic()
        self._over = threading.Event()
        if channel.beats:
            threading.Thread(target=self._beat, daemon=True, name="heartbeat").start()

    def record_experts(self) -> None:
        """All ranks do so, before the first open(); the routers of every one choose alike."""
        if self.channel.stages is not None:
            raise RequestError(
                "rank 0 of an engine of several stages has only the routers of its own layers: set "
                "pipeline_parallel = 1, or leave out train.routing_replay"
            )
        with self._lock:
            self.inner.record_experts()

    def experts_at(self, blocks: Sequence[int], tokens: int) -> bytes | None:
        return self.inner.experts_at(blocks, tokens)

    def open(self, blocks: int) -> None:
        with self._collectively(OPEN, np.array([blocks])):
            self.inner.open(blocks)

    def close(self) -> None:
        with self._collectively(CLOSE):
            self.inner.close()

    def kv_bytes(self, reached: int) -> int:
        """The KV memory of rank 0's own heads."""
        return self.inner.kv_bytes(reached)

    def read(self, slots: Tensor) -> tuple[list[Tensor], list[Tensor]]:
        raise RequestError(
            "every rank has only the KV of its own heads and layers: a model over several ranks cannot export KV; use "
            "one rank"
        )

    def write(self, slots: Tensor, keys: Sequence[Tensor], values: Sequence[Tensor]) -> None:
        raise RequestError(
            "every rank has only the KV of its own heads and layers: a model over several ranks cannot import KV; use "
            "one rank"
        )

    def end(self) -> None:
        """End follow() on the other ranks for good."""
        self._over.set()
        self.dismiss()

    def dismiss(self) -> None:
        """End follow() on the other ranks; they may call it again."""
        with self._collectively(END):
            pass

    def take_weights(self, message: bytes, take: Callable[[], bytes]) -> list[bytes]:
        """Every rank applies a weights message, this one by `take`; returns the ranks' replies, of at most
        `REPLY_BYTES` each."""
        padded = np.frombuffer(message + bytes(-len(message) % 4), dtype=np.int32)
        with self._collectively(WEIGHTS, np.array([len(message)]), padded):
            return self.channel.gathered(take())

    def rows(self, packed: Packed, wanted: Tensor) -> Tensor:
        tokens = packed.input_ids[0].cpu().numpy()
        shapes = np.array([packed.starts, packed.lengths, packed.shared]).ravel()
        with self._collectively(ROWS, tokens, shapes, np.concatenate(packed.rows), wanted.cpu().numpy()):
            return self.channel.returned(self.inner.rows(packed, wanted))

    def forward(self, spans: Sequence[Span], copies: Sequence[Copy]) -> Tensor:
        parts = packed_spans(spans, copies)
        with self._collectively(FORWARD, *parts):
            return self.channel.returned(self.inner.forward(unpacked_spans(parts), copies))

    def copy(self, copies: Sequence[Copy]) -> None:
        with self._collectively(COPY, *packed_spans((), copies)):
            self.inner.copy(copies)

    def decode(self, batch: DecodeBatch, steps: int) -> Iterator[Decoded]:
        tables, noted = batch.tables.tolist(), []
        for _ in range(steps):
            rows = zip(batch.tokens.tolist(), batch.positions.tolist(), tables, strict=True)
            spans = [Span([token], at, table[: at // self.block_size + 1], [0]) for token, at, table in rows]
            logits = self.decoder.logits(self.forward(spans, ()))
            drawn = batch.sampler.draw(logits, batch.drawn)
            noted.append((drawn, batch.alive))
            batch.advance(drawn.tokens)
            if not bool(batch.alive.any()):
                break
        yield Decoded.of(noted)

    @contextmanager
    def _collectively(self, kind: int, *parts: np.ndarray) -> Iterator[None]:
        """Send a message, then run this rank's part. After any error the group is lost: the ranks may have diverged."""
        with self._lock:
            if self._lost:
                raise RankLost(self._lost)
            try:
                self.channel.send(kind, *parts)
                yield
            except BaseException as error:
                self._lost = f"the ranks of this model are no longer in step: {one_line(error)}"
                if not isinstance(error, Exception):  # Ctrl-C
                    raise
                raise RankLost(self._lost) from error
            self._last_sent = time.monotonic()

    def _beat(self) -> None:
        while not self._over.wait(HEARTBEAT_SECONDS):
            if time.monotonic() - self._last_sent < HEARTBEAT_SECONDS:
                continue
            try:
                with self._collectively(HEARTBEAT):
                    self.channel.barrier()
            except RankLost as error:
                if self.channel.on_loss is not None:
                    self.channel.on_loss(str(error))
                return


@torch.inference_mode()
def follow(backend: Backend, channel: RankGroups, take: Callable[[bytes], bytes] | None = None) -> None:
    """Run on every other rank: compute the steps that rank 0 sends, until it sends END. The back end's decoder is a
    shard of the model; `take` applies new weights to it."""
    while True:
        kind, parts = channel.receive()
        if kind == OPEN:
            backend.open(int(parts[0][0]))
        elif kind == CLOSE:
            backend.close()
        elif kind == FORWARD:
            channel.returned(backend.forward(unpacked_spans(parts), unpacked_copies(parts)))
        elif kind == ROWS:
            channel.returned(backend.rows(*_unpacked_rows(parts, backend.decoder.device)))
        elif kind == COPY:
            backend.copy(unpacked_copies(parts))
        elif kind == HEARTBEAT:
            channel.barrier()
        elif kind == WEIGHTS and take is not None:
            with torch.inference_mode(False), torch.no_grad():  # weights are ordinary tensors
                channel.gathered(take(parts[1].tobytes()[: int(parts[0][0])]))
        else:
            return


def packed_spans(spans: Sequence[Span], copies: Sequence[Copy]) -> list[np.ndarray]:
    columns = ([s.tokens for s in spans], [s.blocks for s in spans], [s.wanted for s in spans])
    flat = [np.fromiter(chain.from_iterable(rows), np.int32, sum(map(len, rows))) for rows in columns]
    shapes = np.array([(s.start, len(s.tokens), len(s.blocks), len(s.wanted)) for s in spans], dtype=np.int32)
    copied = np.array([(c.source, c.target, c.first, c.tokens) for c in copies], dtype=np.int32)
    return [shapes.ravel(), *flat, copied.ravel()]


def unpacked_spans(parts: Sequence[np.ndarray]) -> list[Span]:
    """The spans, as views of the arrays."""
    shapes, *flat, _ = parts
    starts, *counts = shapes.reshape(-1, 4).T
    ends = [np.cumsum(count).tolist() for count in counts]
    cut = [[each[a:b] for a, b in pairwise([0, *end])] for each, end in zip(flat, ends, strict=True)]
    return [Span(tokens, start, *rest) for start, tokens, *rest in zip(starts.tolist(), *cut, strict=True)]


def unpacked_copies(parts: Sequence[np.ndarray]) -> list[Copy]:
    return [Copy(*numbers) for numbers in parts[-1].reshape(-1, 4).tolist()]


def _unpacked_rows(parts: Sequence[np.ndarray], device: torch.device) -> tuple[Packed, Tensor]:
    tokens, shapes, places, wanted = (part.astype(np.int64) for part in parts)
    starts, lengths, shared = (tuple(row.tolist()) for row in shapes.reshape(3, -1))
    rows = tuple(np.split(places, np.cumsum([n + s for n, s in zip(lengths, shared, strict=True)])[:-1]))
    positions = np.concatenate([np.arange(s, s + n) for n, s in zip(lengths, shared, strict=True)])
    layout = packed_layout(list(zip(starts, lengths, shared, strict=True)), rows, device)
    packed = Packed(send(tokens, device)[None], send(positions, device)[None], layout, starts, lengths, shared, rows)
    return packed, send(wanted, device)
