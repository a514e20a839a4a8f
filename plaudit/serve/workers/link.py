"""The server's side of a worker: starts it, exchanges frames, detects crashes and hangs, and restarts it.

    loading -> ready -> (crashed or hung) -> loading ...          -> failed, when it cannot serve

The owner requeues the jobs of a crashed worker: scoring twice gives the same score. A worker that cannot load its model
the first time, or that crashes three times in a row without finishing a job, fails permanently (unless a single item
caused the crashes), which /health/live reports. If a worker cannot be started for lack of descriptors, memory or
threads, starting is retried with increasing delays.
"""

from __future__ import annotations

import asyncio
import time
from typing import Any, Literal, Protocol

from plaudit.errors import ModelError, one_line
from plaudit.process.spawn import Child, spawn_soon
from plaudit.serve.workers import frames

State = Literal["loading", "ready", "failed", "closed"]
SILENCE_SECONDS = 10.0  # without a heartbeat: the process is stopped or the machine is overloaded; not ready
KILL_SECONDS = 30.0  # without a heartbeat: the worker is killed and restarted
HANG_SECONDS = 300.0  # heartbeats but no results while jobs are in flight
MOST_DEATHS = 3  # crashes in a row, each without a single result
MAX_BLAMED = 4  # items in a row that may be blamed for crashes before the worker itself is considered broken
PAUSE_SECONDS = 0.2  # before the second start in a row; the delay grows with every further one
LONGEST_PAUSE = 30.0
RESTARTING = "its worker crashed and is restarting"


class Owner(Protocol):
    """Receives the worker's events."""

    def on_results(self, results: frames.Results) -> None: ...

    def on_death(self) -> bool:
        """The worker crashed with jobs in flight. Returns whether a single item is now known to be the cause, also of
        the crashes before."""

    def on_change(self) -> None:
        """The state has changed, or more can be sent."""


