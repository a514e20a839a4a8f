"""The server's metrics: for Prometheus, and the last minutes for the live page."""

from __future__ import annotations

import gc
import platform
import time
from bisect import bisect_left
from collections import defaultdict, deque
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from importlib.metadata import version
from itertools import accumulate
from typing import Any, Generic, TypeVar

import numpy as np
from prometheus_client import (
    CollectorRegistry,
    Counter,
    Gauge,
    Histogram,
    PlatformCollector,
    ProcessCollector,
    disable_created_metrics,
)
from prometheus_client.core import CounterMetricFamily, HistogramMetricFamily
from prometheus_client.exposition import generate_latest
from prometheus_client.utils import floatToGoString

from plaudit import __version__

SECONDS = (0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1, 2.5, 5, 10, 30, 60, 300)
TOKENS = (16, 64, 256, 512, 1024, 2048, 4096, 8192, 16384, 65536)
HISTORY_SECONDS = 300
ADMIN = "admin"  # the name of requests with the admin key
SCORES_KEPT = 2000
RESULTS = ("scored", "failed")
LATENCIES_KEPT = 10_000  # per second
C = TypeVar("C")


class Count:
    """The value of a counter for one set of labels."""

    __slots__ = ("value",)

    def __init__(self) -> None:
        self.value = 0.0

    def inc(self, amount: float = 1) -> None:
        self.value += amount


class Distribution:
    """The values of a histogram for one set of labels: how many are in each bucket, and their sum."""

    __slots__ = ("bounds", "buckets", "sum")

    def __init__(self, bounds: Sequence[float]) -> None:
        self.bounds = bounds
        self.buckets = [0] * (len(bounds) + 1)
        self.sum = 0.0

    def observe(self, amount: float) -> None:
        self.buckets[bisect_left(self.bounds, amount)] += 1
        self.sum += amount


class _ByLabels(Generic[C]):
    """A metric with labels, for Prometheus. A request changes about fifteen, all on the event loop: prometheus_client's
    own, with locks and checks, take four times as long."""

    def __init__(self, name: str, help: str, labels: Sequence[str], new: Callable[[], C]) -> None:
        self.name, self.help = f"plaudit_{name}", help
        self._labelnames = labels  # as prometheus_client's own metrics call them
        self._new = new
        self._by_labels: dict[tuple[object, ...], C] = {}

    def labels(self, *labels: object) -> C:
        found = self._by_labels.get(labels)
        if found is None:
            found = self._by_labels[labels] = self._new()
        return found

    def remove(self, *labels: object) -> None:
        self._by_labels.pop(labels, None)

    def items(self) -> Iterator[tuple[list[str], C]]:
        for labels, each in self._by_labels.items():
            yield list(map(str, labels)), each


class Counts(_ByLabels[Count]):
    def __init__(self, name: str, help: str, labels: Sequence[str]) -> None:
        super().__init__(name, help, labels, Count)

    def describe(self) -> Iterator[CounterMetricFamily]:
        return self.collect()

    def collect(self) -> Iterator[CounterMetricFamily]:
        family = CounterMetricFamily(self.name, self.help, labels=self._labelnames)
        for labels, count in self.items():
            family.add_metric(labels, count.value)
        yield family


class Distributions(_ByLabels[Distribution]):
    def __init__(self, name: str, help: str, labels: Sequence[str], bounds: Sequence[float]) -> None:
        self._bounds = tuple(map(float, bounds))
        super().__init__(name, help, labels, lambda: Distribution(self._bounds))

    def describe(self) -> Iterator[HistogramMetricFamily]:
        return self.collect()

    def collect(self) -> Iterator[HistogramMetricFamily]:
        family = HistogramMetricFamily(self.name, self.help, labels=self._labelnames)
        bounds = [*map(floatToGoString, self._bounds), "+Inf"]
        for labels, values in self.items():
            upto = list(zip(bounds, accumulate(values.buckets), strict=True))
            family.add_metric(labels, upto, values.sum)
        yield family


