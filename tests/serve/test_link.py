"""Deaths of a worker, with a worker in its place that loads nothing and dies of whatever it is told to die of."""

from __future__ import annotations

import asyncio
import signal
from pathlib import Path
from typing import Any

import numpy as np

from plaudit.records import ItemError
from plaudit.reward.work import Work
from plaudit.serve.metrics import Metrics
from plaudit.serve.workers.cache import ScoreCache
from plaudit.serve.workers.deployment import Deployment
from plaudit.serve.workers.jobs import Answer
from plaudit.serve.workers.link import MOST_BLAMED, MOST_DEATHS, Link
from plaudit.serve.workers.replica import GUILTY

SITE = """
import os
import socket
import sys

if "plaudit.serve.workers.worker" in sys.orig_argv:
    from plaudit.serve.workers import frames

    sock = socket.socket(fileno=int(sys.orig_argv[-1]))
    unpacker = frames.Unpacker()

    def send(frame):
        sock.sendall(frames.pack(frame))

    while data := sock.recv(1 << 20):
        for frame in unpacker.feed(data):
            if isinstance(frame, frames.Start):
                send(frames.Hello("digest", {"causal": False}, 64, b"", {}))
                send(frames.Ready())
            if isinstance(frame, frames.Works):
                rows = list(frames.cut(frame.tokens, frame.lengths))
                if any(row[0] in map(int, os.environ["DEADLY"].split()) for row in rows):
                    os._exit(9)
                values = frames.np.array([row[0] for row in rows], "<f4").tobytes()
                ones = [1] * len(rows)
                send(frames.Results(frame.ids, ones, ones, values, [], [], 0, 0, 0, 64))
    os._exit(0)
"""


def deployed(path: Path, deadly: list[int], use: Any) -> None:
    """A deployment whose worker dies of items that begin with these tokens, and scores the others by theirs."""
    (path / "sitecustomize.py").write_text(SITE)

    async def run() -> None:
        environment = {"PYTHONPATH": str(path), "DEADLY": " ".join(map(str, deadly))}
        deployment = Deployment("fake", 0, {}, ScoreCache(0), Metrics(), environment, 60, lambda: None)
        await deployment.opened()
        try:
            await use(deployment)
        finally:
            await deployment.close()

    asyncio.run(run())


def work(token: int) -> Work:
    return Work([token], (0,), None, steps=0, truncated=False)


async def answers(deployment: Deployment, tokens: list[int]) -> list[Answer | None]:
    ticket = deployment.submit([work(token) for token in tokens], tenant="a")
    await asyncio.wait_for(ticket.done, 120)
    return ticket.answers


def shown(answer: Answer | None) -> float | str:
    return answer.type if isinstance(answer, ItemError) else float(np.asarray(answer).item())


def test_several_killers_in_one_batch_are_found_one_by_one(tmp_path: Path) -> None:
    async def use(deployment: Deployment) -> None:
        found = [shown(answer) for answer in await answers(deployment, [1, 2, 3, 4, 5, 6])]
        assert found == [1, "worker_crash", "worker_crash", 4, 5, 6]
        assert deployment.restarts == (GUILTY - 1) + 2
        assert [shown(answer) for answer in await answers(deployment, [7])] == [7]
        assert (deployment.held_tokens, deployment.queue.items) == (0, 0)

    deployed(tmp_path, [2, 3], use)


def test_a_worker_that_dies_of_everything_is_given_up(tmp_path: Path) -> None:
    async def use(deployment: Deployment) -> None:
        found = [shown(answer) for answer in await answers(deployment, list(range(10)))]
        assert found == ["worker_crash"] * (MOST_BLAMED + MOST_DEATHS) + ["model_failed"] * 3
        assert deployment.state == "failed"
        assert f"{MOST_DEATHS} times in a row" in deployment.reason
        assert [shown(answer) for answer in await answers(deployment, [7])] == ["model_failed"]

    deployed(tmp_path, list(range(10)), use)


def test_what_is_cancelled_while_the_worker_is_dead_is_forgotten(tmp_path: Path) -> None:
    async def use(deployment: Deployment) -> None:
        kept = deployment.submit([work(1), work(2)], tenant="a")
        dropped = deployment.submit([work(2), work(3), work(3)], tenant="b")
        link = deployment.replicas[0].wire
        assert isinstance(link, Link)
        process = link._process
        assert process is not None
        process.send_signal(signal.SIGSTOP)
        await asyncio.sleep(0.1)
        assert deployment.held_tokens == 3
        link.kill("a test")
        while deployment.ready:
            await asyncio.sleep(0.01)
        deployment.cancel(dropped)
        await asyncio.wait_for(kept.done, 60)
        assert [shown(answer) for answer in kept.answers] == [1, 2]
        assert dropped.answers == [None] * 3
        assert not deployment._known
        assert (deployment.held_tokens, deployment.queue.items, deployment.restarts) == (0, 0, 1)

    deployed(tmp_path, [], use)
