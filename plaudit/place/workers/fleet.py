"""Rollout workers that generate as one engine, and the channel that sends them weights.

Prompts are split into one piece per worker, in order: with one worker a call is the worker's whole call, bit-equal to
that of an engine in this process. A lost worker is restarted, receives the weights, and is sent its piece again.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import replace

from plaudit.core import SamplingParams
from plaudit.errors import ReceiverLost
from plaudit.place.channels.channel import Channel, Publication
from plaudit.place.channels.weights import Weights
from plaudit.place.workers.frames import ControlAction
from plaudit.place.workers.remote_engine import PendingCall, RemoteEngine
from plaudit.records import Sample

LOOK_SECONDS = 1.0  # interval at which a waiting thread checks, in case a notification was missed


class Fleet:
    """`warn` is called for every lost worker. Lost workers are restarted by the thread that created the fleet.

    part   a channel for changed weights, where those are not all: used once workers have the full weights
    """

    part: tuple[Channel, Callable[[], Weights]] | None = None

    def __init__(
        self, engines: Sequence[RemoteEngine], channel: Channel, weights: Callable[[], Weights],
        news: threading.Condition, warn: Callable[[str], None],
    ) -> None:  # fmt: skip
        self.engines = list(engines)
        self.channel = channel
        self.weights = weights
        self.news = news
        self.warn = warn
        self.version: int | None = None
        self._owner = threading.get_ident()
        self._next = 0

    def publish(self, version: int) -> Publication:
        """Every worker has this version when it returns; lost ones have been restarted."""
        self.version = version
        while True:
            lost = [engine for engine in self.engines if engine.lost is not None]
            for engine in lost:
                if engine.restarts >= 0:
                    self.warn(f"{engine.name} {engine.lost}: it is restarted")
                engine.begin()
            try:
                for engine in lost:
                    engine.loaded()
                channel, weights = (self.channel, self.weights) if lost or self.part is None else self.part
                publication = channel.publish(weights(), version, self.engines)
                break
            except ReceiverLost as error:
                for engine in self.engines:
                    if engine.name in error.names:
                        engine.drop(str(error).removeprefix(f"{engine.name} "))
        for engine in self.engines:
            engine.resume()
        return publication

    def generate(self, prompts: list[list[int]], params: list[SamplingParams]) -> list[Sample]:
        pieces = self._submit(prompts, params)
        if threading.get_ident() == self._owner:
            while not self._wait_for_pieces(pieces):
                self.restart_lost()
        for _, call, _ in pieces:
            call.done.wait()
        samples = []
        for _, call, first in pieces:
            samples += [replace(sample, group=first + sample.group) for sample in call.result()]
        return samples

    def ask_all(self, what: ControlAction) -> None:
        """Call every live worker; one that is lost meanwhile is restarted when it is needed."""
        for engine in self.engines:
            if engine.lost is None:
                with suppress(ReceiverLost):
                    engine.control(what)

    def restart_lost(self) -> None:
        """Restart lost workers; this needs the weights of the last publication, so only the training thread does it."""
        if threading.get_ident() == self._owner and any(engine.lost is not None for engine in self.engines):
            assert self.version is not None, "weights are published before anything is generated"
            self.publish(self.version)

    @property
    def restarts(self) -> int:
        return sum(max(0, engine.restarts) for engine in self.engines)

    def close(self) -> None:
        for engine in self.engines:
            engine.close()
        for channel in (self.channel, *(self.part or ())[:1]):
            channel.close()

    def _submit(
        self, prompts: Sequence[list[int]], params: Sequence[SamplingParams]
    ) -> list[tuple[RemoteEngine, PendingCall, int]]:  # fmt: skip
        count, size = len(prompts), len(self.engines)
        if count < size:
            # Fewer prompts than workers: all go to the one with the least work.
            engine = min(self.engines, key=lambda each: each.outstanding)
            return [(engine, engine.submit(prompts, params), 0)]
        cuts = [count * i // size for i in range(size + 1)]
        return [
            (engine, engine.submit(prompts[first:last], params[first:last]), first)
            for engine, first, last in zip(self.engines, cuts, cuts[1:], strict=False)
        ]

    def _wait_for_pieces(self, pieces: Sequence[tuple[RemoteEngine, PendingCall, int]]) -> bool:
        """Waits until it is done, or an engine is lost, or an interval has passed."""

        def over() -> bool:
            return all(call.done.is_set() for _, call, _ in pieces)

        with self.news:
            self.news.wait_for(lambda: over() or any(e.lost is not None for e in self.engines), LOOK_SECONDS)
            return over()
