"""One version of a model in service: the queue of its works, and the replicas that compute them.

A request belongs to one deployment, so all its scores are of one version. A new version is another deployment with its
own queue and workers; the old one finishes its requests and closes. The jobs of a crashed worker are computed again, on
any replica: scoring twice gives the same score, and only one answer is used.
"""

from __future__ import annotations

import asyncio
import time
from collections import deque
from collections.abc import Callable, Iterable, Sequence
from typing import Any

import numpy as np

from plaudit.errors import ModelError
from plaudit.prefix import common_prefix
from plaudit.records import ItemError
from plaudit.reward.work import Work
from plaudit.serve.http.traces import TRACE, Batch, JobTimes
from plaudit.serve.metrics import Metrics
from plaudit.serve.step_path import Path
from plaudit.serve.workers import frames
from plaudit.serve.workers.cache import ScoreCache, work_key
from plaudit.serve.workers.jobs import Answer, GenerateJob, Job, Ticket
from plaudit.serve.workers.link import Link, Owner, State
from plaudit.serve.workers.queue import FairQueue
from plaudit.serve.workers.replica import ISOLATE_AFTER, PROBE_ID, REJECT_AFTER, Connect, Replica
from plaudit.serve.workers.routing import Affinity

NEAR_SECONDS = 3.0  # of a deadline: more than the interval of `_supervise`
WORKER, ENCODER = "plaudit.serve.workers.worker", "plaudit.serve.workers.encoder_worker"


