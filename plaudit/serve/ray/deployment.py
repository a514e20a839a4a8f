"""Models whose workers are managed by Ray Serve, on this machine or on a cluster.

Each version of a model is a Ray Serve application: Ray Serve places its replicas, checks their health, replaces failed
ones and scales them by the number of queued tokens. The server keeps the queue, batches the items of many requests into
one frame per replica, and chooses the replica; frames use a separate connection instead of Ray Serve's router (which
lost calls when its controller was killed). A broken connection counts as a crash: its jobs are sent to another replica.
"""

from __future__ import annotations

import asyncio
import json
import logging
import os
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import ray
from ray import serve

from plaudit.errors import ConfigError, ModelError, one_line
from plaudit.serve.metrics import Metrics
from plaudit.serve.ray.config import application_name
from plaudit.serve.ray.replica import build
from plaudit.serve.ray.replica_ids import replica_ids
from plaudit.serve.workers import frames
from plaudit.serve.workers.cache import ScoreCache
from plaudit.serve.workers.deployment import Deployment
from plaudit.serve.workers.link import Owner, State
from plaudit.serve.workers.replica import Replica

LOCAL = "local"
LOCAL_CPUS = 64  # logical CPUs for workers on one machine, which share its cores as processes do
CALL_SECONDS = 20.0
LOOK_SECONDS = 0.25
ABSENT_SECONDS = 1.0  # delay before a replica that failed a call is used again, if Ray Serve still lists it


class Cluster:
    """One connection to Ray for all models of a server. Blocking calls run in a thread."""

    def __init__(self, address: str) -> None:
        self.host = "127.0.0.1" if address == LOCAL else None
        """The address on which replicas listen for the server; None: the address of their node."""
        self._threads = ThreadPoolExecutor(1, thread_name_prefix="ray")
        self._started = self._threads.submit(self._start, address)

    async def run(self, call: Callable[[], Any]) -> Any:
        await asyncio.wrap_future(self._started)
        return await asyncio.get_running_loop().run_in_executor(self._threads, call)

    async def close(self) -> None:
        """Disconnect; applications were deleted with their deployments. A Ray instance we started is stopped."""
        await asyncio.get_running_loop().run_in_executor(self._threads, ray.shutdown)
        self._threads.shutdown(wait=False)

    def _start(self, address: str) -> None:
        # Set before Ray starts: its workers inherit our priority, and Serve logs to its own file.
        os.environ.setdefault("RAY_worker_niceness", "0")
        os.environ.setdefault("RAY_SERVE_LOG_TO_STDERR", "0")
        options: dict[str, Any] = {"num_cpus": LOCAL_CPUS} if address == LOCAL else {"address": address}
        try:
            ray.init(
                namespace="plaudit", include_dashboard=False if address == LOCAL else None, log_to_driver=False,
                logging_level=logging.ERROR, configure_logging=False, **options,
            )  # fmt: skip
        except (ConnectionError, RuntimeError, ValueError, TimeoutError) as error:
            raise ConfigError(
                f"no Ray cluster at {address!r}: {one_line(error)}; start one with `ray start --head`, or give --ray "
                "local"
            ) from error
        serve.start(proxy_location="Disabled")  # we use our own HTTP server


class RayLink:
    """The connection to one Ray Serve replica, over which batches are sent as to a local worker. It is never
    restarted: a new connection is a new link."""

    def __init__(self, replica_id: str, application: str, owner: Owner, waiting: Callable[[], int]) -> None:
        self.replica_id = replica_id
        self.state: State = "loading"
        self.reason = "connecting to the replica"
        self.hello: frames.Hello | None = None
        self.alive = frames.Alive(0)
        self.restarts = 0
        self.writable = True
        self.last_sign = self.last_result = time.monotonic()
        self._owner = owner
        self._waiting = waiting
        self._writer: asyncio.StreamWriter | None = None
        self._loaded: asyncio.Future[frames.Hello] = asyncio.get_running_loop().create_future()
        self._task = asyncio.create_task(self._live(application), name=f"ray-{replica_id}")

    @property
    def public_reason(self) -> str:
        return self.reason

    async def loaded(self) -> frames.Hello:
        return await asyncio.shield(self._loaded)

    def send(self, frame: frames.Frame) -> None:
        assert self._writer is not None, f"the replica is {self.state}, cannot send"
        if not self._writer.is_closing():  # uvloop raises an error if it is
            self._writer.write(frames.pack(frame))

    def silent_for(self) -> float:
        return time.monotonic() - self.last_sign

    def kill(self, why: str | None = None) -> None:
        """Abandon the replica. Ray Serve also checks its health and replaces it if needed."""
        self.reason = why or "it was abandoned"
        self._task.cancel()

    async def close(self) -> None:
        self.state, self.reason = "closed", "the replica is no longer used"
        self._task.cancel()
        await asyncio.gather(self._task, return_exceptions=True)
        self._fail_loading()

    async def _live(self, application: str) -> None:
        why = "its replica disconnected"
        try:
            await self._connect(application)
        except asyncio.CancelledError:
            why = self.reason
        except Exception as error:  # of many kinds: actor not found, connection refused or broken
            why = f"its replica failed: {one_line(error)}"
        finally:
            if self._writer is not None:
                self._writer.close()
        if self.state != "closed":
            if self.state == "ready":
                self._owner.on_death()
            self.state, self.reason = "failed", why
            self._fail_loading()
            self._owner.on_change()

    async def _connect(self, application: str) -> None:
        async with asyncio.timeout(CALL_SECONDS):
            address = await serve.get_deployment_handle("model", application).address.remote(replica_id=self.replica_id)
            if address is None:
                return
            host, port, token = address
            reader, self._writer = await asyncio.open_connection(host, port)
        self._writer.write(token)
        unpacker = frames.Unpacker()
        while data := await reader.read(1 << 20):
            for frame in unpacker.feed(data):
                self._take(frame)

    def _take(self, frame: frames.Frame) -> None:
        self.last_sign = time.monotonic()
        match frame:
            case frames.Hello():
                self.hello = frame
            case frames.Ready():
                assert self.hello is not None
                self.state, self.reason = "ready", ""
                self._loaded.set_result(self.hello)
                self._owner.on_change()
            case frames.Results():
                self.last_result = self.last_sign
                self._owner.on_results(frame)
            case frames.Alive():
                self.alive = frame
                self.send(frames.Waiting(self._waiting()))

    def _fail_loading(self) -> None:
        if not self._loaded.done():
            self._loaded.set_exception(ModelError(self.reason))
        self._loaded.exception()  # marks the exception as retrieved; awaiting it is optional


