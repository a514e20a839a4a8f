"""One version of a model in service: how items become works, the queue they wait in, the worker that computes them.

A request belongs to the deployment that took it, so all its scores are of one version. A new version is another
deployment with a queue and a worker of its own; the old one finishes what it has and goes.
"""

from __future__ import annotations

import asyncio
import time
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from plaudit.records import ItemError
from plaudit.reward.work import Work
from plaudit.serve import frames
from plaudit.serve.cache import ScoreCache, work_key
from plaudit.serve.link import HANG_SECONDS, KILL_SECONDS, SILENCE_SECONDS, Link
from plaudit.serve.metrics import Metrics
from plaudit.serve.path import Path
from plaudit.serve.queue import FairQueue

WINDOW = 4  # budgets of tokens that the worker may hold: enough to gather and to sort, little enough to stay fair
WINDOW_ITEMS = 2048
SUSPECT = 2  # a work that was held at this many deaths of the worker runs alone from now on ...
GUILTY = 3  # ... and if that kills it too, is not tried again
PROBE_SECONDS = 5.0
FRESH_SECONDS = 1.0  # a result this recent proves the model as well as a probe
PROBE_ID = 0


@dataclass(frozen=True, slots=True)
class Prompt:
    """A judge's question, to be continued."""

    tokens: list[int]
    max_tokens: int
    temperature: float


Answer = np.ndarray | str | ItemError


class Ticket:
    """The works of one request, answered in any order."""

    def __init__(self, count: int) -> None:
        self.answers: list[Answer | None] = [None] * count
        self.jobs: list[Job] = []
        self.done: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self._open = count
        if count == 0:
            self.done.set_result(None)

    def expire(self) -> None:
        """Its deadline has passed: whoever awaits `done` gets a TimeoutError."""
        if not self.done.done():
            self.done.set_exception(TimeoutError())

    def answer(self, index: int, answer: Answer) -> None:
        self.answers[index] = answer
        self._open -= 1
        if self._open == 0 and not self.done.done():
            self.done.set_result(None)


@dataclass(eq=False)
class Job:
    """One work for the worker, however many ask for it."""

    id: int
    key: bytes
    work: Work | Prompt
    cost: int
    salt: str
    waiters: list[tuple[Ticket, int]] = field(default_factory=list)
    dead: bool = False  # of the queue: nobody waits for it
    deaths: int = 0
    since: float = 0.0


