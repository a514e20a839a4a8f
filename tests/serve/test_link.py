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


def shown(answer: Answer | None) -> float | str:
    return answer.type if isinstance(answer, ItemError) else float(np.asarray(answer).item())


def test_several_killers_in_one_batch_are_found_one_by_one() -> None:
    async def use(deployment: Deployment) -> None:
        found = [shown(answer) for answer in await answers(deployment, [1, 2, 3, 4, 5, 6])]
        assert found == [1, "worker_crash", "worker_crash", 4, 5, 6]
        assert deployment.restarts == (REJECT_AFTER - 1) + 2
        assert [shown(answer) for answer in await answers(deployment, [7])] == [7]
        assert (deployment.in_flight_tokens, deployment.queue.items) == (0, 0)

    deployed(use, [2, 3])


def test_a_worker_that_dies_of_everything_is_given_up() -> None:
    async def use(deployment: Deployment) -> None:
        found = [shown(answer) for answer in await answers(deployment, list(range(10)))]
        assert found == ["worker_crash"] * (MAX_BLAMED + MOST_DEATHS) + ["model_failed"] * 3
        assert deployment.state == "failed"
        assert f"{MOST_DEATHS} times in a row" in deployment.reason
        assert [shown(answer) for answer in await answers(deployment, [7])] == ["model_failed"]

    deployed(use, list(range(10)))


def test_what_is_cancelled_while_the_worker_is_dead_is_forgotten() -> None:
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
        assert [shown(answer) for answer in kept.answers] == [1, 2]
        assert dropped.answers == [None] * 3
        assert not deployment._jobs_by_key
        assert (deployment.in_flight_tokens, deployment.queue.items, deployment.restarts) == (0, 0, 1)

    deployed(use, [])


def test_to_a_worker_that_has_just_died_nothing_is_sent() -> None:
    """What comes between its end and the notice of it goes to the others, or to the next one."""

    async def use(deployment: Deployment) -> None:
        failed: list[str] = []
        asyncio.get_running_loop().set_exception_handler(lambda _, context: failed.append(str(context)))
        link = deployment.replicas[0].wire
        assert isinstance(link, Link)
        process = link._process
        assert process is not None
        os.kill(process.pid, signal.SIGKILL)
        tickets = []
        while link.state == "ready":  # one for each replica in every turn of the loop
            tickets.append(deployment.submit([work(2 * len(tickets)), work(2 * len(tickets) + 1)], tenant="a"))
            await asyncio.sleep(0)
        await asyncio.wait_for(asyncio.gather(*(ticket.done for ticket in tickets)), 60)
        for at, ticket in enumerate(tickets):
            assert [shown(answer) for answer in ticket.answers] == [2 * at, 2 * at + 1]
        assert failed == []

    deployed(use, [], replicas=2)
