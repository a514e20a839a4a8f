"""One worker of a deployment, from the deployment's side: its jobs in flight, its state and its health."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Sequence
from typing import Protocol

import numpy as np

from plaudit.records import ItemError
from plaudit.serve.metrics import Metrics
from plaudit.serve.workers import frames
from plaudit.serve.workers.jobs import Answer, Job, as_frames
from plaudit.serve.workers.link import HANG_SECONDS, KILL_SECONDS, SILENCE_SECONDS, Owner, State

WINDOW = 4  # in-flight tokens of a worker, in step budgets: enough to batch and sort, few enough to stay fair
WINDOW_ITEMS = 2048
ISOLATE_AFTER = 2  # a work in flight at this many crashes of a worker runs alone from now on ...
REJECT_AFTER = 3  # ... and after this many it is failed
PROBE_SECONDS = 5.0
FRESH_SECONDS = 1.0  # a result this recent proves the model's health as well as a probe
PROBE_ID = 0


class WorkerLink(Protocol):
    """The connection to a worker: `Link` for a local process, `RayLink` for a replica of Ray Serve."""

    state: State
    reason: str
    hello: frames.Hello | None
    restarts: int
    writable: bool
    last_sign: float
    last_result: float
    alive: frames.Alive

    @property
    def public_reason(self) -> str: ...

    async def loaded(self) -> frames.Hello: ...

    def send(self, frame: frames.Frame) -> None: ...

    def silent_for(self) -> float: ...

    def kill(self, why: str | None = None) -> None: ...

    async def close(self) -> None: ...


Connect = Callable[[int, Owner], WorkerLink]
"""Creates the link of the replica with this number."""


class ReplicaOwner(Protocol):
    """The deployment."""

    name: str

    def on_answer(self, replica: Replica, job: Job, answer: Answer) -> None: ...

    def on_counted(self, steps: int, computed: int, shared: int, budget: int) -> None: ...

    def requeue(self, jobs: list[Job]) -> bool:
        """A worker has crashed with these jobs. Returns whether one of them is known to be the cause."""

    def on_capacity(self) -> None:
        """A worker can take more."""

    def on_change(self) -> None: ...


class Replica:
    def __init__(self, number: int, keeper: ReplicaOwner, metrics: Metrics, connect: Connect) -> None:
        self.number = number
        self.budget = 1
        self.in_flight: dict[int, Job] = {}
        self.in_flight_tokens = 0
        self.leaving = False  # accepts no more jobs
        self._keeper = keeper
        self._metrics = metrics
        self._labels = labels = (keeper.name, str(number))
        self._items = metrics.replica_items.labels(*labels)
        self._computed, self._reused = (metrics.replica_tokens.labels(*labels, k) for k in ("computed", "prefix"))
        self._probe: asyncio.Future[bool] | None = None
        self._probe_columns: tuple[int, ...] | None = None
        self._seen = (0, 0, 0)  # the worker's last counters
        self._busy_since = 0.0
        self.wire = connect(number, self)

    async def opened(self) -> frames.Hello:
        """Wait until its model is loaded and warmed up."""
        hello = await self.wire.loaded()
        self.budget = hello.budget
        # A model without a classification head is probed with one column of its language model head.
        self._probe_columns = (0,) if hello.facts["causal"] else None
        return hello

    @property
    def ready(self) -> bool:
        return self.wire.state == "ready"

    @property
    def has_capacity(self) -> bool:
        """Whether it can take a job. A suspected job runs alone, so that the cause of crashes is identified."""
        if not self.ready or not self.wire.writable or self.leaving:
            return False
        if len(self.in_flight) == 1 and next(iter(self.in_flight.values())).deaths >= ISOLATE_AFTER:
            return False
        return not self.in_flight or (
            self.in_flight_tokens < WINDOW * self.budget and len(self.in_flight) < WINDOW_ITEMS
        )

    def hold(self, job: Job) -> None:
        if not self.in_flight:
            self._busy_since = time.monotonic()
        self.in_flight[job.id] = job
        self.in_flight_tokens += job.cost

    def release(self, job: Job) -> None:
        del self.in_flight[job.id]
        self.in_flight_tokens -= job.cost

    def send(self, batch: Sequence[Job]) -> None:
        """Send jobs that were assigned to it."""
        for frame in as_frames(batch):
            self.wire.send(frame)

    def cancel(self, jobs: Sequence[Job]) -> None:
        for job in jobs:
            self.release(job)
        if self.ready:
            self.wire.send(frames.Cancel([job.id for job in jobs]))

    async def healthy(self) -> str:
        """Returns "" if a tiny work is computed in time by batcher and model; otherwise the reason."""
        if not self.ready:
            return self.wire.public_reason
        if self.wire.silent_for() > SILENCE_SECONDS:
            return f"its worker has sent nothing for {self.wire.silent_for():.0f} s"
        if time.monotonic() - self.wire.last_result < FRESH_SECONDS:
            return ""
        if self._probe is None:
            self._probe = asyncio.get_running_loop().create_future()
            ones, zero = [1], frames.as_bytes([[0]])
            self.wire.send(frames.Works([PROBE_ID], ones, zero, ones, zero, [self._probe_columns], [False], [""]))
        try:
            passed = await asyncio.wait_for(asyncio.shield(self._probe), PROBE_SECONDS)
        except TimeoutError:
            return f"a probe did not return within {PROBE_SECONDS:g} s"
        return "" if passed else "a probe failed"

    def supervise(self) -> None:
        """Every second."""
        if not self.ready:
            return
        if self.wire.silent_for() > KILL_SECONDS:
            self.wire.kill(f"its worker sent no heartbeat for {KILL_SECONDS:g} s")
        elif self.in_flight and time.monotonic() - max(self.wire.last_result, self._busy_since) > HANG_SECONDS:
            self.wire.kill(f"its worker returned no result for {HANG_SECONDS:g} s")

    async def drained(self) -> None:
        """Wait until it has no jobs in flight. It must be leaving."""
        while self.in_flight:
            await asyncio.sleep(0.05)

    def describe(self) -> dict[str, object]:
        return {
            "replica": self.number, "state": "leaving" if self.leaving else self.wire.state, "reason": self.wire.reason,
            "restarts": self.wire.restarts, "held_tokens": self.in_flight_tokens,
            "resident_bytes": self.wire.alive.resident, "device_bytes": self.wire.alive.device,
        }  # fmt: skip

    # Receiving

    def on_results(self, results: frames.Results) -> None:
        self.budget = results.budget
        self._count(results)
        for id, seconds in results.seconds.items():
            if (job := self.in_flight.get(id)) is not None and job.times is not None:
                job.times.worker_seconds = seconds
        values = np.frombuffer(results.values, dtype="<f4")
        at = 0
        for id, rows, columns in zip(results.ids, results.rows, results.columns, strict=True):
            size = rows * columns
            # Copied, so that the cache does not keep the whole frame alive.
            self._answer(id, values[at : at + size].reshape(rows, columns).copy())
            at += size
        for piece in results.pieces:
            job = self.in_flight.get(piece.id)
            if job is not None and (answer := job.add(piece)) is not None:
                self._answer(piece.id, answer)
        for id, type, message in results.errors:
            self._answer(id, ItemError(type, message))
        self._keeper.on_capacity()

    def on_change(self) -> None:
        self._keeper.on_change()

    def on_death(self) -> bool:
        self._metrics.restarts.labels(self._keeper.name).inc()
        self._metrics.replica_restarts.labels(*self._labels).inc()
        self._seen = (0, 0, 0)
        if self._probe is not None:
            self._probe.set_result(False)
            self._probe = None
        jobs, self.in_flight, self.in_flight_tokens = list(self.in_flight.values()), {}, 0
        return self._keeper.requeue(jobs)

    def _answer(self, id: int, answer: Answer) -> None:
        if id == PROBE_ID:
            if self._probe is not None:
                self._probe.set_result(isinstance(answer, np.ndarray))
                self._probe = None
            return
        job = self.in_flight.get(id)
        if job is None:
            return  # cancelled
        self.release(job)
        self._items.inc()
        self._keeper.on_answer(self, job, answer)

    def _count(self, results: frames.Results) -> None:
        now = (results.steps, results.tokens_computed, results.tokens_shared)
        steps, computed, shared = (new - old for new, old in zip(now, self._seen, strict=True))
        self._seen = now
        self._computed.inc(computed)
        self._reused.inc(shared)
        self._keeper.on_counted(steps, computed, shared, results.budget)