class Metrics:
    def __init__(self) -> None:
        disable_created_metrics()  # type: ignore[no-untyped-call]
        self.registry = CollectorRegistry()
        ProcessCollector(registry=self.registry)
        PlatformCollector(registry=self.registry)

        def counter(name: str, help: str, *labels: str) -> Counts:
            self.registry.register(counts := Counts(name, help, labels))
            return counts

        def gauge(name: str, help: str, *labels: str) -> Gauge:
            return Gauge(f"plaudit_{name}", help, labels, registry=self.registry)

        def histogram(name: str, help: str, bounds: Sequence[float], *labels: str) -> Distributions:
            self.registry.register(distributions := Distributions(name, help, labels, bounds))
            return distributions

        def of_process(name: str, help: str) -> Histogram:
            return Histogram(f"plaudit_{name}", help, buckets=SECONDS, registry=self.registry)

        gauge("build_info", "1, with the releases that compute", "version", "python", "torch").labels(
            __version__, platform.python_version(), version("torch")
        ).set(1)
        self.requests = counter(
            "requests_total", "Answered requests, without health checks and pages", "model", "protocol", "status", "key"
        )
        self.probes = counter("probes_total", "Replies of routes that are open to anyone: health and pages", "status")
        self.request_seconds = histogram(
            "request_seconds", "From the first byte to the reply, without health checks and pages", SECONDS, "model",
            "protocol",
        )  # fmt: skip
        self.key_tokens = counter("key_tokens_total", "Tokens of answered items, by API key", "key", "model")
        self.errors = counter("errors_total", "Errors of requests and items", "type")
        self.items = counter("items_total", "Items answered with a score", "model")
        self.tokens = counter(
            "tokens_total", "Tokens submitted; computed by the model; reused from the prefix tree; of items computed "
            "once for several; of items answered from the score cache", "model", "kind",
        )  # fmt: skip
        self.queue_tokens = gauge("queue_tokens", "Tokens queued for the worker", "model")
        self.queue_items = gauge("queue_items", "Items queued for the worker", "model")
        self.held_tokens = gauge("held_tokens", "Tokens in flight at the worker", "model")
        self.queue_seconds = histogram("queue_seconds", "Queueing time of an item", SECONDS, "model")
        self.compute_seconds = histogram(
            "compute_seconds", "From sending an item to the worker to its score", SECONDS, "model"
        )
        self.batch_tokens = histogram("batch_tokens", "Tokens per step of the model", TOKENS, "model")
        self.prepare_seconds = histogram("prepare_seconds", "Rendering and tokenising a request", SECONDS, "model")
        self.expired = counter(
            "expired_before_batch_total", "Items whose deadline expired before they were sent", "model"
        )
        self.cancelled = counter("cancelled_total", "Items whose client disconnected", "model")
        self.rejected = counter("rejected_total", "Requests rejected because of overload or draining", "reason")
        self.restarts = counter("worker_restarts_total", "Restarts of workers", "model")
        self.replica_items = counter("replica_items_total", "Items that a replica answered", "model", "replica")
        self.replica_tokens = counter(
            "replica_tokens_total", "Tokens that a replica computed, or reused from its prefix tree", "model",
            "replica", "kind",
        )  # fmt: skip
        self.replica_restarts = counter("replica_restarts_total", "Restarts after a crash", "model", "replica")
        self.replica_held = gauge("replica_held_tokens", "Tokens in flight at a replica", "model", "replica")
        self.replica_ready = gauge("replica_ready", "1 if the replica is ready", "model", "replica")
        self.worker_resident = gauge(
            "worker_resident_bytes", "Resident memory of a replica's worker", "model", "replica"
        )
        self.worker_device = gauge("worker_device_bytes", "GPU memory of a replica's worker", "model", "replica")
        self.version = gauge("model_info", "1 for the version in service", "model", "version")
        self._of_versions: dict[tuple[str, str], VersionCounts] = {}
        by_version = ("model", "version")
        self.version_items = counter("version_items_total", "Answered items", *by_version, "result")
        self.version_seconds = histogram(
            "version_seconds", "From submitting a request's items to their answers", SECONDS, *by_version
        )
        self.version_scores = gauge("version_score_sum", "Sum of the scores of all scored items", *by_version)
        # Counted by any thread.
        self.gc_seconds = of_process("gc_pause_seconds", "Pauses of the garbage collector")
        self.loop_lag = of_process("loop_lag_seconds", "Delay of the event loop")
        self.log_failures = Counter(
            "plaudit_log_failures_total", "Log lines that could not be written", registry=self.registry
        )
        self.history = History()
        self._collecting = 0.0

    def text(self) -> bytes:
        return generate_latest(self.registry)

    def of_version(self, model: str, version: str) -> VersionCounts:
        if (counts := self._of_versions.get((model, version))) is None:
            counts = self._of_versions[model, version] = VersionCounts(self, model, version)
        return counts

    def forget(self, model: str, version: str) -> None:
        """Remove the metrics of a closed version: a trainer may swap thousands of times."""
        if self._of_versions.pop((model, version), None) is not None:
            for result in RESULTS:
                self.version_items.remove(model, version, result)
            self.version_seconds.remove(model, version)
            self.version_scores.remove(model, version)

    def watch_gc(self) -> None:
        def seen(phase: str, _: dict[str, int]) -> None:
            if phase == "start":
                self._collecting = time.perf_counter()
            else:
                self.gc_seconds.observe(time.perf_counter() - self._collecting)

        gc.callbacks.append(seen)


