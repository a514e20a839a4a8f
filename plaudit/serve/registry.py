"""The models of a server by name: opens, finds, swaps, monitors and closes them."""

from __future__ import annotations

import asyncio
import os
from collections.abc import Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict
from typing import TYPE_CHECKING, Any

from plaudit.config.serve import ServeTable
from plaudit.errors import ConfigError, PlauditError, nearest
from plaudit.reward.process import ProcessReading
from plaudit.serve.handle import ModelHandle, ModelStatus, ServerResources, WorkerStatus
from plaudit.serve.http.app import Admission
from plaudit.serve.http.message import HttpError
from plaudit.serve.logs import Log
from plaudit.serve.metrics import Metrics
from plaudit.serve.model import ServedModel, new_served
from plaudit.serve.state import ModelState, StateFile, restored
from plaudit.serve.swaps import ModelRoot, Swaps, swapped_table
from plaudit.serve.version import Table, Version
from plaudit.serve.workers.cache import ScoreCache
from plaudit.serve.workers.calls import FairCalls

if TYPE_CHECKING:
    from plaudit.serve.ray.deployment import Cluster


class Models:
    def __init__(self, table: ServeTable, admission: Admission, metrics: Metrics, log: Log) -> None:
        self.metrics = metrics
        self.admission = admission
        self.changed = asyncio.Event()
        self.swaps = 0
        self._explicit = {name: table.explicit(name) for name in table.models}
        self._root = ModelRoot(table.model_root)
        self._state = StateFile(table.state_file)
        self._deciding = asyncio.Lock()
        self.log = log
        self._swapping = asyncio.Lock()
        self._swaps = Swaps()
        before, vain = restored(table)
        for name in vain:
            log("state_ignored", model=name, reason="the configuration has changed since the swap")
        # The previous version of each name, for rollback.
        self._previous = {name: each.previous for name, each in before.items() if each.previous is not None}
        self._configured = {name: str(getattr(entry, "path", "")) for name, entry in table.models.items()}
        self._states: dict[str, tuple[str, str]] = {}
        self._cluster = None if table.ray is None else _cluster(table.ray)
        slots = max(2, os.cpu_count() or 2)
        self._threads = ThreadPoolExecutor(slots, thread_name_prefix="tokenise")
        resources = ServerResources(
            admission, metrics, ScoreCache(table.limits.cache_bytes), self._threads,
            FairCalls(self._threads, slots), _environment(table), self._change,
            table.limits.load_seconds, self._cluster,
        )  # fmt: skip
        self.served: dict[str, ModelHandle] = {}
        # Blends last: they refer to their members.
        for name, entry in sorted(table.models.items(), key=lambda pair: pair[1].kind == "blend"):
            now = before[name].main if name in before else entry
            self.served[name] = new_served(name, now, resources, self.served)
        self.served = {name: self.served[name] for name in table.models}
        for name, each in before.items():
            if each.canary is not None:
                self._swappable(name).resume(each.canary, each.state.share)

    async def open(self) -> None:
        """Wait until all are loaded and warmed up; ModelError if one fails."""
        await asyncio.gather(*(served.open() for served in self.served.values() if isinstance(served, ServedModel)))

    def named(self, name: str) -> ModelHandle:
        if name not in self.served:
            raise HttpError(404, "unknown_model", f"no model {name[:100]!r}; {nearest(name[:100], self.served)}")
        return self.served[name]

    async def swap(self, name: str, path: str, share: float | None = None) -> str:
        """Replace a model. With a share, this fraction of requests goes to the new version until `promote` or
        `rollback`."""
        served = self._swappable(name)
        if served.canary is not None:
            raise ConfigError(
                f"{name} already has the canary {served.canary.version.name}; promote it or roll it back first"
            )
        directory = self._root.confined(path)
        table = swapped_table(name, served.kind, {**self._explicit[name], "path": str(directory)})
        if share is not None and table.kind != served.kind:
            raise ConfigError(
                f"a canary of {name} must be of kind {served.kind!r}, but this model is of kind {table.kind!r}; swap "
                "it without a share"
            )
        return await self._replace(served, table, share)

    async def rollback(self, name: str) -> str:
        """Removes the canary if there is one; otherwise loads again what this name served before the last swap or
        rollback. Returns the version."""
        served = self._swappable(name)
        async with self._deciding:
            if served.canary is not None:
                await self._keep(served, served.main.table, self._previous.get(name))
                served.discard(served.canary.version)
                self.log("rolled_back", model=name, version=served.main.name)
                return served.main.name
        if name not in self._previous:
            raise ConfigError(f"{name} has not been swapped since the server started, so it cannot be rolled back")
        table = self._previous[name]
        if "replicas" in self._explicit[name]:
            table = table.model_copy(update={"replicas": self._explicit[name]["replicas"]})
        return await self._replace(served, table)

    async def promote(self, name: str) -> str:
        """Send all requests to the canary from now on."""
        served = self._swappable(name)
        async with self._deciding:
            if (canary := served.canary) is None:
                raise ConfigError(f"{name} has no canary; start one by a swap with a share")
            version = canary.version
            if version.deployment.state == "failed":
                raise ConfigError(f"the canary {version.name} of {name} is not running: {version.deployment.reason}")
            await self._keep(served, version.table, served.main.table)
            self._use(served, version)
            if "replicas" in self._explicit[name]:
                served.scale(self._explicit[name]["replicas"])
            return version.name

    async def share(self, name: str, share: float) -> str:
        """Change the canary's share."""
        served = self._swappable(name)
        async with self._deciding:
            if (canary := served.canary) is None:
                raise ConfigError(f"{name} has no canary whose share could be changed; expected a path to swap")
            await self._keep(served, served.main.table, self._previous.get(name), (canary.version.table, share))
            canary.share = share
            self.log("canary", model=name, version=canary.version.name, share=share)
            return canary.version.name

    def _swappable(self, name: str) -> ServedModel:
        served = self.named(name)
        if not isinstance(served, ServedModel):
            raise ConfigError(f"{name} is of kind {served.kind}; only outcome and process models can be swapped")
        return served

    async def _replace(self, served: ServedModel, table: Table, share: float | None = None) -> str:
        if self._swapping.locked():
            raise ConfigError("another swap is in progress; wait until it has finished")
        async with self._swapping:
            version = await served.load(table)
            try:  # a swap that cannot be persisted fails
                if share is None:
                    await self._keep(served, table, served.main.table)
                else:
                    await self._keep(served, served.main.table, self._previous.get(served.name), (table, share))
            except BaseException:
                served.discard(version)
                raise
            if share is None:
                self._use(served, version)
            else:
                served.try_out(version, share)
                self.log("canary", model=served.name, version=version.name, share=share)
        return version.name

    def _use(self, served: ServedModel, version: Version) -> None:
        self._previous[served.name] = served.main.table
        served.use(version)
        self.swaps += 1
        self.log("swapped", model=served.name, version=version.name)

    async def _keep(
        self, served: ServedModel, main: Table, previous: Table | None, canary: tuple[Table, float] | None = None
    ) -> None:
        tried, share = (None, 0.0) if canary is None else canary
        before, beside = (None if table is None else str(table.path) for table in (previous, tried))
        state = ModelState(self._configured[served.name], str(main.path), before, beside, share)
        await self._state.keep(served.name, state)

    def start_swap(self, name: str, path: str, share: float | None = None) -> dict[str, Any]:
        """Starts a swap in the background and returns its status."""
        self.named(name)

        async def load() -> str:
            try:
                return await self.swap(name, path, share)
            except PlauditError as error:
                self.log("swap_failed", model=name, reason=str(error))
                raise ConfigError(f"{self.scrub(str(error))}; nothing has changed") from None

        return self._swaps.start(name, path, load()).shown()

    def started_swaps(self) -> list[dict[str, Any]]:
        return self._swaps.shown()

    def scale(self, name: str, count: int) -> None:
        served = self.named(name)
        if not isinstance(served, ServedModel):
            raise ConfigError(f"{name} is of kind {served.kind}; only models with workers have replicas")
        served.scale(count)
        self._explicit[name]["replicas"] = count
        self.log("scaled", model=name, replicas=count)

    def scrub(self, message: str) -> str:
        """The error message without the server's private paths."""
        return self._root.scrub(message)

    async def unready(self, name: str | None = None) -> list[str]:
        """Why the server, or the model of that name, is not ready."""
        if self.admission.leaving:
            return ["the server is shutting down"]
        if name is not None:
            if name not in self.served:  # does not list the models: this is readable without a key
                raise HttpError(404, "unknown_model", "no model of that name is served")
            return [why for why in [await self.served[name].healthy()] if why]
        return [why for why in await asyncio.gather(*(s.healthy() for s in self.served.values())) if why]

    def statuses(self) -> list[ModelStatus]:
        return [served.status() for served in self.served.values()]

    def describe(self) -> list[dict[str, Any]]:
        return list(map(asdict, self.statuses()))

    def failed(self) -> list[str]:
        """Models that have failed permanently."""
        return [f"{status.name}: {status.reason}" for status in self.statuses() if status.state == "failed"]

    def given_up(self) -> list[str]:
        """Their names."""
        return [status.name for status in self.statuses() if status.state == "failed"]

    def recoverable(self) -> bool:
        """Whether a model with a worker is left that serves or may recover."""
        return any(status.state != "failed" for status in self._of_workers())

    def update_gauges(self) -> None:
        metrics = self.metrics
        of_replicas = {
            "held_tokens": metrics.replica_held, "resident_bytes": metrics.worker_resident,
            "device_bytes": metrics.worker_device,
        }  # fmt: skip
        for gauge in (metrics.replica_ready, *of_replicas.values()):
            gauge.clear()
        for status in self._of_workers():
            for replica in status.replicas:
                labels = (status.name, str(replica["replica"]))
                metrics.replica_ready.labels(*labels).set(replica["state"] == "ready")
                for name, gauge in of_replicas.items():
                    gauge.labels(*labels).set(replica[name])
            metrics.queue_tokens.labels(status.name).set(status.queue_tokens)
            metrics.queue_items.labels(status.name).set(status.queue_items)
            metrics.held_tokens.labels(status.name).set(status.held_tokens)

    def tick(self) -> None:
        """Every second."""
        for served in self.served.values():
            if isinstance(served, ServedModel):
                served.tick()
        statuses = self._of_workers()
        budget = max((status.budget for status in statuses), default=0)
        self.metrics.history.tick(sum(status.queue_tokens for status in statuses), budget)

    def stats(self, tenant: str, *, everyone: bool) -> dict[str, Any]:
        history = self.metrics.history
        models = []
        for served in self.served.values():
            entry, counts = asdict(served.status()), history.model(served.name)
            if isinstance(served, ServedModel) and isinstance(served.main.reading, ProcessReading):
                entry["split"] = served.main.reading.format.split
            models.append(
                {
                    **entry, "items": counts.items, "failed": counts.failed, "tokens": counts.tokens,
                    "computed_tokens": counts.computed, "prefix_tokens": counts.prefix,
                    "deduplicated_tokens": counts.deduplicated, "cached_tokens": counts.cached, "steps": counts.steps,
                    "scores": counts.histogram(),
                }
            )  # fmt: skip
        return {
            "draining": self.admission.draining, "open_requests": self.admission.open_requests,
            "open_tokens": self.admission.open_tokens, "most_tokens": self.admission.most_tokens, "models": models,
            "seconds": list(history.seconds), "errors": history.errors_of(None if everyone else tenant),
        }  # fmt: skip

    def kill(self) -> None:
        for served in self.served.values():
            served.kill()

    async def close(self) -> None:
        await self._swaps.close()
        await asyncio.gather(*(served.close() for served in self.served.values()), return_exceptions=True)
        if self._cluster is not None:
            await self._cluster.close()
        self._threads.shutdown(wait=False, cancel_futures=True)

    def _change(self) -> None:
        for status in self.statuses() if hasattr(self, "served") else ():
            if self._states.get(status.name) != (status.state, status.reason):
                self._states[status.name] = (status.state, status.reason)
                self.log("model", model=status.name, state=status.state, reason=status.reason)
        self.changed.set()

    def _of_workers(self) -> list[WorkerStatus]:
        return [status for status in self.statuses() if isinstance(status, WorkerStatus)]


def _cluster(address: str) -> Cluster:
    try:
        from plaudit.serve.ray.deployment import Cluster
    except ImportError as error:
        raise ConfigError(
            f"--ray needs Ray Serve, which is not installed ({error}): pip install 'plaudit[ray]'"
        ) from error
    return Cluster(address)


def _environment(table: ServeTable) -> Mapping[str, str]:
    """Environment of a worker: its share of the cores, and threads that sleep while waiting, since workers share
    cores."""
    workers = sum(
        getattr(entry, "replicas", 1) * getattr(entry, "ranks", 1)
        for entry in table.models.values()
        if getattr(entry, "path", None) is not None
    )
    threads = max(1, (os.cpu_count() or 1) // max(1, workers))
    return {
        "OMP_NUM_THREADS": os.environ.get("OMP_NUM_THREADS", str(threads)),
        "OMP_WAIT_POLICY": os.environ.get("OMP_WAIT_POLICY", "passive"),
        "TRANSFORMERS_VERBOSITY": "error",
        "HF_HUB_DISABLE_PROGRESS_BARS": "1",
        "TOKENIZERS_PARALLELISM": "false",
    }
