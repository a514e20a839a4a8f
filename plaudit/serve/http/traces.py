"""OpenTelemetry spans of requests, enabled by the environment (`OTEL_*`); otherwise nothing is imported.

    POST /v1/rewards     the request, child of the span of its `traceparent`
      prepare            rendering and tokenising
      queue              until its last item was sent to a worker
      batch              the items sent to a worker in one batch, until the last was answered
        worker           time in the worker process, until the answer was sent

Spans are created at the end from recorded timestamps, so the request path itself contains no OpenTelemetry code and
an unsampled request costs only the sampling decision.
"""

from __future__ import annotations

import logging
import os
import time
from collections.abc import Iterable, Mapping
from contextvars import ContextVar
from dataclasses import dataclass
from importlib.metadata import entry_points
from typing import TYPE_CHECKING, Any

from plaudit import __version__
from plaudit.errors import ConfigError
from plaudit.serve.http.message import Request
from plaudit.serve.logs import Log

if TYPE_CHECKING:
    from opentelemetry.sdk.trace.export import SpanExporter

ENDPOINTS = ("OTEL_EXPORTER_OTLP_TRACES_ENDPOINT", "OTEL_EXPORTER_OTLP_ENDPOINT")
PROTOCOLS = ("OTEL_EXPORTER_OTLP_TRACES_PROTOCOL", "OTEL_EXPORTER_OTLP_PROTOCOL")
OTLP = {"http/protobuf": "otlp_proto_http", "grpc": "otlp_proto_grpc"}
INSTALL = "pip install 'plaudit[otel]'"
NANOSECONDS = 1_000_000_000


@dataclass(eq=False, slots=True)
class Batch:
    """A batch sent to a worker. Times are nanoseconds since 1970."""

    sent: int
    replica: int
    items: int
    tokens: int


@dataclass(eq=False, slots=True)
class JobTimes:
    """Timestamps of one work: arrival, last batch, answer, and the time spent in the worker."""

    queued: int
    batch: Batch | None = None
    answered: int = 0
    worker_seconds: float = 0.0

    def answer(self) -> None:
        self.answered = time.time_ns()


TRACE: ContextVar[Trace | None] = ContextVar("TRACE", default=None)
"""The trace of the request this task works for; None: it is not traced."""


class Traces:
    """exporters  destinations of the spans"""

    def __init__(self, exporters: Iterable[SpanExporter], log: Log) -> None:
        from opentelemetry import propagate, trace
        from opentelemetry.sdk.resources import Resource
        from opentelemetry.sdk.trace import TracerProvider
        from opentelemetry.sdk.trace.export import BatchSpanProcessor

        named = "OTEL_SERVICE_NAME" in os.environ or "service.name=" in os.environ.get("OTEL_RESOURCE_ATTRIBUTES", "")
        self._provider = TracerProvider(resource=Resource.create({} if named else {"service.name": "plaudit"}))
        for exporter in exporters:
            self._provider.add_span_processor(BatchSpanProcessor(exporter))
        self.tracer = self._provider.get_tracer("plaudit.serve", __version__)
        self.api = trace
        self._extract = propagate.extract
        logger = logging.getLogger("opentelemetry")  # an unreachable collector is logged through our log
        logger.addHandler(_LogHandler(log))
        logger.propagate = False

    def begin(self, request: Request) -> Trace | None:
        """Starts the span of a request; None if it is not sampled. It is named after the route, which must be
        resolved."""
        assert request.route is not None
        carried = {name.decode("latin-1"): value.decode("latin-1") for name, value in request.headers.items()}
        span = self.tracer.start_span(
            f"{request.method} {request.route.path}", self._extract(carried), self.api.SpanKind.SERVER,
            {
                "http.request.method": request.method, "http.route": request.route.path, "url.path": request.path,
                "url.scheme": request.scheme, "plaudit.request_id": request.id,
            },
        )  # fmt: skip
        return Trace(self, span) if span.is_recording() else None

    def close(self) -> None:
        """Export the remaining spans."""
        self._provider.shutdown()