class CriticGauges:
    """Additional metrics of `plaudit critic`."""

    def __init__(self, registry: CollectorRegistry) -> None:
        self.updates = Gauge("plaudit_critic_updates", "Updates of the critic", registry=registry)
        self.loss = Gauge("plaudit_critic_loss", "Value loss of the critic's last update", registry=registry)


class VersionCounts:
    """Counts of one version's answers, to compare a canary with the main version."""

    def __init__(self, metrics: Metrics, model: str, version: str) -> None:
        self._scored, self._failed = (metrics.version_items.labels(model, version, result) for result in RESULTS)
        self._seconds = metrics.version_seconds.labels(model, version)
        self._sum = metrics.version_scores.labels(model, version)

    def count(self, scored: int, failed: int, seconds: float, scores: float = 0.0) -> None:
        """Count the answers of one request."""
        self._scored.inc(scored)
        self._failed.inc(failed)
        self._seconds.observe(seconds)
        self._sum.inc(scores)


@dataclass
class ModelCounts:
    """Running sums of one model, for the live page."""

    items: int = 0
    failed: int = 0
    tokens: int = 0
    computed: int = 0
    prefix: int = 0
    deduplicated: int = 0
    cached: int = 0
    steps: int = 0
    scores: deque[float] = field(default_factory=lambda: deque(maxlen=SCORES_KEPT))

    def histogram(self, bins: int = 30) -> dict[str, list[float]]:
        if not self.scores:
            return {"edges": [], "counts": []}
        counts, edges = np.histogram(np.array(self.scores), bins=bins)
        return {"edges": [round(float(e), 6) for e in edges], "counts": [int(c) for c in counts]}


class History:
    """One entry per second of the last minutes, and the last errors."""

    def __init__(self) -> None:
        self.models: defaultdict[str, ModelCounts] = defaultdict(ModelCounts)
        self.seconds: deque[dict[str, float]] = deque(maxlen=HISTORY_SECONDS)
        self.errors: deque[tuple[str, dict[str, Any]]] = deque(maxlen=50)
        self.requests = 0
        self.latencies: deque[float] = deque(maxlen=LATENCIES_KEPT)
        self._before: tuple[int, int, int, int, int] = (0, 0, 0, 0, 0)

    def model(self, name: str) -> ModelCounts:
        return self.models[name]

    def error(self, type: str, message: str, model: str, request_id: str, tenant: str) -> None:
        error = {"time": time.time(), "type": type, "message": message[:300], "model": model, "request_id": request_id}
        self.errors.append((tenant, error))

    def errors_of(self, tenant: str | None) -> list[dict[str, Any]]:
        """Errors, newest first; of all keys if None: messages quote requests, so only the admin sees those of
        others."""
        return [error for whose, error in reversed(self.errors) if tenant in (None, whose)]

    def tick(self, queue_tokens: int, budget: int) -> None:
        """Called every second."""
        counts = self.models.values()
        now = (
            sum(m.items for m in counts), sum(m.tokens for m in counts), sum(m.computed for m in counts),
            sum(m.prefix + m.cached + m.deduplicated for m in counts), sum(m.steps for m in counts),
        )  # fmt: skip
        items, tokens, computed, saved, steps = (new - old for new, old in zip(now, self._before, strict=True))
        self._before = now
        latencies, requests = list(self.latencies), self.requests
        self.latencies.clear()
        self.requests = 0
        p50, p99 = (float(np.percentile(latencies, p)) * 1000 if latencies else 0.0 for p in (50, 99))
        self.seconds.append(
            {
                "time": round(time.time(), 1), "requests": requests, "items": items, "tokens": tokens,
                "p50_ms": round(p50, 2), "p99_ms": round(p99, 2), "queue_tokens": queue_tokens,
                "batch_fill": round(computed / (steps * budget), 4) if steps and budget else 0.0,
                "saved_share": round(saved / (saved + computed), 4) if saved + computed > 0 else 0.0,
            }
        )  # fmt: skip
