"""The HTTP process's end of a worker: starts it, talks to it, notices that it has died or hangs, starts it again.

    loading -> ready -> (died or hung) -> loading ...          -> failed, when it cannot serve

What a dead worker held is given back to the owner, who sends it again: scoring twice gives the same score. A worker
that dies three times in a row without having finished anything is given up.
"""

from __future__ import annotations

import asyncio
import os
import socket
import subprocess
import sys
import time
from collections.abc import Callable
from typing import Any, Literal

from plaudit.errors import ModelError
from plaudit.serve import frames

State = Literal["loading", "ready", "failed", "closed"]
SILENCE_SECONDS = 10.0  # without a sign of life: the process is stopped or the machine is choking; not ready
KILL_SECONDS = 30.0  # ... and now it is replaced
HANG_SECONDS = 300.0  # alive, but no result of what it holds
MOST_DEATHS = 3  # in a row, each without a single result


class Link:
    """on_frame hears Results; on_change hears that the state has changed."""

    def __init__(
        self, name: str, table: dict[str, Any], on_results: Callable[[frames.Results], None],
        on_change: Callable[[], None], environment: dict[str, str],
    ) -> None:  # fmt: skip
        self.name = name
        self.table = table
        self.on_results = on_results
        self.on_change = on_change
        self.environment = environment
        self.state: State = "loading"
        self.reason = "the model is loading"
        self.hello: frames.Hello | None = None
        self.restarts = 0
        self.last_sign = self.last_result = time.monotonic()
        self._process: subprocess.Popen[bytes] | None = None
        self._transport: asyncio.Transport | None = None
        self._deaths = 0
        self._told: asyncio.Future[frames.Hello] = asyncio.get_running_loop().create_future()
        self._task = asyncio.create_task(self._keep_alive(), name=f"link-{name}")

    @property
    def pid(self) -> int | None:
        return None if self._process is None else self._process.pid

    async def loaded(self) -> frames.Hello:
        """The worker's introduction, once it is ready to compute; raises ModelError if it cannot load its model."""
        return await asyncio.shield(self._told)

    def send(self, frame: frames.Frame) -> None:
        assert self._transport is not None, f"{self.name} is {self.state}, nothing can be sent"
        self._transport.write(frames.pack(frame))

    def silent_for(self) -> float:
        return time.monotonic() - self.last_sign

    def restart(self, why: str) -> None:
        """Kill the process; the loop that watches it starts another."""
        self.reason = why
        if self._process is not None:
            self._process.kill()

    async def close(self) -> None:
        self._set("closed", "the model is no longer served")
        self._task.cancel()
        await asyncio.gather(self._task, return_exceptions=True)
        await self._end()
        if not self._told.done():
            self._told.set_exception(ModelError(f"{self.name} was closed while it loaded"))
        self._told.exception()

    def kill(self) -> None:
        """At once and without the event loop's help, for an exit that will not wait."""
        if self._process is not None:
            self._process.kill()

    async def _keep_alive(self) -> None:
        while True:
            connection = await self._start()
            await connection.over
            code = await self._end()
            if self.state == "closed":
                return
            served = self.state == "ready" and self.last_result > connection.began
            self._deaths = 0 if served else self._deaths + 1
            if connection.failure is not None:
                self._give_up(connection.failure)
                return
            if self._deaths >= MOST_DEATHS:
                self._give_up(f"its worker died {self._deaths} times in a row (last exit {code}) without serving")
                return
            self.restarts += 1
            self._set("loading", f"its worker died (exit {code}) and is starting again")
            await asyncio.sleep(0.2 * self._deaths)

    async def _start(self) -> _Connection:
        ours, theirs = socket.socketpair()
        ours.setblocking(False)
        with theirs:
            # A file descriptor and not a port: nothing listens, and nobody else can connect.
            self._process = subprocess.Popen(
                [sys.executable, "-m", "plaudit.serve.worker", str(theirs.fileno())], pass_fds=[theirs.fileno()],
                stdin=subprocess.DEVNULL, env={**os.environ, **self.environment},
            )  # fmt: skip
        self.last_sign = self.last_result = time.monotonic()
        loop = asyncio.get_running_loop()
        transport, connection = await loop.create_unix_connection(lambda: _Connection(self), sock=ours)
        self._transport = transport
        self.send(frames.Start(self.table))
        return connection

    async def _end(self) -> int | None:
        """Make sure that the process is gone; its exit code."""
        if self._transport is not None:
            self._transport.abort()
            self._transport = None
        process, self._process = self._process, None
        if process is None:
            return None
        process.kill()
        return await asyncio.get_running_loop().run_in_executor(None, process.wait)

    def _give_up(self, why: str) -> None:
        self._set("failed", why)
        if not self._told.done():
            self._told.set_exception(ModelError(f"cannot serve {self.name}: {why}"))
            self._told.exception()  # whoever awaits it gets it; nobody has to

    def _set(self, state: State, reason: str) -> None:
        self.state, self.reason = state, reason
        self.on_change()

    def _frame(self, frame: frames.Frame, connection: _Connection) -> None:
        self.last_sign = time.monotonic()
        match frame:
            case frames.Hello():
                self.hello = frame
            case frames.Ready():
                assert self.hello is not None, "a worker says who it is before it is ready"
                self.last_result = connection.began = time.monotonic()
                self._set("ready", "")
                if not self._told.done():
                    self._told.set_result(self.hello)
            case frames.Results():
                self.last_result = self.last_sign
                self.on_results(frame)
            case frames.Failed():
                connection.failure = frame.message
            case frames.Alive():
                pass
            case _:
                raise ValueError(f"a worker sends no {type(frame).__name__}")


class _Connection(asyncio.Protocol):
    """One life of the worker."""

    def __init__(self, link: Link) -> None:
        self.link = link
        self.over: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self.failure: str | None = None
        self.began = time.monotonic()
        self._unpacker = frames.Unpacker()

    def data_received(self, data: bytes) -> None:
        for frame in self._unpacker.feed(data):
            self.link._frame(frame, self)

    def connection_lost(self, exc: Exception | None) -> None:
        if not self.over.done():
            self.over.set_result(None)
