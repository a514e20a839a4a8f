"""A deployment on scripted workers: what happens to a worker's jobs when it dies."""

from __future__ import annotations

import asyncio
from typing import Any

import numpy as np

from plaudit.reward.work import Work
from plaudit.serve.metrics import Metrics
from plaudit.serve.workers import frames
from plaudit.serve.workers.cache import ScoreCache
from plaudit.serve.workers.deployment import Deployment
from plaudit.serve.workers.jobs import Job
from plaudit.serve.workers.replica import Replica


class ScriptedWire:
    """A worker that records the works it is sent; the test sends its answers."""

    state = "ready"
    reason = public_reason = ""
    restarts = 0
    writable = True
    last_sign = last_result = 0.0
    alive = frames.Alive(0)

    def __init__(self) -> None:
        self.hello: frames.Hello | None = None
        self.sent: list[list[int]] = []

    async def loaded(self) -> frames.Hello:
        return frames.Hello("0" * 12, {"causal": False, "encoder": False}, 1000, b"", {})

    def send(self, frame: frames.Frame) -> None:
        if isinstance(frame, frames.Works):
            self.sent.append(frame.ids)

    def silent_for(self) -> float:
        return 0.0

    def kill(self, why: str | None = None) -> None: ...

    async def close(self) -> None: ...


def work(number: int, beginning: int = 0) -> Work:
    """Routing prefers the replica that has a work's `beginning` in its cache."""
    return Work([*[beginning] * 16, number, number + 1], (1,), None, 0, False)


def deployment_on(*wires: ScriptedWire) -> Deployment:
    arguments: dict[str, Any] = {"table": {}, "environment": {}, "load_seconds": 1.0, "on_change": lambda: None}
    return Deployment(
        "model", 0, cache=ScoreCache(0), metrics=Metrics(), replicas=len(wires),
        connect=lambda number, owner: wires[number], **arguments,
    )  # fmt: skip


def die(deployment: Deployment, replica: Replica) -> list[Job]:
    """Report a worker's death to the deployment; another worker is available at once."""
    jobs = list(replica.in_flight.values())
    for job in jobs:
        replica.release(job)
    deployment.requeue(jobs)
    return jobs


def answer(deployment: Deployment, replica: Replica, job: Job) -> None:
    replica.release(job)
    deployment.on_answer(replica, job, np.zeros((1, 1), dtype=np.float32))
    deployment.on_capacity()


async def turn() -> None:
    """Let the deployment send its queued works."""
    for _ in range(3):
        await asyncio.sleep(0)


def test_a_work_in_flight_at_two_worker_deaths_runs_alone() -> None:
    asyncio.run(_runs_alone())


async def _runs_alone() -> None:
    wire = ScriptedWire()
    deployment = deployment_on(wire)
    await deployment.opened()
    (replica,) = deployment.replicas
    ticket = deployment.submit([work(10), work(20), work(30)], tenant="a", cached=False)
    await turn()
    assert [len(ids) for ids in wire.sent] == [3]

    die(deployment, replica)
    await turn()
    assert [len(ids) for ids in wire.sent] == [3, 3]  # one death proves nothing: they are sent together once more
    suspects = die(deployment, replica)
    await turn()
    # From now on each runs alone; not even new work is sent beside it.
    other = deployment.submit([work(40)], tenant="b", cached=False)
    for job in suspects:
        await turn()
        assert wire.sent[-1] == [job.id]
        assert list(replica.in_flight.values()) == [job]
        answer(deployment, replica, job)
    await turn()
    assert len(wire.sent) == 2 + 3 + 1
    assert ticket.done.done()
    assert not other.done.done()
    await deployment.close()


def test_a_suspect_goes_to_an_idle_worker_against_the_routing_preference() -> None:
    asyncio.run(_goes_to_the_idle_worker())


async def _goes_to_the_idle_worker() -> None:
    left, right = ScriptedWire(), ScriptedWire()
    deployment = deployment_on(left, right)
    await deployment.opened()
    first, second = deployment.replicas
    right.state = "loading"
    deployment.submit([work(20, beginning=2)], tenant="a", cached=False)
    await turn()
    die(deployment, first)
    await turn()
    right.state, left.state = "ready", "loading"
    deployment.submit([work(30, beginning=2)], tenant="b", cached=False)
    await turn()
    others = list(second.in_flight.values())
    assert len(others) == 1  # so the second worker now has the prefix cached, and routing prefers it
    left.state = "ready"
    (suspect,) = die(deployment, first)
    await turn()
    assert list(first.in_flight.values()) == [suspect]
    assert list(second.in_flight.values()) == others
    await deployment.close()


def test_a_suspect_waits_while_every_worker_is_busy() -> None:
    asyncio.run(_waits_while_all_are_busy())


async def _waits_while_all_are_busy() -> None:
    left, right = ScriptedWire(), ScriptedWire()
    deployment = deployment_on(left, right)
    await deployment.opened()
    first, second = deployment.replicas
    right.state = "loading"
    deployment.submit([work(20, beginning=2), work(30, beginning=2)], tenant="a", cached=False)
    await turn()
    die(deployment, first)
    await turn()
    right.state, left.state = "ready", "loading"
    deployment.submit([work(50, beginning=5)], tenant="b", cached=False)
    await turn()
    (busy,) = second.in_flight.values()
    suspects = die(deployment, first)  # the second death, while the other worker is busy
    await turn()
    assert list(second.in_flight.values()) == [busy]
    answer(deployment, second, busy)
    await turn()
    assert list(second.in_flight.values()) == suspects[:1]
    await deployment.close()


def test_the_common_prefix_of_a_requests_works_is_counted_once() -> None:
    asyncio.run(_prefix_is_counted_once())


async def _prefix_is_counted_once() -> None:
    """A worker may have four budgets of tokens in flight, here 4,000. All 16 responses of 100 tokens to a prompt of 900
    fit, with 2,500 tokens; if the prompt were counted for each response, only four would."""
    wire = ScriptedWire()
    deployment = deployment_on(wire)
    await deployment.opened()
    (replica,) = deployment.replicas

    def group(prompt: int) -> list[Work]:
        return [Work([prompt] * 900 + [100 + i] * 100, (1,), None, 0, False) for i in range(16)]

    deployment.submit(group(1), tenant="a", cached=False)
    await turn()
    assert [job.cost for job in replica.in_flight.values()] == [1000] + [100] * 15
    assert replica.in_flight_tokens == 2500
    deployment.submit(group(2), tenant="a", cached=False)
    await turn()
    assert len(replica.in_flight) == 16 + 6  # 1,000 + 5 × 100 reach the four budgets
    assert deployment.queue.tokens == 1000
    await deployment.close()
