"""Triton's and NeMo-Aligner's own clients."""

from __future__ import annotations

import pytest

from plaudit.serve.grpc.messages import SCHEMA
from tests.interop.conftest import Chains
from tests.interop.environments import run_client
from tests.serve.process import ServerProcess

pytestmark = pytest.mark.interop


def test_tritonclient(server: ServerProcess, answers: Chains) -> None:
    found = run_client(".venv-interop", "triton_http", {"url": server.url, "rows": answers.rows, "texts": answers.open})
    assert all(found[name] for name in ("live", "ready", "model_ready", "version_ready"))
    assert found["unknown_ready"] is False
    assert "binary_tensor_data" in found["server"]["extensions"]
    assert [i["name"] for i in found["metadata"]["inputs"]] == ["sentences", "tokens", "sequence_lengths", "add_EOS"]
    assert found["config"]["name"] == "reward_model"
    assert {"sums", "reward_model"} <= {entry["name"] for entry in found["index"]}
    assert set(found["infer"]) == {"binary=True", "binary=False", "version", "gzip", "deflate", "async"}
    for way, rewards in found["infer"].items():
        assert rewards == pytest.approx(answers.scores, abs=5e-5), way
    for way, rewards in found["sentences"].items():
        assert rewards == pytest.approx(answers.open_scores, abs=5e-5), way
    assert found["exceeded"] == [[0]] * len(answers.open)
    assert found["long"] == [[1]]
    assert found["id"] == "mine"
    refused = found["refused"]
    assert refused["unknown"]["status"] == "404"
    assert refused["missing"] == {"status": "400", "message": refused["missing"]["message"]}
    assert "sequence_lengths" in refused["missing"]["message"]
    assert "999" in refused["vocabulary"]["message"]
    assert "'values'" in refused["output"]["message"]
    (statistics,) = found["statistics"]["model_stats"]
    assert statistics["inference_stats"]["success"]["count"] > 0


def test_nemo_aligner(server: ServerProcess, answers: Chains) -> None:
    found = run_client(
        ".venv-pytriton", "nemo_aligner", {"url": server.url, "rows": answers.rows, "texts": answers.open}
    )
    assert found["inputs"] == ["sentences", "tokens", "sequence_lengths", "add_EOS"]
    assert found["outputs"] == ["rewards", "exceeded"]
    assert found["max_batch_size"] == 4096
    assert (found["shape"], found["dtype"]) == ([40, 1], "float32")
    assert found["batch"] == found["rollout"] == pytest.approx(answers.scores, abs=5e-5)
    assert found["sample"] == pytest.approx(answers.scores[:1], abs=5e-5)
    assert "999" in found["refused"]
    assert found["sentences"] == pytest.approx(answers.open_scores * 8, abs=5e-5)
    assert found["exceeded"] == [0] * 320


def test_grpc(server: ServerProcess, answers: Chains) -> None:
    """tritonclient.grpc and PyTriton's client; and the numbers of our messages are those of Triton's own files."""
    (port,) = [event["port"] for event in server.events() if event["event"] == "grpc"]
    schema = {message: dict(numbered(fields)) for message, fields in SCHEMA.items()}
    given = {"place": f"127.0.0.1:{port}", "rows": answers.rows, "texts": answers.open, "schema": schema}
    found = run_client(".venv-pytriton", "triton_grpc", given)
    assert found["differences"] == []
    assert all(found[name] for name in ("live", "ready", "model_ready"))
    assert found["unknown_ready"] is False
    assert found["server"]["name"] == "plaudit"
    assert [i["name"] for i in found["metadata"]["inputs"]] == ["sentences", "tokens", "sequence_lengths", "add_EOS"]
    assert found["config"]["output"][0]["data_type"] == "TYPE_FP32"
    assert {"sums", "reward_model"} <= {entry["name"] for entry in found["index"]["models"]}
    for way in ("infer", "version", "gzip", "pytriton"):
        assert found[way] == pytest.approx(answers.scores, abs=5e-5), way
    assert found["sentences"] == pytest.approx(answers.open_scores, abs=5e-5)
    assert found["id"] == "mine"
    assert found["unknown"]["status"] == "StatusCode.NOT_FOUND"
    assert found["missing"]["status"] == "StatusCode.INVALID_ARGUMENT"
    assert "sequence_lengths" in found["missing"]["message"]
    assert int(found["statistics"]["model_stats"][0]["inference_count"]) > 0


def numbered(fields: str) -> list[tuple[str, int]]:
    return [(field.partition(":")[0], int(field.rpartition("=")[2])) for field in fields.split()]