class RayDeployment(Deployment):
    """A deployment whose replicas are added and removed by Ray Serve."""

    def __init__(
        self, cluster: Cluster, name: str, number: int, table: dict[str, Any], cache: ScoreCache, metrics: Metrics,
        environment: dict[str, str], load_seconds: float, on_change: Callable[[], None],
    ) -> None:  # fmt: skip
        self.application = application_name(name, number)
        self._cluster = cluster
        table = json.loads(json.dumps(table))  # normalised to JSON types as in `plaudit deploy`: lists, no tuples
        self._load_seconds = load_seconds
        self._arguments: dict[str, Any] = {
            "table": table, "environment": environment, "load_seconds": load_seconds, "host": cluster.host,
        }  # fmt: skip
        self._least = int(table.get("replicas", 1))
        self._ours = False
        self._next_replica_id = ""
        self._failed_at: dict[str, float] = {}
        self._follow: asyncio.Task[None] | None = None
        super().__init__(
            name, number, table, cache, metrics, environment, load_seconds, on_change, replicas=0, connect=self._link
        )

    async def opened(self) -> frames.Hello:
        try:
            await self._cluster.run(self._deploy)
        except (RuntimeError, ValueError) as error:
            raise ModelError(f"cannot serve {self.name}: {one_line(error)}") from error
        async with asyncio.timeout(self._load_seconds):
            # The first call creates the handle's router, which then receives updates of the replicas.
            await serve.get_deployment_handle("model", self.application).configured.remote(replica_id="")
            self._follow = asyncio.create_task(self._follow_replicas())
            while sum(replica.ready for replica in self.replicas) < self._least:
                await asyncio.sleep(LOOK_SECONDS)
        hello = next(replica.wire.hello for replica in self.replicas if replica.ready)
        assert hello is not None
        self._digest = hello.digest
        self.version = f"{self.number}-{hello.digest}"
        return hello

    def scale(self, count: int) -> None:
        self._arguments["table"] = {**self._arguments["table"], "replicas": count}
        self._change(self._cluster.run(self._deploy))

    async def close(self) -> None:
        if self._follow is not None:
            self._follow.cancel()
        await super().close()
        if self._ours:
            await self._cluster.run(lambda: serve.delete(self.application))

    def on_change(self) -> None:
        for replica in [replica for replica in self.replicas if replica.wire.state == "failed"]:
            assert isinstance(replica.wire, RayLink)
            self._failed_at[replica.wire.replica_id] = time.monotonic()
            self.replicas.remove(replica)
        super().on_change()

    def _deploy(self) -> None:
        """Deploys the application unless it is already deployed, for example by `serve deploy`, with the same table."""
        running = serve.status().applications.get(self.application)
        if running is not None and running.status == "RUNNING" and not self._ours:
            handle = serve.get_deployment_handle("model", self.application)
            if handle.configured.remote(replica_id="").result(timeout_s=CALL_SECONDS) == self._arguments["table"]:
                return
        self._ours = True
        serve.run(build(self._arguments), name=self.application, route_prefix=None)

    def _link(self, number: int, owner: Owner) -> RayLink:
        return RayLink(self._next_replica_id, self.application, owner, lambda: self.queue.tokens)

    async def _follow_replicas(self) -> None:
        while True:
            there = replica_ids(self.application)
            connected = {
                replica.wire.replica_id: replica for replica in self.replicas if isinstance(replica.wire, RayLink)
            }
            for replica_id in sorted(there - connected.keys()):
                if time.monotonic() - self._failed_at.get(replica_id, 0.0) > ABSENT_SECONDS:
                    self._next_replica_id = replica_id
                    self._change(self._arrive(self._add()))
            for replica_id in connected.keys() - there:
                if not connected[replica_id].leaving:  # it finishes its jobs
                    self.retire(connected[replica_id])
            self._failed_at = {replica_id: at for replica_id, at in self._failed_at.items() if replica_id in there}
            await asyncio.sleep(LOOK_SECONDS)

    async def _arrive(self, replica: Replica) -> None:
        if not self._digest:  # opened() waits for the first replicas
            try:
                hello = await replica.opened()
            except ModelError:
                return
            self._digest = self._digest or hello.digest
            return
        await super()._arrive(replica)
