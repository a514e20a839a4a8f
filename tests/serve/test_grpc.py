"""KServe v2 over gRPC against a real server: the scores, keys, limits, deadlines and errors of HTTP, and TLS."""

from __future__ import annotations

import base64
import importlib.util
import json
import struct
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from cryptography.x509.oid import ExtendedKeyUsageOID

from plaudit.client.client import RewardClient
from plaudit.errors import RequestRefused
from plaudit.models import load_tokenizer
from tests.command import plaudit_here

from .process import ServerProcess
from .test_native import chains
from .test_tls import RULE, Authority

if importlib.util.find_spec("grpc") is None:
    pytest.skip("grpcio is not installed: pip install 'plaudit[grpc]'", allow_module_level=True)

KEY, OTHER = "key-of-ann-0001", "key-of-bob-0002"
LET_IN = {"authorization": f"Bearer {KEY}"}
CLIENT, REWARDS = (Path(__file__).with_name(name) for name in ("grpc_client.py", "grpc_rewards.py"))


def port_of(server: ServerProcess) -> int:
    end = time.monotonic() + 240
    while time.monotonic() < end:
        for event in server.events():
            if event["event"] == "grpc":
                return int(event["port"])
        assert server.process.poll() is None, server.log()
        time.sleep(0.1)
    raise AssertionError(f"no gRPC:\n{server.log()}")


def run_client(port: int, *calls: dict[str, Any], **tls: str) -> list[Any]:
    request = json.dumps({"port": port, "calls": calls, **tls})
    result = subprocess.run([sys.executable, str(CLIENT)], input=request, capture_output=True, text=True, timeout=240)
    assert result.returncode == 0, result.stderr[-3000:]
    return list(json.loads(result.stdout))


def rewards_of(port: int, items: list[Any], key: str | None, **tls: str) -> dict[str, Any]:
    request = json.dumps({"port": port, "items": items, "key": key, **tls})
    result = subprocess.run([sys.executable, str(REWARDS)], input=request, capture_output=True, text=True, timeout=280)
    assert result.returncode == 0, result.stderr[-3000:]
    return dict(json.loads(result.stdout))


@pytest.fixture(scope="module")
def server() -> Iterator[ServerProcess]:
    tree = {
        "models": {"sums": {"path": "sums"}}, "api_keys": {"ann": KEY, "bob": OTHER}, "grpc_port": 0,
        "limits": {"body_bytes": 200_000},
    }  # fmt: skip
    with ServerProcess(tree) as running:
        running.http.headers["authorization"] = f"Bearer {KEY}"
        yield running


def rows_request(rows: list[list[int]], *, raw: bool, name: str = "sums") -> dict[str, Any]:
    columns = max(map(len, rows)) + 2
    padded = [token for row in rows for token in [*row, *[0] * (columns - len(row))]]
    lengths = [len(row) for row in rows]
    inputs: list[dict[str, Any]] = [
        {"name": "tokens", "datatype": "INT64", "shape": [len(rows), columns]},
        {"name": "sequence_lengths", "datatype": "INT64", "shape": [len(rows), 1]},
    ]
    fields: dict[str, Any] = {"modelName": name, "id": "mine", "inputs": inputs, "outputs": [{"name": "rewards"}]}
    if raw:
        packed = [struct.pack(f"<{len(values)}q", *values) for values in (padded, lengths)]
        fields["rawInputContents"] = [base64.b64encode(data).decode() for data in packed]
    else:
        for entry, values in zip(inputs, (padded, lengths), strict=True):
            entry["contents"] = {"int64Contents": values}
    return fields


def infer(fields: dict[str, Any], **more: Any) -> dict[str, Any]:
    return {"method": "ModelInfer", "fields": fields, "metadata": LET_IN, **more}


def floats(answer: dict[str, Any]) -> list[float]:
    (data,) = map(bytes.fromhex, answer["raw_output_contents"])
    return list(struct.unpack(f"<{len(data) // 4}f", data))


