"""Rollout workers of two roles: the first prefill prompts and hand over their KV, the others decode.

Prompts are sent in pieces, so that some are decoded while others are still prefilled. A piece's KV stays with its
prefill worker until the piece is done. If that worker dies before, the decode worker prefills the prompts itself.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace

from plaudit.core import SamplingParams
from plaudit.core.sampling.noise import mix64
from plaudit.place.channels.channel import Channel
from plaudit.place.channels.weights import Weights
from plaudit.place.workers.fleet import LOOK_SECONDS, Fleet
from plaudit.place.workers.prefill_decode import opening, unfinished, without_kv
from plaudit.place.workers.remote_engine import PendingCall, RemoteEngine
from plaudit.records import Sample

PIECE = 8  # prompts


@dataclass(eq=False)
class Piece:
    """Prompts in flight: first `read` (prefill), then, for unfinished ones, `written` (decode)."""

    first: int
    prompts: list[list[int]]
    params: list[SamplingParams]
    reader: RemoteEngine
    read: PendingCall
    written: PendingCall | None = None
    live: list[int] = field(default_factory=list)  # unfinished prompts
    samples: list[Sample] | None = None


class SplitFleet(Fleet):
    """The first `readers` of the engines prefill."""

    def __init__(
        self, readers: int, engines: Sequence[RemoteEngine], channel: Channel, weights: Callable[[], Weights],
        news: threading.Condition, warn: Callable[[str], None],
    ) -> None:  # fmt: skip
        super().__init__(engines, channel, weights, news, warn)
        self.readers, self.writers = self.engines[:readers], self.engines[readers:]
        self._number = 0

    def generate(self, prompts: list[list[int]], params: list[SamplingParams]) -> list[Sample]:
        seeded = [self._seeded(option) for option in params]
        pieces = []
        for first in range(0, len(prompts), PIECE):
            reader = min(self.readers, key=lambda engine: engine.outstanding)
            part, options = prompts[first : first + PIECE], seeded[first : first + PIECE]
            call = reader.submit(part, [opening(option) for option in options], hand_over=True)
            pieces.append(Piece(first, part, options, reader, call))
        while open_ := [piece for piece in pieces if piece.samples is None]:
            for piece in open_:
                self._advance(piece)
            self._wait([piece for piece in open_ if piece.samples is None])
        return [sample for piece in pieces for sample in piece.samples or ()]

    def _advance(self, piece: Piece) -> None:
        if piece.written is None and piece.read.done.is_set():
            going_on = unfinished(piece.params, piece.read.result())
            piece.live = sorted(going_on)
            writer = min(self.writers, key=lambda engine: engine.outstanding)
            piece.written = writer.submit(
                [piece.prompts[g] for g in piece.live], [piece.params[g] for g in piece.live],
                begun=[going_on[g] for g in piece.live],
            )  # fmt: skip
        if piece.written is not None and piece.written.done.is_set():
            done = {(s.group, s.index): s for s in piece.read.result()}
            for sample in piece.written.result():
                group = piece.live[sample.group]
                done[group, sample.index] = replace(sample, group=group)
            piece.reader.release(piece.read)
            piece.samples = [replace(without_kv(done[k]), group=piece.first + k[0]) for k in sorted(done)]

    def _wait(self, pieces: Sequence[Piece]) -> None:
        """Until one of them has made progress, or an engine is lost, or an interval has passed."""

        def news() -> bool:
            return any((p.written or p.read).done.is_set() for p in pieces) or any(e.lost for e in self.engines)

        if pieces:
            with self.news:
                self.news.wait_for(news, LOOK_SECONDS)
            self.restart_lost()

    def _seeded(self, params: SamplingParams) -> SamplingParams:
        """Two engines generate one sample: they need the same seed."""
        self._number += 1
        return params if params.seed is not None else replace(params, seed=mix64(self._number) >> 1)
