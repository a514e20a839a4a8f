"""A worker that loads no model, scores a sequence by its first token and exits on the tokens in DEADLY."""

from __future__ import annotations

import os
import socket
from collections.abc import Awaitable, Callable, Sequence

import numpy as np
import uvloop

from plaudit.process.framing import FrameReader
from plaudit.process.worker import SocketWorker, run_worker
from plaudit.serve.metrics import Metrics
from plaudit.serve.workers import frames
from plaudit.serve.workers.cache import ScoreCache
from plaudit.serve.workers.deployment import Deployment
from plaudit.serve.workers.link import Link, Owner

BUDGET = 1024  # tokens per step


class FakeWorker(SocketWorker[frames.Frame]):
    busy = False

    def take(self, frame: frames.Frame) -> None:
        if isinstance(frame, frames.Works):
            rows = list(frames.cut(frame.tokens, frame.lengths))
            if any(row[0] in map(int, os.environ["DEADLY"].split()) for row in rows):
                os._exit(9)
            ones = [1] * len(rows)
            values = np.array([row[0] for row in rows], "<f4").tobytes()
            self.send(frames.Results(frame.ids, ones, ones, values, [], [], 0, 0, 0, BUDGET))

    def step(self) -> None:
        pass


def _started(start: frames.Start, sock: socket.socket, reader: FrameReader[frames.Frame]) -> FakeWorker:
    worker = FakeWorker(sock, reader)
    worker.send(frames.Hello("digest", {"causal": False, "encoder": False}, BUDGET, b"", {}))
    worker.send(frames.Ready())
    return worker


def main(fd: int) -> None:
    run_worker(fd, frames.DECODER, frames.Start, _started)


def deployed(use: Callable[[Deployment], Awaitable[None]], deadly: Sequence[int], replicas: int = 1) -> None:
    """Run `use` on a deployment of such workers."""

    async def run() -> None:
        environment = {"DEADLY": " ".join(map(str, deadly))}

        def connect(number: int, owner: Owner) -> Link:
            return Link(f"fake-{number}", {}, owner, environment, 60, "tests.serve.fake_worker")

        deployment = Deployment(
            "fake", 0, {}, ScoreCache(0), Metrics(), environment, 60, lambda: None, replicas, connect
        )  # fmt: skip
        await deployment.opened()
        try:
            await use(deployment)
        finally:
            await deployment.close()

    uvloop.run(run())  # the server's event loop
