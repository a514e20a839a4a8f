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
    """The spans of one trace by name, as soon as there are `count`: the SDK's exporter prints them one by one."""
    end = time.monotonic() + 60
    while True:
        matching = [span for span in printed(server.log()) if span["context"]["trace_id"] == trace]
        if len(matching) >= count:
            assert len(matching) == count, [span["name"] for span in matching]
            return {span["name"]: span for span in matching}
        assert time.monotonic() < end, server.log()
        time.sleep(0.05)


def printed(text: str) -> list[dict[str, Any]]:
    parsed, position, decoder = [], 0, json.JSONDecoder()
    while (position := text.find('{\n    "name"', position)) >= 0:
        try:
            span, position = decoder.raw_decode(text, position)
        except ValueError:
            break  # still being written
        parsed.append(span)
    return parsed


def test_a_request_span_has_its_callers_parent_and_queue_batch_and_worker_spans(server: ServerProcess) -> None:
    items = [KNOWN, {"prompt": "1+2+3=", "responses": ["1+2=3;3+3=6;#6", "#7"]}]
    reply = server.http.post(
        "/v1/rewards", json={"model": "sums", "items": items}, headers={"traceparent": f"{PARENT}-01"}
    )
    assert reply.status_code == 200
    by_name = spans(server, TRACE, 5)
    request, batch = by_name["POST /v1/rewards"], by_name["batch"]
    assert request["parent_id"] == f"0x{PARENT.split('-')[2]}"
    assert request["kind"] == "SpanKind.SERVER"
    assert request["resource"]["attributes"]["service.name"] == "rewards"
    usage = reply.json()["usage"]
    expected = {
        "http.response.status_code": 200, "http.route": "/v1/rewards", "plaudit.model": "sums",
        "plaudit.items": usage["items"], "plaudit.tokens": usage["tokens"], "plaudit.protocol": "native",
        "plaudit.request_id": reply.headers["x-request-id"],
    }  # fmt: skip
    assert expected.items() <= request["attributes"].items()
    parents = {name: span["parent_id"] for name, span in by_name.items() if span is not request}
    own = request["context"]["span_id"]
    assert parents == {"prepare": own, "queue": own, "batch": own, "worker": batch["context"]["span_id"]}
    assert batch["attributes"]["plaudit.version"] == reply.json()["version"]
    assert batch["attributes"]["plaudit.batch.items"] == batch["attributes"]["plaudit.items"] == usage["items"]
    order = [
        request["start_time"],
        by_name["queue"]["start_time"],
        batch["start_time"],
        by_name["worker"]["start_time"],
    ]
    assert order == sorted(order)
    assert by_name["queue"]["end_time"] <= batch["end_time"] == by_name["worker"]["end_time"] <= request["end_time"]
    assert "7+8" not in json.dumps(list(by_name.values()))


def test_an_error_span_has_its_type_and_unsampled_requests_and_probes_have_no_span(server: ServerProcess) -> None:
    parent, other = PARENT.replace("4736", "4737"), TRACE.replace("4736", "4737")
    unsampled = {"traceparent": f"{PARENT.replace('4736', '4738')}-00"}
    assert server.http.post("/v1/rewards", json={"items": [KNOWN]}, headers=unsampled).status_code == 200
    assert server.http.get("/health/ready", headers={"traceparent": f"{parent}-01"}).status_code == 200
    reply = server.http.post("/v1/rewards", content=b"{", headers={"traceparent": f"{parent}-01"})
    assert reply.status_code == 400
    (span,) = spans(server, other, 1).values()
    assert span["attributes"]["error.type"] == "invalid_json"
    assert span["status"]["status_code"] == "UNSET"  # it was a client error
    assert not [each for each in printed(server.log()) if each["context"]["trace_id"].endswith("4738")]


def test_worker_memory_is_a_metric(server: ServerProcess) -> None:
    (worker,) = server.workers()
    end = time.monotonic() + 60
    while not (resident := server.metric("plaudit_worker_resident_bytes", model="sums", replica="0")):
        assert time.monotonic() < end
        time.sleep(0.1)
    assert 0.5 < resident / worker.memory_info().rss < 2
    assert 'plaudit_worker_device_bytes{model="sums",replica="0"} 0.0' in server.http.get("/metrics").text


def test_opentelemetry_is_imported_only_if_its_variables_are_set() -> None:
    """No module of the server imports opentelemetry at import time."""
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
