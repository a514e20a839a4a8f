"""The models of a server by their names: opening, finding, swapping, watching and closing them."""

from __future__ import annotations

import asyncio
import os
from collections.abc import Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Any

from plaudit.config.reward import RewardTable, parse_reward
from plaudit.config.serve import NO_SCORE, ServeTable
from plaudit.errors import ConfigError, PlauditError, nearest
from plaudit.reward.process import ProcessReading
from plaudit.serve.handle import ModelHandle, ModelStatus, ServerResources, WorkerStatus
from plaudit.serve.http.app import Admission
from plaudit.serve.http.message import HttpError
from plaudit.serve.logs import Log
from plaudit.serve.metrics import Metrics
from plaudit.serve.model import ServedModel, Table, new_served
from plaudit.serve.options import completed
from plaudit.serve.swaps import Swaps
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
        self._root = None if table.model_root is None else Path(table.model_root).resolve()
        self.log = log
        self._swapping = asyncio.Lock()
        self._swaps = Swaps()
        self._previous: dict[str, Table] = {}  # what a name served before
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
        # Blends last: they hold their members.
        for name, entry in sorted(table.models.items(), key=lambda pair: pair[1].kind == "blend"):
            self.served[name] = new_served(name, entry, resources, self.served)
        self.served = {name: self.served[name] for name in table.models}

    async def open(self) -> None:
        """Until all are loaded and warmed up; ModelError if one cannot be."""
        await asyncio.gather(*(served.open() for served in self.served.values() if isinstance(served, ServedModel)))

    def named(self, name: str) -> ModelHandle:
        if name not in self.served:
            raise HttpError(404, "unknown_model", f"no model {name[:100]!r}; {nearest(name[:100], self.served)}")
        return self.served[name]

    async def swap(self, name: str, path: str) -> str:
        served = self.named(name)
        if not isinstance(served, ServedModel):
            raise ConfigError(f"{name} is a {served.kind}; only outcome and process models can be swapped")
        directory = self._confined(path)
        return await self._replace(served, self._table(served, {**self._explicit[name], "path": str(directory)}))

    async def rollback(self, name: str) -> str:
        """To what this name served before the last swap or rollback; its files are read again."""
        served = self.named(name)
        if not isinstance(served, ServedModel) or name not in self._previous:
            raise ConfigError(f"{name} was not swapped since the server started; there is nothing to go back to")
        table = self._previous[name]
        if "replicas" in self._explicit[name]:
            table = table.model_copy(update={"replicas": self._explicit[name]["replicas"]})
        return await self._replace(served, table)

    async def _replace(self, served: ServedModel, table: Table) -> str:
        if self._swapping.locked():
            raise ConfigError("another swap is under way; wait for it")
        async with self._swapping:
            before = served.table
            version = await served.swap(table)
            self._previous[served.name] = before
        self.swaps += 1
        self.log("swapped", model=served.name, version=version)
        return version

    def start_swap(self, name: str, path: str) -> dict[str, Any]:
        """Without waiting for it: how it stands."""
        self.named(name)

        async def load() -> str:
            try:
                return await self.swap(name, path)
            except PlauditError as error:
                self.log("swap_failed", model=name, reason=str(error))
                raise ConfigError(f"{self.scrub(str(error))}; nothing has changed") from None

        return self._swaps.start(name, path, load()).shown()

    def started_swaps(self) -> list[dict[str, Any]]:
        return self._swaps.shown()

    def scale(self, name: str, count: int) -> None:
        served = self.named(name)
        if not isinstance(served, ServedModel):
            raise ConfigError(f"{name} is a {served.kind}; only models with workers have replicas")
        served.scale(count)
        self._explicit[name]["replicas"] = count
        self.log("scaled", model=name, replicas=count)

    def _table(self, served: ServedModel, entry: Mapping[str, Any]) -> Table:
        """As a new server would read the directory, with what the operator set for this name."""
        source = f"models.{served.name}"
        table: RewardTable = parse_reward(completed(entry, source), source)
        if table.kind in NO_SCORE and served.kind not in NO_SCORE:
            raise ConfigError(
                f"the new model would be of kind {table.kind!r} and give no score, and {served.name} is a "
                f"{served.kind} model; put a reward.toml beside it, or set kind and format for this name"
            )
        assert isinstance(table, Table)
        return table

    def _confined(self, path: str) -> Path:
        """`path` under the root, links followed: nothing outside is opened, whatever is asked for."""
        if self._root is None:
            raise ConfigError("the server was started without model_root, so no model can be swapped in")
        if "\0" in path or "://" in path or Path(path).is_absolute():
            raise ConfigError(f"path {path[:100]!r} must be a path relative to model_root")
        try:
            directory = (self._root / path).resolve()
            inside = directory.is_relative_to(self._root) and directory.is_dir()
        except (OSError, RuntimeError):  # a name that is too long, links in a circle
            inside = False
        if not inside:
            raise ConfigError(f"path {path[:100]!r} is not a directory under model_root")
        for file in directory.rglob("*"):
            if not file.resolve().is_relative_to(self._root):
                raise ConfigError(f"path {path[:100]!r} holds the link {file.name!r}, which leads out of model_root")
        return directory

    def scrub(self, message: str) -> str:
        """An error message without the server's own paths."""
        return message if self._root is None else message.replace(f"{self._root}/", "").replace(str(self._root), ".")

    async def unready(self, name: str | None = None) -> list[str]:
        """Why the server is not ready, or the model of that name."""
        if self.admission.leaving:
            return ["the server is shutting down"]
        if name is not None:
            if name not in self.served:  # without the names that there are: this is told to anybody
                raise HttpError(404, "unknown_model", "no model of that name is served")
            return [why for why in [await self.served[name].healthy()] if why]
        return [why for why in await asyncio.gather(*(s.healthy() for s in self.served.values())) if why]

    def statuses(self) -> list[ModelStatus]:
        return [served.status() for served in self.served.values()]

    def describe(self) -> list[dict[str, Any]]:
        return list(map(asdict, self.statuses()))

    def failed(self) -> list[str]:
        """Models that will not come back."""
        return [f"{status.name}: {status.reason}" for status in self.statuses() if status.state == "failed"]

    def given_up(self) -> list[str]:
        """Their names."""
        return [status.name for status in self.statuses() if status.state == "failed"]

    def hopeful(self) -> bool:
        """Whether a model with a worker is left that serves or may yet."""
        return any(status.state != "failed" for status in self._of_workers())

    def update_gauges(self) -> None:
        self.metrics.replica_held.clear()
        self.metrics.replica_ready.clear()
        for status in self._of_workers():
            for replica in status.replicas:
                labels = (status.name, str(replica["replica"]))
                self.metrics.replica_held.labels(*labels).set(replica["held_tokens"])
                self.metrics.replica_ready.labels(*labels).set(replica["state"] == "ready")
            self.metrics.queue_tokens.labels(status.name).set(status.queue_tokens)
            self.metrics.queue_items.labels(status.name).set(status.queue_items)
            self.metrics.held_tokens.labels(status.name).set(status.held_tokens)

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
            if isinstance(served, ServedModel) and isinstance(served.reading, ProcessReading):
                entry["split"] = served.reading.format.split
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
        raise ConfigError(f"--ray needs Ray Serve ({error}): pip install 'plaudit[ray]'") from error
    return Cluster(address)


def _environment(table: ServeTable) -> Mapping[str, str]:
    """Each worker gets its share of the cores, and threads that sleep while they wait: they have neighbours."""
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