class Deployment:
    """connect   connects a replica to its worker; None: starts a local process"""

    def __init__(
        self, name: str, number: int, table: dict[str, Any], cache: ScoreCache, metrics: Metrics,
        environment: dict[str, str], load_seconds: float, on_change: Callable[[], None], replicas: int = 1,
        connect: Connect | None = None,
    ) -> None:  # fmt: skip
        def local(number: int, owner: Owner) -> Link:
            module = ENCODER if table.get("kind") == "embedding" else WORKER
            return Link(f"{name}-{number}" if number else name, table, owner, environment, load_seconds, module)

        self.name = name
        self.number = number
        self.version = ""
        self.queue: FairQueue[Job] = FairQueue()
        self.replicas: list[Replica] = []
        self._digest = ""
        self._shares = False  # whether its workers compute a shared prefix once
        self._connect = connect or local
        self._cache = cache
        self._metrics = metrics
        self._submitted = metrics.tokens.labels(name, "submitted")
        self._computed, self._reused = (metrics.tokens.labels(name, kind) for kind in ("computed", "prefix"))
        self._queue_seconds = metrics.queue_seconds.labels(name)
        self._compute_seconds = metrics.compute_seconds.labels(name)
        self._batch_tokens = metrics.batch_tokens.labels(name)
        self.counts = metrics.history.model(name)
        self._tell = on_change
        self._users = 0
        self._tickets: set[Ticket] = set()  # whose requests wait
        self._affinity = Affinity()
        self._again: deque[Job] = deque()
        self._jobs_by_key: dict[bytes, Job] = {}  # queued or in flight
        self._holder: dict[int, Replica] = {}  # by the job's id
        self._next_id = PROBE_ID + 1
        self._next_replica = 0
        self._pumping = False
        self._closed = False
        self._changing: set[asyncio.Task[None]] = set()
        for _ in range(replicas):
            self._add()
        self._watch = asyncio.create_task(self._supervise(), name=f"watch-{name}")

    async def opened(self) -> frames.Hello:
        """Wait until the model is loaded and warmed up on all replicas; they must have the same version."""
        hello, *others = await asyncio.gather(*(replica.opened() for replica in self.replicas))
        for replica, other in zip(self.replicas[1:], others, strict=True):
            if other.digest != hello.digest:
                raise ModelError(
                    f"cannot serve {self.name}: replica {replica.number} has version {other.digest}, replica "
                    f"{self.replicas[0].number} has {hello.digest}: install the same model and code on all nodes"
                )
        self._digest = hello.digest
        self._shares = not hello.facts["encoder"]
        self.version = f"{self.number}-{hello.digest}"
        return hello

    # Status

    @property
    def ready(self) -> bool:
        return any(replica.ready for replica in self.replicas)

    @property
    def state(self) -> State:
        """The state of the replica in the best state."""
        if self._closed:
            return "closed"
        if not self.replicas:
            return "loading"
        states = [replica.wire.state for replica in self.replicas]
        return "ready" if "ready" in states else "loading" if "loading" in states else "failed"

    @property
    def reason(self) -> str:
        return self._best("reason")

    @property
    def public_reason(self) -> str:
        return self._best("public_reason")

    def _best(self, reason: str) -> str:
        if self._closed:
            return "the model is no longer served"
        if not self.replicas:
            return "it has no replicas"
        state = self.state
        return str(next(getattr(r.wire, reason) for r in self.replicas if r.wire.state == state))

    @property
    def restarts(self) -> int:
        return sum(replica.wire.restarts for replica in self.replicas)

    @property
    def in_flight_tokens(self) -> int:
        return sum(replica.in_flight_tokens for replica in self.replicas)

    @property
    def budget(self) -> int:
        return max((replica.budget for replica in self.replicas), default=1)

    async def healthy(self) -> str:
        """Returns "" if a replica is healthy, otherwise the reason."""
        if not self.replicas:
            return self.public_reason
        reasons = await asyncio.gather(*(replica.healthy() for replica in self.replicas))
        return "" if "" in reasons else reasons[0]

    def __enter__(self) -> None:
        """Keeps this version open while a request uses it, also before its works are queued."""
        self._users += 1

    def __exit__(self, *_: object) -> None:
        self._users -= 1

    # Replicas

    def scale(self, count: int) -> None:
        """Set the number of replicas: new ones load beside the others; the least loaded ones finish their jobs and
        stop."""
        staying = [replica for replica in self.replicas if not replica.leaving]
        for _ in range(count - len(staying)):
            self._change(self._arrive(self._add()))
        idle_first = sorted(staying, key=lambda replica: (replica.ready, replica.in_flight_tokens, -replica.number))
        for replica in idle_first[: max(0, len(staying) - count)]:
            self.retire(replica)

    def _add(self) -> Replica:
        replica = Replica(self._next_replica, self, self._metrics, self._connect)
        self._next_replica += 1
        self.replicas.append(replica)
        return replica

    async def _arrive(self, replica: Replica) -> None:
        try:
            hello = await replica.opened()
        except ModelError:
            return  # it stays listed as failed, with its reason
        if hello.digest != self._digest:  # would return other scores under the same version
            await self._leave(replica)

    def retire(self, replica: Replica) -> None:
        replica.leaving = True
        self._change(self._leave(replica))

    async def _leave(self, replica: Replica) -> None:
        replica.leaving = True
        if replica.ready:
            await replica.drained()
        await replica.wire.close()
        if replica in self.replicas:
            self.replicas.remove(replica)
        self.on_change()

    def _change(self, work: Any) -> None:
        task = asyncio.create_task(work)
        self._changing.add(task)
        task.add_done_callback(self._changing.discard)

    # Works

    def submit(
        self,
        works: Sequence[Work | GenerateJob],
        *,
        tenant: str,
        priority: int = 0,
        salt: str = "",
        cached: bool = True,
    ) -> Ticket:
        """Queue the works of one request. Cached works are answered at once; works identical to a queued or running
        one share its answer."""
        ticket = Ticket(len(works))
        fresh: list[Job] = []
        now, traced, before = time.monotonic(), TRACE.get() is not None, self.counts.tokens
        for index, work in enumerate(works):
            cost = len(work.tokens)
            self.counts.tokens += cost
            key = self._key(work, salt)
            if cached and (values := self._cache.get(key)) is not None:
                self.counts.cached += cost
                self._metrics.tokens.labels(self.name, "cached").inc(cost)
                ticket.answer(index, values)
                continue
            job = self._jobs_by_key.get(key)
            if job is None:
                shared = common_prefix(fresh[-1].work.tokens, work.tokens) if fresh and self._shares else 0
                own = max(1, cost - shared)
                job = self._jobs_by_key[key] = Job(self._next_id, key, work, own, salt, since=now)
                if traced:
                    job.times = JobTimes(time.time_ns())
                self._next_id += 1
                fresh.append(job)
            else:
                self.counts.deduplicated += cost
                self._metrics.tokens.labels(self.name, "deduplicated").inc(cost)
            job.waiters.append((ticket, index))
            ticket.jobs.append(job)
        self._submitted.inc(self.counts.tokens - before)
        if self.state in ("failed", "closed"):
            self._answer_all(fresh, ItemError("model_failed", self.public_reason))
        else:
            self.queue.add(tenant, fresh, priority)
            self._pump_soon()
        return ticket

    def path(self, work: Work, salt: str, *, recall: bool) -> Path:
        """The work as a path whose steps are cached. A path that needs no computation is counted here."""
        path = Path(work, self.version, salt, self._cache, recall=recall)
        if path.rest is None:
            cost = len(work.tokens)
            self.counts.tokens += cost
            self.counts.cached += cost
            for kind in ("submitted", "cached"):
                self._metrics.tokens.labels(self.name, kind).inc(cost)
        return path

    def _key(self, work: Work | GenerateJob, salt: str) -> bytes:
        if isinstance(work, GenerateJob):
            # A streamed job is never shared: others would miss its beginning.
            own = "" if work.listener is None else f" {self._next_id}"
            return work_key(f"{self.version} {work.sampling}{own}", work.tokens, (), None, salt)
        return work_key(self.version, work.tokens, work.positions, work.columns, salt, work.logprobs, work.types)

    def cancel(self, ticket: Ticket) -> tuple[int, int]:
        """Cancel a ticket: works not yet sent are not computed. Returns the dropped works (not sent, sent)."""
        waiting = in_flight = 0
        for job in ticket.jobs:
            job.waiters = [waiter for waiter in job.waiters if waiter[0] is not ticket]
            if job.waiters or self._jobs_by_key.get(job.key) is not job:
                continue  # other requests wait for it, or it was answered
            del self._jobs_by_key[job.key]
            holder = self._holder.pop(job.id, None)
            if holder is not None:
                in_flight += 1
                holder.cancel([job])
            else:
                waiting += 1
                self._unqueue(job)
        if in_flight:
            self._pump_soon()
        return waiting, in_flight

    async def drained(self) -> None:
        while self._users:
            await asyncio.sleep(0.05)

    async def close(self) -> None:
        self._closed = True
        tasks = [self._watch, *self._changing]
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        await asyncio.gather(*(replica.wire.close() for replica in self.replicas))
        self._fail(ItemError("model_closed", f"{self.name} is no longer served"))

    def kill(self) -> None:
        for replica in self.replicas:
            replica.wire.kill()

    # Sending

    def _pump_soon(self) -> None:
        """Collect the works of this event loop iteration, then send them in one frame to each replica."""
        if not self._pumping:
            self._pumping = True
            asyncio.get_running_loop().call_soon(self._pump)

    def _pump(self) -> None:
        self._pumping = False
        batches: dict[Replica, list[Job]] = {}
        while (available := [r for r in self.replicas if r.has_capacity]) and (job := self._next(available)):
            suspect = job.deaths >= ISOLATE_AFTER
            among = [replica for replica in available if not replica.in_flight] if suspect else available
            if len(self.replicas) == 1:
                (chosen,) = among
            else:
                chosen = self._affinity.choose(job.work.tokens, job.salt, among)
            chosen.hold(job)
            self._holder[job.id] = chosen
            batches.setdefault(chosen, []).append(job)
        now = time.monotonic()
        for replica, batch in batches.items():
            for job in batch:
                self._queue_seconds.observe(now - job.since)
                job.since = now
            _note_batch(replica, batch)
            replica.send(batch)

    def _next(self, available: Sequence[Replica]) -> Job | None:
        """The next work for one of these replicas. A work suspected of crashing workers waits for an idle one."""
        if self._again:
            if self._again[0].deaths >= ISOLATE_AFTER and all(replica.in_flight for replica in available):
                return None
            return self._again.popleft()
        return self.queue.take()

    # Receiving

    def on_answer(self, replica: Replica, job: Job, answer: Answer) -> None:
        del self._holder[job.id]
        del self._jobs_by_key[job.key]
        self._compute_seconds.observe(time.monotonic() - job.since)
        if job.times is not None:
            job.times.answer()
        if isinstance(answer, np.ndarray):
            self._cache.put(job.key, answer)
        for ticket, index in job.waiters:
            ticket.answer(index, answer)

    def on_counted(self, steps: int, computed: int, shared: int, budget: int) -> None:
        self.counts.steps += steps
        self.counts.computed += computed
        self.counts.prefix += shared
        self._computed.inc(computed)
        self._reused.inc(shared)
        if steps:
            self._batch_tokens.observe(computed / steps)

    def on_capacity(self) -> None:
        self._pump_soon()

    def on_change(self) -> None:
        if self.state == "failed":
            self._fail(ItemError("model_failed", self.public_reason))
        elif self.ready:
            self._pump_soon()
        self._tell()

    def requeue(self, jobs: list[Job]) -> bool:
        """Queue these jobs first, in their order."""
        for job in jobs:
            job.deaths += 1
            del self._holder[job.id]
        if len(jobs) == 1 and jobs[0].deaths >= REJECT_AFTER:
            message = f"the worker crashed {jobs[0].deaths} times while it computed this item"
            self._answer_all(jobs, ItemError("worker_crash", message))
            return True
        self._again.extendleft(reversed(jobs))
        self._pump_soon()
        return False

    def _fail(self, error: ItemError) -> None:
        """Answer everything queued or in flight with the error."""
        jobs = list(self._jobs_by_key.values())
        for job in jobs:
            holder = self._holder.pop(job.id, None)
            if holder is not None:
                holder.release(job)
            else:
                self._unqueue(job)
        self._answer_all(jobs, error)

    def _answer_all(self, jobs: Iterable[Job], error: ItemError) -> None:
        for job in jobs:
            del self._jobs_by_key[job.key]
            for ticket, index in job.waiters:
                ticket.answer(index, error)

    def _unqueue(self, job: Job) -> None:
        if job.deaths:
            self._again.remove(job)
        else:
            self.queue.discard(job)

    async def wait(self, ticket: Ticket, deadline: float) -> None:
        """Wait until a ticket is answered; raises TimeoutError at the deadline (of time.monotonic())."""
        if ticket.done.done():
            return
        ticket.deadline = deadline
        self._tickets.add(ticket)
        self._arm(ticket, time.monotonic())
        try:
            await ticket.done
        finally:
            self._tickets.discard(ticket)
            if ticket.timer is not None:
                ticket.timer.cancel()

    def _arm(self, ticket: Ticket, now: float) -> None:
        """Start the timer of a ticket, if its deadline is near. Few are: `_supervise` looks for those that become so,
        since starting and cancelling a timer costs more than everything else here."""
        if ticket.timer is None and ticket.deadline - now < NEAR_SECONDS:
            ticket.timer = asyncio.get_running_loop().call_later(max(0.0, ticket.deadline - now), ticket.expire)

    async def _supervise(self) -> None:
        while True:
            await asyncio.sleep(1.0)
            now = time.monotonic()
            for ticket in self._tickets:
                self._arm(ticket, now)
            for replica in self.replicas:
                replica.supervise()


def _note_batch(replica: Replica, jobs: Sequence[Job]) -> None:
    traced = [job.times for job in jobs if job.times is not None]
    if traced:
        batch = Batch(time.time_ns(), replica.number, len(jobs), sum(job.cost for job in jobs))
        for times in traced:
            times.batch = batch