def test_scores_metadata_and_errors_equal_those_of_http(server: ServerProcess) -> None:
    tokenizer = load_tokenizer("sums")
    rows = [[*tokenizer.encode(prompt + response), tokenizer.eos_token_id] for prompt, response in chains(6)]
    items = server.rewards([{"tokens": row} for row in rows]).json()["items"]
    scores = [item["scores"][0] for item in items]
    sentences = {
        "modelName": "sums", "outputs": [{"name": "rewards"}],
        "inputs": [{
            "name": "sentences", "datatype": "BYTES", "shape": [1, 1],
            "contents": {"bytesContents": [base64.b64encode(b"7+8+4=7+8=15;15+4=19;#19").decode()]},
        }],
    }  # fmt: skip
    late = rows_request(rows, raw=True)
    many = rows_request([[5] * 400] * 100, raw=True)
    named = {"fields": {"name": "sums"}, "metadata": LET_IN}
    responses = run_client(
        port_of(server),
        {"method": "ServerLive"}, {"method": "ServerReady"}, {"method": "ModelReady", "fields": {"name": "sums"}},
        {"method": "ModelReady", "fields": {"name": "nobody"}, "metadata": LET_IN},
        {"method": "ModelMetadata", **named}, {"method": "ModelConfig", **named},
        {"method": "ModelStatistics", **named}, {"method": "RepositoryIndex", "metadata": LET_IN},
        {"method": "ServerMetadata", "metadata": LET_IN},
        infer(rows_request(rows, raw=True)), infer(rows_request(rows, raw=False)), infer(sentences),
        infer(late, metadata={}), infer(late, metadata={"authorization": "Bearer wrong-key"}),
        infer(rows_request(rows, raw=True, name="nobody")), infer({"modelName": "sums"}),
        infer({**late, "rawInputContents": late["rawInputContents"][:1]}), infer(many),
        infer(late, metadata={**LET_IN, "x-deadline": "0"}),
    )  # fmt: skip
    live, ready, model_ready, unknown_ready, metadata, config, statistics, index, server_metadata, *inferred = responses
    assert (live, ready, model_ready, unknown_ready) == ({"live": True}, {"ready": True}, {"ready": True}, {})
    assert [entry.split('"')[1] for entry in metadata["inputs"]] == [
        "sentences", "tokens", "sequence_lengths", "add_EOS",
    ]  # fmt: skip
    assert "max_batch_size: 4096" in config["config"]
    assert "data_type: 11" in config["config"]
    assert 'name: "sums"' in statistics["model_stats"][0]
    assert any('name: "sums"' in entry and 'state: "READY"' in entry for entry in index["models"])
    assert server_metadata["name"] == "plaudit"
    raw, typed, text, no_key, wrong, unknown, empty, short, large, expired = inferred
    assert floats(raw) == floats(typed) == pytest.approx(scores, abs=5e-5)
    assert (raw["id"], raw["model_name"], raw["model_version"]) == ("mine", "sums", "1")
    assert len(floats(text)) == 1
    assert (no_key["status"], wrong["status"]) == ("UNAUTHENTICATED", "UNAUTHENTICATED")
    assert unknown["status"] == "NOT_FOUND"
    assert "unknown model" in unknown["message"]
    assert empty["status"] == "INVALID_ARGUMENT"
    assert short == {
        "status": "INVALID_ARGUMENT", "trailing": {},
        "message": "raw_input_contents has 1 tensors; expected one for each of 2 inputs",
    }  # fmt: skip
    assert large["status"] == "RESOURCE_EXHAUSTED"  # gRPC's status for the limit of 200 kB
    assert expired["status"] == "DEADLINE_EXCEEDED"
    assert "the deadline expired" in expired["message"]
    assert server.metric("plaudit_requests_total", protocol="triton", status="200", key="ann") >= 3


@pytest.mark.slow
def test_the_reward_client_gives_the_same_results_over_grpc_and_http(server: ServerProcess) -> None:
    items = [{"prompt": "7+8+4=", "responses": ["7+8=15;15+4=19;#19", "7+8=15;15+4=18;#18"]}, {"tokens": [10**9]}]
    results = rewards_of(port_of(server), items, KEY)
    with RewardClient(server.url, api_key=KEY) as client:
        http = client.score(items)
        assert results["scores"] == [[each.value, each.version, each.error and each.error.type] for each in http]
        with pytest.raises(RequestRefused, match="not_a_process_model") as refused:
            client.score(items, steps=True)
    assert results["other"] == results["scores"]  # by the second of two servers
    port = f"grpc://localhost:{port_of(server)}"
    assert results["steps"] == ["RequestRefused", 422, str(refused.value).replace(server.url, port)]
    errors = {name: results[name][:2] for name in ("unknown", "stranger", "large", "nowhere")}
    assert errors == {
        "unknown": ["RequestRefused", 404], "stranger": ["RequestRefused", 401], "large": ["RequestRefused", 413],
        "nowhere": ["RewardUnavailable", None],
    }  # fmt: skip
    assert "did you mean 'sums'" in results["unknown"][2]
    assert "after 2 attempt(s)" in results["nowhere"][2]
    assert results["busy"] == [[1.5, "v", None]]
    assert len(results["heard"]) == 1
    assert "answered 503 (overloaded: too much waits)" in results["heard"][0]
    assert results["modules"] == []