class Deployment:
    def __init__(
        self, name: str, number: int, table: dict[str, Any], cache: ScoreCache, metrics: Metrics,
        environment: dict[str, str], load_seconds: float, on_change: Callable[[], None],
    ) -> None:  # fmt: skip
        self.name = name
        self.number = number
        self.version = ""
        self.budget = 1
        self.queue: FairQueue[Job] = FairQueue()
        self.held_tokens = 0
        self._cache = cache
        self._metrics = metrics
        self._counts = metrics.history.model(name)
        self._tell = on_change
        self._users = 0
        self._held: dict[int, Job] = {}
        self._again: deque[Job] = deque()
        self._known: dict[bytes, Job] = {}  # queued or held, by key
        self._next_id = PROBE_ID + 1
        self._pumping = False
        self._probe: asyncio.Future[bool] | None = None
        self._probe_columns: tuple[int, ...] | None = None
        self._seen = (0, 0, 0)  # the worker's counters
        self._busy_since = 0.0
        self.link = Link(name, table, self, environment, load_seconds)
        self._watch = asyncio.create_task(self._supervise(), name=f"watch-{name}")

    async def opened(self) -> frames.Hello:
        """Wait until the model is loaded and warmed up."""
        hello = await self.link.loaded()
        self.version = f"{self.number}-{hello.digest}"
        self.budget = hello.budget
        # A model without a class head is probed by one column of its vocabulary head.
        self._probe_columns = (0,) if hello.facts["causal"] else None
        return hello

    @property
    def ready(self) -> bool:
        return self.link.state == "ready"

    @contextmanager
    def in_use(self) -> Iterator[None]:
        """While a request holds on to this version, it is not closed: also before its works are queued."""
        self._users += 1
        try:
            yield
        finally:
            self._users -= 1

    def submit(
        self, works: Sequence[Work | Prompt], *, tenant: str, priority: int = 0, salt: str = "", cached: bool = True
    ) -> Ticket:
        """Queue the works of one request. What is in the cache is answered at once; what is already on its way is
        waited for and not computed twice."""
        ticket = Ticket(len(works))
        fresh: list[Job] = []
        now = time.monotonic()
        for index, work in enumerate(works):
            cost = len(work.tokens)
            self._counts.tokens += cost
            key = self._key(work, salt)
            if cached and (values := self._cache.get(key)) is not None:
                self._counts.cached += cost
                self._metrics.tokens.labels(self.name, "cached").inc(cost)
                ticket.answer(index, values)
                continue
            job = self._known.get(key)
            if job is None:
                job = self._known[key] = Job(self._next_id, key, work, cost, salt, since=now)
                self._next_id += 1
                fresh.append(job)
            else:
                self._counts.deduplicated += cost
                self._metrics.tokens.labels(self.name, "deduplicated").inc(cost)
            job.waiters.append((ticket, index))
            ticket.jobs.append(job)
        self._metrics.tokens.labels(self.name, "submitted").inc(sum(len(w.tokens) for w in works))
        if self.link.state in ("failed", "closed"):
            self._answer_all(fresh, ItemError("model_failed", self.link.public_reason))
        else:
            self.queue.add(tenant, fresh, priority)
            self._pump_soon()
        return ticket

    def path(self, work: Work, salt: str, *, recall: bool) -> Path:
        """The work as a path, whose steps are found again. One that needs nothing computed is counted here."""
        path = Path(work, self.version, salt, self._cache, recall=recall)
        if path.rest is None:
            cost = len(work.tokens)
            self._counts.tokens += cost
            self._counts.cached += cost
            for kind in ("submitted", "cached"):
                self._metrics.tokens.labels(self.name, kind).inc(cost)
        return path

    def _key(self, work: Work | Prompt, salt: str) -> bytes:
        if isinstance(work, Prompt):
            return work_key(f"{self.version} {work.max_tokens} {work.temperature}", work.tokens, (), None, salt)
        return work_key(self.version, work.tokens, work.positions, work.columns, salt, work.logprobs)

    def cancel(self, ticket: Ticket) -> tuple[int, int]:
        """Nobody waits for the ticket any more: what was not sent is not computed. (not sent, sent) works dropped."""
        waiting = held = 0
        cancel: list[int] = []
        for job in ticket.jobs:
            job.waiters = [waiter for waiter in job.waiters if waiter[0] is not ticket]
            if job.waiters or self._known.get(job.key) is not job:
                continue  # others wait for it, or it was answered
            del self._known[job.key]
            if job.id in self._held:
                held += 1
                self._release(job)
                cancel.append(job.id)
            else:
                waiting += 1
                self._unqueue(job)
        if cancel and self.ready:
            self.link.send(frames.Cancel(cancel))
            self._pump_soon()
        return waiting, held

    async def healthy(self) -> str:
        """ "" if a tiny work goes through batcher and model in time; else why not."""
        if not self.ready:
            return self.link.public_reason
        if self.link.silent_for() > SILENCE_SECONDS:
            return f"its worker has been silent for {self.link.silent_for():.0f} s"
        if time.monotonic() - self.link.last_result < FRESH_SECONDS:
            return ""
        if self._probe is None:
            self._probe = asyncio.get_running_loop().create_future()
            self.link.send(
                frames.Works(
                    [PROBE_ID],
                    [1],
                    frames.as_bytes([[0]]),
                    [1],
                    frames.as_bytes([[0]]),
                    [self._probe_columns],
                    [False],
                    [""],
                )
            )
        try:
            passed = await asyncio.wait_for(asyncio.shield(self._probe), PROBE_SECONDS)
        except TimeoutError:
            return f"a probe did not come back in {PROBE_SECONDS:g} s"
        return "" if passed else "a probe failed"

    async def drained(self) -> None:
        while self._users:
            await asyncio.sleep(0.05)

    async def close(self) -> None:
        self._watch.cancel()
        await asyncio.gather(self._watch, return_exceptions=True)
        await self.link.close()
        self._fail(ItemError("model_closed", f"{self.name} is no longer served"))

    # Towards the worker

    def _pump_soon(self) -> None:
        """Gather what this turn of the event loop brings, then send it in one frame."""
        if not self._pumping:
            self._pumping = True
            asyncio.get_running_loop().call_soon(self._pump)

    def _pump(self) -> None:
        self._pumping = False
        if not self.ready or not self.link.writable:
            return
        batch: list[Job] = []
        while (job := self._next()) is not None:
            batch.append(job)
            self._held[job.id] = job
            self.held_tokens += job.cost
        if not batch:
            return
        now = time.monotonic()
        if len(self._held) == len(batch):
            self._busy_since = now
        waits = self._metrics.queue_seconds.labels(self.name)
        for job in batch:
            waits.observe(now - job.since)
            job.since = now
        for frame in _frames(batch):
            self.link.send(frame)

    def _next(self) -> Job | None:
        """The next work the worker has room for. What several deaths saw runs alone: so the killer finds itself out."""
        if len(self._held) == 1 and next(iter(self._held.values())).deaths >= SUSPECT:
            return None
        if self._again:
            if self._again[0].deaths >= SUSPECT and self._held:
                return None
            return self._again.popleft()
        if self._held and (self.held_tokens >= WINDOW * self.budget or len(self._held) >= WINDOW_ITEMS):
            return None
        return self.queue.take()

    # From the worker

    def on_results(self, results: frames.Results) -> None:
        self._count(results)
        self.budget = results.budget
        values = np.frombuffer(results.values, dtype="<f4")
        at = 0
        for id, rows, columns in zip(results.ids, results.rows, results.columns, strict=True):
            size = rows * columns
            self._answer(id, values[at : at + size].reshape(rows, columns))
            at += size
        for id, text in results.texts:
            self._answer(id, text)
        for id, type, message in results.errors:
            self._answer(id, ItemError(type, message))
        self._pump_soon()

    def _answer(self, id: int, answer: Answer) -> None:
        if id == PROBE_ID:
            if self._probe is not None:
                self._probe.set_result(isinstance(answer, np.ndarray))
                self._probe = None
            return
        job = self._held.get(id)
        if job is None:
            return  # cancelled
        self._release(job)
        del self._known[job.key]
        self._metrics.compute_seconds.labels(self.name).observe(time.monotonic() - job.since)
        if isinstance(answer, np.ndarray):
            answer = answer.copy()  # of its own, so that the cache does not keep the whole frame
            self._cache.put(job.key, answer)
        for ticket, index in job.waiters:
            ticket.answer(index, answer)

    def _count(self, results: frames.Results) -> None:
        now = (results.steps, results.tokens_computed, results.tokens_shared)
        steps, computed, shared = (new - old for new, old in zip(now, self._seen, strict=True))
        self._seen = now
        self._counts.steps += steps
        self._counts.computed += computed
        self._counts.prefix += shared
        self._metrics.tokens.labels(self.name, "computed").inc(computed)
        self._metrics.tokens.labels(self.name, "prefix").inc(shared)
        if steps:
            self._metrics.batch_tokens.labels(self.name).observe(computed / steps)

    def on_change(self) -> None:
        if self.link.state == "failed":
            self._fail(ItemError("model_failed", self.link.public_reason))
        elif self.ready:
            self._pump_soon()
        self._tell()

    def on_death(self) -> bool:
        """Take back what the worker held: first to be sent again, in their order."""
        self._metrics.restarts.labels(self.name).inc()
        self._seen = (0, 0, 0)
        if self._probe is not None:
            self._probe.set_result(False)
            self._probe = None
        held, self._held, self.held_tokens = list(self._held.values()), {}, 0
        for job in held:
            job.deaths += 1
        if len(held) == 1 and held[0].deaths >= GUILTY:
            message = f"the worker died {held[0].deaths} times while it computed this item"
            self._answer_all(held, ItemError("worker_crash", message))
            return True
        self._again.extendleft(reversed(held))
        return False

    def _fail(self, error: ItemError) -> None:
        """Answer everything that waits or is held."""
        jobs = list(self._known.values())
        for job in jobs:
            if job.id in self._held:
                self._release(job)
            else:
                self._unqueue(job)
        self._answer_all(jobs, error)

    def _answer_all(self, jobs: Iterable[Job], error: ItemError) -> None:
        for job in jobs:
            del self._known[job.key]
            for ticket, index in job.waiters:
                ticket.answer(index, error)

    def _release(self, job: Job) -> None:
        del self._held[job.id]
        self.held_tokens -= job.cost

    def _unqueue(self, job: Job) -> None:
        if job.deaths:
            self._again.remove(job)
        else:
            self.queue.discard(job)

    async def _supervise(self) -> None:
        while True:
            await asyncio.sleep(1.0)
            if not self.ready:
                continue
            if self.link.silent_for() > KILL_SECONDS:
                self.link.kill(f"its worker gave no sign of life for {KILL_SECONDS:g} s")
            elif self._held and time.monotonic() - max(self.link.last_result, self._busy_since) > HANG_SECONDS:
                self.link.kill(f"its worker finished nothing for {HANG_SECONDS:g} s")


def _frames(batch: Sequence[Job]) -> Iterator[frames.Frame]:
    works = [(job, job.work) for job in batch if isinstance(job.work, Work)]
    if works:
        yield frames.Works(
            ids=[job.id for job, _ in works],
            lengths=[job.cost for job, _ in works],
            tokens=frames.as_bytes([work.tokens for _, work in works]),
            counts=[len(work.positions) for _, work in works],
            positions=frames.as_bytes([work.positions for _, work in works]),
            columns=[work.columns for _, work in works],
            logprobs=[work.logprobs for _, work in works],
            salts=[job.salt for job, _ in works],
        )
    for job in batch:
        if isinstance(job.work, Prompt):
            tokens = frames.as_bytes([job.work.tokens])
            yield frames.Prompt(job.id, tokens, job.work.max_tokens, job.work.temperature, job.salt)
