"""External engines as the rollout engines of a run: started or connected, updated with weights, probed, and restarted.

It has the interface of a Fleet: `generate`, `publish`, `restart_lost`.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from dataclasses import dataclass

import numpy as np

from plaudit.core import SamplingParams
from plaudit.errors import EngineError, EngineLost, ReceiverLost
from plaudit.place.channels.channel import Channel, Publication
from plaudit.place.channels.weights import Weights
from plaudit.place.engines.engine_server import EngineServer
from plaudit.place.engines.http_engine import HttpEngine
from plaudit.place.engines.probe import Probe
from plaudit.place.workers.pool import EnginePool
from plaudit.records import Sample

WAIT_SECONDS = 1.0  # interval at which a thread waiting for an engine checks
MOST_MENDS = 3  # consecutive restarts without a single sample


@dataclass(eq=False)
class EngineAddress:
    """Address of one engine.

    connect   waits for the server that `start` started, or for an external one, and returns the engine there
    start     None for an external server
    """

    connect: Callable[[EngineServer | None], HttpEngine]
    start: Callable[[], EngineServer] | None = None
    server: EngineServer | None = None
    engine: HttpEngine | None = None
    probe: Probe | None = None
    starts: int = 0


class ServerFleet:
    """weights   what is published
    trainer   the learner's log-probs of all tokens after a context, for the probe
    update    False: publish nothing after the first time, to test that the probe detects it.

    Publishing and restarting belong to the thread that creates it."""

    def __init__(
        self, places: Sequence[EngineAddress], channel: Channel, weights: Callable[[], Weights],
        trainer: Callable[[Sequence[int]], np.ndarray], warn: Callable[[str], None], *, update: bool = True,
        patience: float = 600.0,
    ) -> None:  # fmt: skip
        self.places = list(places)
        self.channel = channel
        self.weights = weights
        self.trainer = trainer
        self.warn = warn
        self.update = update
        self.patience = patience
        self.pool = EnginePool(restart_lost=self._wait_for_engine)
        self.version: int | None = None
        self.probed: dict[str, float] = {}
        self._mends = 0  # since the last sample
        self._owner = threading.get_ident()
        self._mended = threading.Condition()

    def generate(self, prompts: list[list[int]], params: list[SamplingParams]) -> list[Sample]:
        samples = self.pool.generate(prompts, params)
        self._mends = 0
        return samples

    def publish(self, version: int) -> Publication:
        """Every live engine has this version when it returns, and was verified to use it."""
        while True:
            self._connect()
            engines = [member.engine for member in self.pool.members if member.lost is None]
            there = [engine for engine in engines if isinstance(engine, HttpEngine)]
            if not there:
                raise EngineLost(f"no engine is available to publish to: {self._reasons()}")
            try:
                publication = self._publish(there, version)
                break
            except (ReceiverLost, EngineLost) as error:
                names = error.names if isinstance(error, ReceiverLost) else self._silent(there)
                for name in names:
                    self.pool.lose(name, str(error))
        self.version = version
        self.pool.new_version(version)
        self._probe(version)
        with self._mended:
            self._mended.notify_all()
        return publication

    def restart_lost(self) -> None:
        """Restart lost engines, with the weights of the last publication; only the training thread does it. While an
        engine is left, calls go there, and the others return with the next publication."""
        lost = any(member.lost is not None for member in self.pool.members) and not self._any_ready()
        if lost and threading.get_ident() == self._owner and self.version is not None:
            self._mends += 1
            if self._mends > MOST_MENDS:
                raise EngineLost(f"engines were restarted {MOST_MENDS} times without any sample: {self._reasons()}")
            self.publish(self.version)

    @property
    def restarts(self) -> int:
        return sum(max(0, place.starts - 1) for place in self.places)

    def close(self) -> None:
        for place in self.places:
            if place.engine is not None:
                place.engine.close()
            elif place.server is not None:
                place.server.close()
        self.channel.close()

    # Internal

    def _connect(self) -> None:
        """Start missing and lost engines in parallel; external ones are contacted again."""
        lost = {member.engine.name: member.lost for member in self.pool.members if member.lost is not None}
        for place in self.places:
            if place.engine is not None and place.engine.name in lost:
                self._lost(place, place.engine, lost[place.engine.name])
        missing = [place for place in self.places if place.engine is None]
        for place in missing:
            if place.start is not None:
                place.server = place.start()
        for place in missing:
            place.engine = place.connect(place.server)
            place.starts += 1
            self.pool.add(place.engine)

    def _lost(self, place: EngineAddress, engine: HttpEngine, why: str) -> None:
        if place.start is None:
            if engine.healthy():
                self.warn(f"{engine.name} answers again; it was lost: {why}")
                engine.version = None
                self.pool.regain(engine.name)
            return
        self.warn(f"{engine.name} is restarted; it was lost: {why}")
        engine.close()
        self.pool.remove(engine.name)
        place.engine = place.server = None

    def _publish(self, engines: Sequence[HttpEngine], version: int) -> Publication:
        with ExitStack() as stack:
            for engine in engines:
                stack.enter_context(engine.paused())
            if self.update or self.version is None:
                publication = self.channel.publish(self.weights(), version, [engine.wire for engine in engines])
            else:
                publication = Publication(version, 0.0, 0, 0)
            for engine in engines:
                engine.new_version(version)
                if self.update:
                    engine.check_state()
        return publication

    def _probe(self, version: int) -> None:
        self.probed = {}
        for place in self.places:
            if place.probe is None or place.engine is None or place.engine.version != version:
                continue
            for name, value in place.probe.check(place.engine, self.trainer, version).items():
                worst = min if name == "probe/follows" else max
                self.probed[name] = worst(value, self.probed.get(name, value))

    def _silent(self, engines: Sequence[HttpEngine]) -> list[str]:
        """The engines that do not answer, after a failure of one."""
        silent = []
        for engine in engines:
            try:
                engine.beat(20.0)
            except EngineError:
                silent.append(engine.name)
        return silent or [engine.name for engine in engines]

    def _wait_for_engine(self) -> bool:
        """The pool has no engine left: restart here, or wait until the training thread has done it."""
        if threading.get_ident() == self._owner:
            self.restart_lost()
            return True
        with self._mended:
            return self._mended.wait_for(self._any_ready, self.patience)

    def _any_ready(self) -> bool:
        return any(m.lost is None and m.engine.version == self.version for m in self.pool.members)

    def _reasons(self) -> str:
        return "; ".join(f"{m.engine.name}: {m.lost}" for m in self.pool.members) or "none was started"
