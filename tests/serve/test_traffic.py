"""The server's traffic records: request logs and metrics by key, model, protocol and status."""

from __future__ import annotations

import json
import re
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest

import plaudit

from .hostile import KNOWN
from .process import ServerProcess

ANN, BOB = "key-of-ann-1234", "key-of-bob-5678"
REQUESTS, SECONDS = "plaudit_requests_total", "plaudit_request_seconds_count"
RULE = {"kind": "rule", "rule": "regex", "pattern": "#12$"}


@pytest.fixture(scope="module")
def server() -> Iterator[ServerProcess]:
    tree = {"models": {"sums": {"path": "sums", "threads": 1}, "rule": RULE}, "api_keys": {"ann": ANN, "bob": BOB}}
    with ServerProcess(tree, "--log", "requests") as server:
        server.http.headers["authorization"] = f"Bearer {ANN}"
        yield server


def logged(server: ServerProcess, reply: httpx.Response) -> dict[str, Any]:
    """The log line of this request."""
    end = time.monotonic() + 60
    while time.monotonic() < end:
        for event in server.events():
            if event["event"] == "request" and event["request_id"] == reply.headers["x-request-id"]:
                return event
        time.sleep(0.05)
    raise AssertionError(f"no line of {reply.headers['x-request-id']}")


def test_a_log_line_has_the_key_the_model_the_usage_and_the_duration(server: ServerProcess) -> None:
    reply = server.rewards([KNOWN, {"prompt": "3+4+5=", "responses": ["#12", ""]}, {"tokens": [10**9]}])
    usage = reply.json()["usage"]
    line = logged(server, reply)
    assert line.pop("time") > 0
    assert line.pop("ms") > 0
    assert line == {
        "event": "request", "request_id": reply.headers["x-request-id"], "method": "POST", "path": "/v1/rewards",
        "protocol": "native", "status": 200, "tenant": "ann", "model": "sums", "items": usage["items"], "failed": 1,
        "tokens": usage["tokens"], "error": None,
    }  # fmt: skip
    infer = {"inputs": [{"name": "sentences", "shape": [1, 1], "datatype": "BYTES", "data": ["3+4+5=#12"]}]}
    bob = {"authorization": f"Bearer {BOB}"}
    line = logged(server, server.http.post("/v2/models/sums/infer", json=infer, headers=bob))
    assert (line["protocol"], line["tenant"], line["model"], line["items"]) == ("triton", "bob", "sums", 1)
    assert line["tokens"] > 0


@pytest.mark.parametrize(
    ("body", "status", "error", "model"),
    [
        (b"{", 400, "invalid_json", ""),
        (b'{"items": [{"text": "a"}], "model": "nobody"}', 404, "unknown_model", ""),
        (b'{"items": [{"text": "a"}], "model": "rule", "steps": true}', 422, "not_a_process_model", "rule"),
    ],
)
def test_a_log_line_has_the_error_type(
    server: ServerProcess, body: bytes, status: int, error: str, model: str
) -> None:  # fmt: skip
    labels = {"protocol": "native", "status": str(status), "model": model, "key": "ann"}
    before = server.metric(REQUESTS, **labels)
    reply = server.http.post("/v1/rewards", content=body, headers={"content-type": "application/json"})
    line = logged(server, reply)
    assert (line["status"], line["error"], line["items"]) == (status, error, 0)
    assert server.metric(REQUESTS, **labels) == before + 1


def test_requests_are_counted_by_model_protocol_status_and_key(server: ServerProcess) -> None:
    labels = {"model": "rule", "protocol": "native", "status": "200"}
    before = [server.metric(REQUESTS, key=key, **labels) for key in ("ann", "bob")]
    spans = server.metric(SECONDS, model="rule", protocol="native")
    tokens = server.metric("plaudit_key_tokens_total", key="ann", model="sums")
    for _ in range(3):
        assert server.rewards([KNOWN], "rule").status_code == 200
    assert [server.metric(REQUESTS, key=key, **labels) for key in ("ann", "bob")] == [before[0] + 3, before[1]]
    assert server.metric(SECONDS, model="rule", protocol="native") == spans + 3
    used = server.rewards([KNOWN]).json()["usage"]["tokens"]
    assert server.metric("plaudit_key_tokens_total", key="ann", model="sums") == tokens + used
    assert server.metric("plaudit_build_info", version=plaudit.__version__) == 1


def test_probes_and_pages_are_not_counted_as_requests(server: ServerProcess) -> None:
    """Nor are they logged: load balancers send one every second."""
    before = server.metric(REQUESTS)  # reading the metric is itself a request
    probes = server.metric("plaudit_probes_total", status="200")
    with httpx.Client(base_url=server.url, timeout=60) as client:
        for path in ("/health/live", "/health/ready", "/v2/health/ready", "/", "/openapi.json"):
            reply = client.get(path, headers={"x-request-id": f"probe{path}"})
            assert reply.status_code == 200
    assert server.metric("plaudit_probes_total", status="200") == probes + 5
    assert server.metric(REQUESTS) == before + 3
    logged(server, server.http.get("/v1/models"))
    assert "probe/" not in server.log()


def test_unauthorized_requests_are_counted_separately(server: ServerProcess) -> None:
    labels = {"status": "401", "key": "unknown", "model": ""}
    before = server.metric(REQUESTS, **labels)
    reply = server.http.post("/v1/rewards", json={}, headers={"authorization": "Bearer wrong-key"})
    assert logged(server, reply)["error"] == "unauthorized"
    assert server.metric(REQUESTS, **labels) == before + 1


def test_the_dashboard_queries_only_existing_metrics(server: ServerProcess) -> None:
    """By name, and with labels that the series have."""
    server.rewards([KNOWN])
    text = server.http.get("/metrics").text
    known = {name for name in re.findall(r"^# TYPE (\w+) ", text, re.M) if name.startswith(("plaudit_", "process_"))}
    known |= {f"{name}_bucket" for name, kind in re.findall(r"^# TYPE (\w+) (\w+)", text, re.M) if kind == "histogram"}
    panels = json.loads((Path(__file__).parents[2] / "deploy" / "grafana.json").read_text())["panels"]
    expressions = [target["expr"] for panel in panels for target in panel["targets"]]
    assert len(expressions) >= 14
    for expression in expressions:
        names = re.findall(r"\b(?:plaudit|process)_\w+", expression)
        assert names, expression
        assert set(names) <= known, expression
        series = re.findall(rf"^{names[0]}\{{(.*)\}} ", text, re.M)
        groupings = re.findall(r"by \(([^)]*)\)", expression)
        for label in {word.strip() for group in groupings for word in group.split(",")} if series else set():
            assert any(f'{label}="' in each for each in series), (expression, label)
