"""Worker deaths, with a stand-in worker that loads nothing and dies in the specified way."""

from __future__ import annotations

import asyncio
import os
import signal

import numpy as np

from plaudit.records import ItemError
from plaudit.reward.work import Work
from plaudit.serve.workers.deployment import Deployment
from plaudit.serve.workers.jobs import Answer
from plaudit.serve.workers.link import MAX_BLAMED, MOST_DEATHS, Link
from plaudit.serve.workers.replica import REJECT_AFTER
from tests.serve.fake_worker import deployed


def work(token: int) -> Work:
    return Work([token], (0,), None, steps=0, truncated=False)


async def answers(deployment: Deployment, tokens: list[int]) -> list[Answer | None]:
    ticket = deployment.submit([work(token) for token in tokens], tenant="a")
    await asyncio.wait_for(ticket.done, 120)
    return ticket.answers


def outcome(answer: Answer | None) -> float | str:
    return answer.type if isinstance(answer, ItemError) else float(np.asarray(answer).item())


def test_several_crashing_works_in_one_batch_are_isolated_one_by_one() -> None:
    async def use(deployment: Deployment) -> None:
        results = [outcome(answer) for answer in await answers(deployment, [1, 2, 3, 4, 5, 6])]
        assert results == [1, "worker_crash", "worker_crash", 4, 5, 6]
        assert deployment.restarts == (REJECT_AFTER - 1) + 2
        assert [outcome(answer) for answer in await answers(deployment, [7])] == [7]
        assert (deployment.in_flight_tokens, deployment.queue.items) == (0, 0)

    deployed(use, [2, 3])


def test_a_model_whose_worker_crashes_on_every_work_fails() -> None:
    async def use(deployment: Deployment) -> None:
        results = [outcome(answer) for answer in await answers(deployment, list(range(10)))]
        assert results == ["worker_crash"] * (MAX_BLAMED + MOST_DEATHS) + ["model_failed"] * 3
        assert deployment.state == "failed"
        assert f"{MOST_DEATHS} times in a row" in deployment.reason
        assert [outcome(answer) for answer in await answers(deployment, [7])] == ["model_failed"]

    deployed(use, list(range(10)))


def test_works_cancelled_while_the_worker_is_dead_are_dropped() -> None:
    async def use(deployment: Deployment) -> None:
        kept = deployment.submit([work(1), work(2)], tenant="a")
        dropped = deployment.submit([work(2), work(3), work(3)], tenant="b")
        link = deployment.replicas[0].wire
        assert isinstance(link, Link)
        process = link._process
        assert process is not None
        os.kill(process.pid, signal.SIGSTOP)
        await asyncio.sleep(0.1)
        assert deployment.in_flight_tokens == 3
        link.kill("a test")
        while deployment.ready:
            await asyncio.sleep(0.01)
        deployment.cancel(dropped)
        await asyncio.wait_for(kept.done, 60)
        assert [outcome(answer) for answer in kept.answers] == [1, 2]
        assert dropped.answers == [None] * 3
        assert not deployment._jobs_by_key
        assert (deployment.in_flight_tokens, deployment.queue.items, deployment.restarts) == (0, 0, 1)

    deployed(use, [])


def test_nothing_is_sent_to_a_worker_that_has_just_died() -> None:
    """Works submitted between its exit and the detection of it go to other replicas or to the next worker."""

    async def use(deployment: Deployment) -> None:
        errors: list[str] = []
        asyncio.get_running_loop().set_exception_handler(lambda _, context: errors.append(str(context)))
        link = deployment.replicas[0].wire
        assert isinstance(link, Link)
        process = link._process
        assert process is not None
        os.kill(process.pid, signal.SIGKILL)
        tickets = []
        while link.state == "ready":  # one work per replica in every iteration of the event loop
            tickets.append(deployment.submit([work(2 * len(tickets)), work(2 * len(tickets) + 1)], tenant="a"))
            await asyncio.sleep(0)
        await asyncio.wait_for(asyncio.gather(*(ticket.done for ticket in tickets)), 60)
        for index, ticket in enumerate(tickets):
            assert [outcome(answer) for answer in ticket.answers] == [2 * index, 2 * index + 1]
        assert errors == []

    deployed(use, [], replicas=2)