class Trace:
    """The spans of one request."""

    def __init__(self, traces: Traces, span: Any) -> None:
        self._traces = traces
        self._span = span
        self._below = traces.api.set_span_in_context(span)

    def end(self, request: Request, status: int | None) -> None:
        """`status` None: the client disconnected first."""
        assert request.route is not None
        facts = {
            "plaudit.protocol": request.route.protocol, "plaudit.key": request.tenant, "plaudit.model": request.model,
            "plaudit.items": request.items, "plaudit.failed": request.failed, "plaudit.tokens": request.tokens,
        }  # fmt: skip
        error = request.error or ("disconnected" if status is None else None)
        if status is not None:
            facts["http.response.status_code"] = status
        if error is not None:
            facts["error.type"] = error
        self._span.set_attributes(facts)
        if status is None or status >= 500:  # client errors are not errors of a server span
            self._span.set_status(self._traces.api.StatusCode.ERROR, error)
        self._span.end()

    def prepared(self, seconds: float) -> None:
        now = time.time_ns()
        self._add("prepare", now - int(seconds * NANOSECONDS), now, {})

    def computed(self, model: str, version: str, works: Iterable[JobTimes | None]) -> None:
        """Adds spans of works that were answered or cancelled."""
        times = [each for each in works if each is not None]
        if not times:
            return
        facts = {"plaudit.model": model, "plaudit.version": version}
        batches: dict[Batch, list[JobTimes]] = {}
        for each in times:
            if each.batch is not None:
                batches.setdefault(each.batch, []).append(each)
        now = time.time_ns()
        unsent = any(each.batch is None for each in times)
        sent = now if unsent else max(batch.sent for batch in batches)
        self._add("queue", min(each.queued for each in times), sent, {**facts, "plaudit.items": len(times)})
        for batch, members in batches.items():
            end = max(each.answered or now for each in members)
            more = {
                **facts, "plaudit.replica": batch.replica, "plaudit.items": len(members),
                "plaudit.batch.items": batch.items, "plaudit.batch.tokens": batch.tokens,
            }  # fmt: skip
            below = self._add("batch", batch.sent, end, more)
            if seconds := max(each.worker_seconds for each in members):
                self._add("worker", max(batch.sent, end - int(seconds * NANOSECONDS)), end, facts, below)

    def _add(self, name: str, begin: int, end: int, facts: Mapping[str, Any], parent: Any = None) -> Any:
        below = self._below if parent is None else self._traces.api.set_span_in_context(parent)
        span = self._traces.tracer.start_span(name, below, attributes=facts, start_time=begin)
        span.end(end)
        return span


class _LogHandler(logging.Handler):
    def __init__(self, log: Log) -> None:
        super().__init__(logging.WARNING)
        self._log = log

    def emit(self, record: logging.LogRecord) -> None:
        self._log("traces", level=record.levelname.lower(), message=record.getMessage()[:300])


def traces_of(environment: Mapping[str, str], log: Log) -> Traces | None:
    """Returns None unless a variable of OpenTelemetry names an exporter or an endpoint."""
    endpoint = any(environment.get(name) for name in ENDPOINTS)
    names = environment.get("OTEL_TRACES_EXPORTER", "otlp" if endpoint else "none")
    wanted = [name for word in names.split(",") if (name := word.strip()) not in ("", "none")]
    if not wanted or environment.get("OTEL_SDK_DISABLED", "").strip().lower() == "true":
        return None
    try:
        exporters = [_exporter(name, environment) for name in wanted]
        return Traces(exporters, log)
    except ImportError as error:
        raise ConfigError(
            f"the OTEL_* environment variables enable tracing, which needs a package ({error}): "
            f"{INSTALL}, or unset them"
        ) from error


def _exporter(name: str, environment: Mapping[str, str]) -> SpanExporter:
    registered = name
    if name == "otlp":
        protocol = next((environment[each] for each in PROTOCOLS if environment.get(each)), "http/protobuf")
        if protocol not in OTLP:
            raise ConfigError(f"{PROTOCOLS[1]} is {protocol!r}; expected one of {', '.join(OTLP)}")
        registered = OTLP[protocol]
    entry_point = next(iter(entry_points(group="opentelemetry_traces_exporter", name=registered)), None)
    if entry_point is None:
        raise ConfigError(f"OTEL_TRACES_EXPORTER is {name}, but {registered} is not installed: {INSTALL}")
    exporter: SpanExporter = entry_point.load()()
    return exporter