class Link:
    """writable is False while the worker is behind in reading its socket."""

    def __init__(
        self, name: str, table: dict[str, Any], owner: Owner, environment: dict[str, str], load_seconds: float,
        module: str = "plaudit.serve.workers.worker",
    ) -> None:  # fmt: skip
        self.name = name
        self.table = table
        self.environment = environment
        self.load_seconds = load_seconds
        self.module = module
        self.state: State = "loading"
        self.reason = self._public = "the model is loading"
        self.hello: frames.Hello | None = None
        self.alive = frames.Alive(0)
        self.restarts = 0
        self.writable = False
        self.last_sign = self.last_result = time.monotonic()
        self._owner = owner
        self._process: Child | None = None
        self._transport: asyncio.Transport | None = None
        self._served = False  # whether this process has returned a result
        self._deaths = 0
        self._blamed = 0
        self._unstartable = 0  # failed starts in a row
        self._cause: str | None = None  # why we killed it
        self._hello_future: asyncio.Future[frames.Hello] = asyncio.get_running_loop().create_future()
        self._task = asyncio.create_task(self._keep_alive(), name=f"link-{name}")

    @property
    def public_reason(self) -> str:
        """The reason as shown to clients: a loading error may contain our paths."""
        return self._public

    async def loaded(self) -> frames.Hello:
        """The worker's Hello, once it is ready; raises ModelError if it cannot load its model."""
        return await asyncio.shield(self._hello_future)

    def send(self, frame: frames.Frame) -> None:
        """Send a frame; only in the state "ready". A frame for a worker that has just crashed is dropped: its owner is
        notified in the next iteration of the event loop, and requeues its jobs."""
        assert self._transport is not None, f"{self.name} is {self.state}, cannot send"
        if not self._transport.is_closing():  # uvloop raises an error if it is
            self._transport.write(frames.pack(frame))

    def silent_for(self) -> float:
        return time.monotonic() - self.last_sign

    def kill(self, why: str | None = None) -> None:
        """Kill the process. Unless the link is closed, it is restarted."""
        self._cause = why
        if self._process is not None:
            self._process.kill()

    async def close(self) -> None:
        self._set("closed", "the model is no longer served")
        self._task.cancel()
        await asyncio.gather(self._task, return_exceptions=True)
        await self._end()
        if not self._hello_future.done():
            self._hello_future.set_exception(ModelError(f"{self.name} was closed while it was loading"))
        self._hello_future.exception()  # marks the exception as retrieved; awaiting it is optional

    async def _keep_alive(self) -> None:
        try:
            await self._supervise()
        except Exception as error:  # a bug in the supervision; the state must not stay at restarting
            self._give_up(f"its supervision failed: {one_line(error)}")
            raise

    async def _supervise(self) -> None:
        while True:
            self._served = False
            started, failure = True, None
            try:
                failure = await self._live()
            except (OSError, RuntimeError) as error:  # a lack of descriptors, memory or threads may be temporary
                started, failure = False, f"its worker cannot be started: {one_line(error)}"
            self._unstartable = 0 if started else self._unstartable + 1
            # From here on nothing can be sent, so the state must change before anything else runs.
            first = not self._hello_future.done()
            blamed = self._owner.on_death()
            self.state, self.reason, self._public = "loading", RESTARTING, RESTARTING
            code = await self._end()
            if self._served:
                self._deaths = self._blamed = 0
            elif blamed and self._blamed < MAX_BLAMED:
                self._deaths, self._blamed = 0, self._blamed + 1
            elif started:
                self._deaths += 1
            why = failure or self._cause or f"its worker exited with code {code}"
            self._cause = None
            if failure is not None and first:
                return self._give_up(failure)
            if self._deaths >= MOST_DEATHS:
                return self._give_up(f"{why}, {self._deaths} times in a row without a result")
            self.restarts += 1
            self._set("loading", f"{why}; restarting it", RESTARTING)
            backoff = PAUSE_SECONDS * 2 ** min(self._unstartable, 10) if self._unstartable else 0.0
            await asyncio.sleep(min(LONGEST_PAUSE, max(backoff, PAUSE_SECONDS * self._deaths)))

    async def _live(self) -> str | None:
        """Runs one worker process. Returns after it has ended: the reason if it could not load."""
        loop = asyncio.get_running_loop()
        self._process, sock = await spawn_soon(self.module, self.environment)
        sock.setblocking(False)
        transport, connection = await loop.create_unix_connection(lambda: _Connection(self), sock=sock)
        self._transport, self.writable = transport, True
        self.send(frames.Start(self.table))
        try:
            async with asyncio.timeout(self.load_seconds):
                await connection.settled
        except TimeoutError:
            return f"its worker did not load it within {self.load_seconds:g} s"
        await connection.over
        return connection.failure

    async def _end(self) -> int | None:
        """Ensure that the process has ended; returns its exit code."""
        if self._transport is not None:
            self._transport.abort()
            self._transport = None
        process, self._process = self._process, None
        if process is None:
            return None
        process.kill()
        return await asyncio.get_running_loop().run_in_executor(None, process.wait)

    def _give_up(self, why: str) -> None:
        self._set("failed", why, "it has failed; see the server's log")
        if not self._hello_future.done():
            self._hello_future.set_exception(ModelError(f"cannot serve {self.name}: {why}"))
            self._hello_future.exception()  # marks the exception as retrieved; awaiting it is optional

    def _set(self, state: State, reason: str, public: str | None = None) -> None:
        self.state, self.reason, self._public = state, reason, reason if public is None else public
        self._owner.on_change()

    def _flow(self, writable: bool) -> None:
        self.writable = writable
        self._owner.on_change()

    def _frame(self, frame: frames.Frame, connection: _Connection) -> None:
        self.last_sign = time.monotonic()
        match frame:
            case frames.Hello():
                if self.hello is not None and frame.digest != self.hello.digest:
                    # The cached scores are of the other version, and would be mixed with new ones.
                    connection.end(
                        "its files, or the code that reads them, have changed on disk: swap the model, or restart "
                        "the server"
                    )
                    return
                self.hello = frame
            case frames.Ready():
                assert self.hello is not None, "a worker must send Hello before Ready"
                self.last_result = self.last_sign
                connection.settle()
                self._set("ready", "")
                if not self._hello_future.done():
                    self._hello_future.set_result(self.hello)
            case frames.Results():
                self.last_result = self.last_sign
                self._served = True
                self._owner.on_results(frame)
            case frames.Failed():
                connection.end(frame.message)
            case frames.Alive():
                self.alive = frame
            case _:
                raise ValueError(f"unexpected frame {type(frame).__name__} from a worker")


class _Connection(asyncio.Protocol):
    """The connection to one worker process. `settled` is set when it is ready, or closed."""

    def __init__(self, link: Link) -> None:
        self.link = link
        loop = asyncio.get_running_loop()
        self.settled: asyncio.Future[None] = loop.create_future()
        self.over: asyncio.Future[None] = loop.create_future()
        self.failure: str | None = None
        self._unpacker = frames.Unpacker()

    def settle(self) -> None:
        if not self.settled.done():
            self.settled.set_result(None)

    def end(self, failure: str | None = None) -> None:
        self.failure = self.failure or failure
        self.settle()
        if not self.over.done():
            self.over.set_result(None)

    def data_received(self, data: bytes) -> None:
        if not self.over.done():
            for frame in self._unpacker.feed(data):
                self.link._frame(frame, self)

    def connection_lost(self, exc: Exception | None) -> None:
        self.end()

    def pause_writing(self) -> None:
        self.link._flow(False)

    def resume_writing(self) -> None:
        self.link._flow(True)
