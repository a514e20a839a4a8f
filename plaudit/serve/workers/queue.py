"""The order of works: fair between API keys, fair between the requests of one key, by priority within a key.

Start-time fair queueing by tokens. Every key and, within it, every request has a tag that grows by the tokens served;
the smallest tag is served next, and a new request starts at the current tag. So a request with a thousand items does
not delay a request with one, and a key that floods the server does not delay the others.
"""

from __future__ import annotations

import heapq
from collections import deque
from dataclasses import dataclass, field
from itertools import count
from typing import Generic, NamedTuple, Protocol, TypeVar

MAX_DEAD = 1024  # cancelled items that may remain in the queue


class Costed(Protocol):
    cost: int
    dead: bool  # cancelled


J = TypeVar("J", bound=Costed)


class _Flow(NamedTuple, Generic[J]):
    """The queued items of one request. The first three fields order a heap of them."""

    lower: int  # the priority, negative
    tag: int
    number: int
    jobs: deque[J]


@dataclass(slots=True)
class _Tenant(Generic[J]):
    """Kept while its queue is empty, so that its tag is not reset with each request. There are as many as API keys."""

    tag: int = 0
    clock: int = 0
    flows: list[_Flow[J]] = field(default_factory=list)


class FairQueue(Generic[J]):
    def __init__(self) -> None:
        self.tokens = 0
        self.items = 0
        self._clock = 0
        self._tenants: dict[str, _Tenant[J]] = {}
        self._numbers = count()
        self._dead = 0

    def add(self, tenant: str, jobs: list[J], priority: int = 0) -> None:
        """Add the items of one request, in order."""
        if not jobs:
            return
        entry = self._tenants.get(tenant)
        if entry is None:
            entry = self._tenants[tenant] = _Tenant()
        if not entry.flows:
            entry.tag = max(entry.tag, self._clock)
        heapq.heappush(entry.flows, _Flow(-priority, entry.clock, next(self._numbers), deque(jobs)))
        self.items += len(jobs)
        self.tokens += sum(job.cost for job in jobs)

    def discard(self, job: J) -> None:
        """Cancel an item: it will not be returned, and its tokens no longer count."""
        job.dead = True
        self.items -= 1
        self.tokens -= job.cost
        self._dead += 1
        if self._dead > max(MAX_DEAD, self.items):
            self._sweep()

    def take(self) -> J | None:
        """The next item, or None."""
        while self.items:
            job = self._next()
            if not job.dead:
                self.items -= 1
                self.tokens -= job.cost
                return job
            self._dead -= 1
        return None

    def _next(self) -> J:
        waiting = [tenant for tenant in self._tenants.values() if tenant.flows]
        tenant = waiting[0] if len(waiting) == 1 else min(waiting, key=lambda t: t.tag)
        lower, tag, number, jobs = tenant.flows[0]
        job = jobs.popleft()
        if not job.dead:
            self._clock, tenant.clock = tenant.tag, max(tenant.clock, tag)
            tenant.tag += job.cost
            tag += job.cost
        if jobs:
            heapq.heapreplace(tenant.flows, _Flow(lower, tag, number, jobs))
        else:
            heapq.heappop(tenant.flows)
        return job

    def _sweep(self) -> None:
        """Remove cancelled items: `take` may not be called for a long time, while clients connect and disconnect."""
        for tenant in self._tenants.values():
            alive = [flow._replace(jobs=deque(job for job in flow.jobs if not job.dead)) for flow in tenant.flows]
            tenant.flows = [flow for flow in alive if flow.jobs]
            heapq.heapify(tenant.flows)
        self._dead = 0