@pytest.mark.slow
def test_mutual_tls_requires_a_trusted_client_certificate(tmp_path: Path) -> None:
    ours, others = Authority(tmp_path, "ours"), Authority(tmp_path, "others")
    cert, key = ours.give("server", ExtendedKeyUsageOID.SERVER_AUTH)
    client, untrusted = (
        [str(file) for file in authority.give(name, ExtendedKeyUsageOID.CLIENT_AUTH)]
        for authority, name in ((ours, "client"), (others, "stranger"))
    )
    tls = {"tls_cert": str(cert), "tls_key": str(key), "tls_ca": str(ours.file)}
    with ServerProcess({**RULE, **tls, "grpc_port": 0}, wait=False) as server:
        port, call = port_of(server), {"method": "ServerLive"}
        ca = str(ours.file)
        assert run_client(port, call, ca=ca, cert=client[0], key=client[1]) == [{"live": True}]
        (refused,) = run_client(port, {**call, "wait": False}, ca=ca, cert=untrusted[0], key=untrusted[1])
        assert refused["status"] == "UNAVAILABLE"
        (plain,) = run_client(port, {**call, "wait": False})
        assert plain["status"] == "UNAVAILABLE"
        (tmp_path / "both.pem").write_bytes(b"".join(Path(file).read_bytes() for file in client))
        files = {"ca": ca, "cert": str(tmp_path / "both.pem"), "others": str(others.file)}
        results = rewards_of(port, [{"prompt": "1+2=", "responses": ["#12"]}], None, **files)
        assert [value for value, *_ in results["scores"]] == [1.0]
        kind, _, message = results["untrusted"]
        assert kind == "RewardUnavailable"
        assert "certificate that is not trusted" in message


def test_a_grpc_port_without_its_protocol_is_rejected(server: ServerProcess) -> None:
    result = plaudit_here("serve", "--model", "sums", "--port", "0", "--grpc-port", "1", "--protocols", "vllm")
    assert result.returncode == 2
    assert "which protocols does not list" in result.stdout + result.stderr


def test_a_caller_without_a_key_is_refused_before_its_message_is_read(server: ServerProcess) -> None:
    """Neither a message that is no protobuf nor one above the limit makes a difference."""
    raw = [{"method": name, "body": body, "metadata": {}} for body in ("ff" * 100, "61" * 10_000_000)
           for name in ("ModelInfer", "ModelMetadata", "RepositoryIndex")]  # fmt: skip
    for answer in run_client(port_of(server), *raw):
        assert answer["status"] == "UNAUTHENTICATED", answer
    bodies = ("ff" * 100, "61" * 1_000_000)
    unreadable, large = run_client(
        port_of(server), *({"method": "ModelInfer", "body": body, "metadata": LET_IN} for body in bodies)
    )
    assert (unreadable["status"], large["status"]) == ("INVALID_ARGUMENT", "RESOURCE_EXHAUSTED")
    assert unreadable["message"] == "the message is not a ModelInferRequest"


def test_a_message_with_more_than_raw_tensors_is_read_in_another_process(server: ServerProcess) -> None:
    tokens = [5] * 900
    typed = rows_request([tokens] * 80, raw=False)  # 72,000 numbers
    padding = {"modelName": "sums", "inputs": [{"name": "x"}] * 30_000}
    scored, padded = run_client(port_of(server), infer(typed), infer(padding))
    assert scored["status"] == "INVALID_ARGUMENT", scored
    assert "tokens" in scored["message"]
    assert padded["status"] == "INVALID_ARGUMENT"
