"""OpenTelemetry spans: what a collector receives, the parent of each span, and that tracing is off unless requested."""

from __future__ import annotations

import ast
import json
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

import plaudit.serve
from plaudit.errors import ConfigError
from plaudit.serve.http.traces import traces_of
from plaudit.serve.logs import Log

from .hostile import KNOWN
from .process import ServerProcess

pytest.importorskip("opentelemetry.sdk")
PARENT = "00-4bf92f3577b34da6a3ce929d0e0e4736-00f067aa0ba902b7"
TRACE = f"0x{PARENT.split('-')[1]}"


@pytest.fixture(scope="module")
def server() -> Iterator[ServerProcess]:
    tree = {"models": {"sums": {"path": "sums", "threads": 1}}}
    variables = {"OTEL_TRACES_EXPORTER": "console", "OTEL_BSP_SCHEDULE_DELAY": "100", "OTEL_SERVICE_NAME": "rewards"}
    with ServerProcess(tree, environment=variables) as server:
        yield server


def spans(server: ServerProcess, trace: str, count: int) -> dict[str, dict[str, Any]]:
    """Of one trace, by name, as soon as there are so many: the SDK's own exporter prints them one after the other."""
    end = time.monotonic() + 60
    while True:
        found = [span for span in printed(server.log()) if span["context"]["trace_id"] == trace]
        if len(found) >= count:
            assert len(found) == count, [span["name"] for span in found]
            return {span["name"]: span for span in found}
        assert time.monotonic() < end, server.log()
        time.sleep(0.05)


def printed(text: str) -> list[dict[str, Any]]:
    found, at, decoder = [], 0, json.JSONDecoder()
    while (at := text.find('{\n    "name"', at)) >= 0:
        try:
            span, at = decoder.raw_decode(text, at)
        except ValueError:
            break  # it is being written
        found.append(span)
    return found


def test_a_request_is_below_its_callers_span_and_has_queue_batch_and_worker(server: ServerProcess) -> None:
    items = [KNOWN, {"prompt": "1+2+3=", "responses": ["1+2=3;3+3=6;#6", "#7"]}]
    reply = server.http.post(
        "/v1/rewards", json={"model": "sums", "items": items}, headers={"traceparent": f"{PARENT}-01"}
    )
    assert reply.status_code == 200
    found = spans(server, TRACE, 5)
    request, batch = found["POST /v1/rewards"], found["batch"]
    assert request["parent_id"] == f"0x{PARENT.split('-')[2]}"
    assert request["kind"] == "SpanKind.SERVER"
    assert request["resource"]["attributes"]["service.name"] == "rewards"
    usage = reply.json()["usage"]
    wanted = {
        "http.response.status_code": 200, "http.route": "/v1/rewards", "plaudit.model": "sums",
        "plaudit.items": usage["items"], "plaudit.tokens": usage["tokens"], "plaudit.protocol": "native",
        "plaudit.request_id": reply.headers["x-request-id"],
    }  # fmt: skip
    assert wanted.items() <= request["attributes"].items()
    parents = {name: span["parent_id"] for name, span in found.items() if span is not request}
    own = request["context"]["span_id"]
    assert parents == {"prepare": own, "queue": own, "batch": own, "worker": batch["context"]["span_id"]}
    assert batch["attributes"]["plaudit.version"] == reply.json()["version"]
    assert batch["attributes"]["plaudit.batch.items"] == batch["attributes"]["plaudit.items"] == usage["items"]
    order = [request["start_time"], found["queue"]["start_time"], batch["start_time"], found["worker"]["start_time"]]
    assert order == sorted(order)
    assert found["queue"]["end_time"] <= batch["end_time"] == found["worker"]["end_time"] <= request["end_time"]
    assert "7+8" not in json.dumps(list(found.values()))


def test_an_error_names_its_type_and_what_is_not_sampled_or_a_probe_has_no_span(server: ServerProcess) -> None:
    parent, other = PARENT.replace("4736", "4737"), TRACE.replace("4736", "4737")
    unsampled = {"traceparent": f"{PARENT.replace('4736', '4738')}-00"}
    assert server.http.post("/v1/rewards", json={"items": [KNOWN]}, headers=unsampled).status_code == 200
    assert server.http.get("/health/ready", headers={"traceparent": f"{parent}-01"}).status_code == 200
    reply = server.http.post("/v1/rewards", content=b"{", headers={"traceparent": f"{parent}-01"})
    assert reply.status_code == 400
    (span,) = spans(server, other, 1).values()
    assert span["attributes"]["error.type"] == "invalid_json"
    assert span["status"]["status_code"] == "UNSET"  # it was the client's
    assert not [each for each in printed(server.log()) if each["context"]["trace_id"].endswith("4738")]


def test_memory_of_workers_is_a_metric(server: ServerProcess) -> None:
    (worker,) = server.workers()
    end = time.monotonic() + 60
    while not (seen := server.metric("plaudit_worker_resident_bytes", model="sums", replica="0")):
        assert time.monotonic() < end
        time.sleep(0.1)
    assert 0.5 < seen / worker.memory_info().rss < 2
    assert 'plaudit_worker_device_bytes{model="sums",replica="0"} 0.0' in server.http.get("/metrics").text


def test_without_its_variables_nothing_is_imported() -> None:
    """No module of the server imports it when it is imported itself."""
    for file in Path(plaudit.serve.__file__).parent.rglob("*.py"):
        for node in ast.parse(file.read_text()).body:
            named = [node.module or ""] if isinstance(node, ast.ImportFrom) else []
            named += [name.name for name in node.names] if isinstance(node, ast.Import) else []
            assert not [name for name in named if name.startswith("opentelemetry")], file
    log = Log(lambda: None)
    for variables in (
        {},
        {"OTEL_TRACES_EXPORTER": "none"},
        {"OTEL_TRACES_EXPORTER": "console", "OTEL_SDK_DISABLED": "true"},
    ):
        assert traces_of(variables, log) is None
    with pytest.raises(ConfigError, match="nowhere is not installed"):
        traces_of({"OTEL_TRACES_EXPORTER": "nowhere"}, log)
    with pytest.raises(ConfigError, match="'json'; expected one of http/protobuf, grpc"):
        traces_of({"OTEL_EXPORTER_OTLP_ENDPOINT": "http://x", "OTEL_EXPORTER_OTLP_PROTOCOL": "json"}, log)
    log.close()
