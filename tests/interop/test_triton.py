"""Triton's and NeMo-Aligner's own clients."""

from __future__ import annotations

import pytest

from plaudit.serve.grpc.messages import SCHEMA
from tests.interop.conftest import Chains
from tests.interop.environments import run_client
from tests.serve.process import ServerProcess

pytestmark = pytest.mark.interop


def test_tritonclient(server: ServerProcess, answers: Chains) -> None:
    result = run_client(
        ".venv-interop", "triton_http", {"url": server.url, "rows": answers.rows, "texts": answers.open}
    )
    assert all(result[name] for name in ("live", "ready", "model_ready", "version_ready"))
    assert result["unknown_ready"] is False
    assert "binary_tensor_data" in result["server"]["extensions"]
    assert [i["name"] for i in result["metadata"]["inputs"]] == ["sentences", "tokens", "sequence_lengths", "add_EOS"]
    assert result["config"]["name"] == "reward_model"
    assert {"sums", "reward_model"} <= {entry["name"] for entry in result["index"]}
    assert set(result["infer"]) == {"binary=True", "binary=False", "version", "gzip", "deflate", "async"}
    for form, rewards in result["infer"].items():
        assert rewards == pytest.approx(answers.scores, abs=5e-5), form
    for form, rewards in result["sentences"].items():
        assert rewards == pytest.approx(answers.open_scores, abs=5e-5), form
    assert result["exceeded"] == [[0]] * len(answers.open)
    assert result["long"] == [[1]]
    assert result["id"] == "mine"
    refused = result["refused"]
    assert refused["unknown"]["status"] == "404"
    assert refused["missing"] == {"status": "400", "message": refused["missing"]["message"]}
    assert "sequence_lengths" in refused["missing"]["message"]
    assert "999" in refused["vocabulary"]["message"]
    assert "'values'" in refused["output"]["message"]
    (statistics,) = result["statistics"]["model_stats"]
    assert statistics["inference_stats"]["success"]["count"] > 0


def test_nemo_aligner(server: ServerProcess, answers: Chains) -> None:
    result = run_client(
        ".venv-pytriton", "nemo_aligner", {"url": server.url, "rows": answers.rows, "texts": answers.open}
    )
    assert result["inputs"] == ["sentences", "tokens", "sequence_lengths", "add_EOS"]
    assert result["outputs"] == ["rewards", "exceeded"]
    assert result["max_batch_size"] == 4096
    assert (result["shape"], result["dtype"]) == ([40, 1], "float32")
    assert result["batch"] == result["rollout"] == pytest.approx(answers.scores, abs=5e-5)
    assert result["sample"] == pytest.approx(answers.scores[:1], abs=5e-5)
    assert "999" in result["refused"]
    assert result["sentences"] == pytest.approx(answers.open_scores * 8, abs=5e-5)
    assert result["exceeded"] == [0] * 320


def test_grpc(server: ServerProcess, answers: Chains) -> None:
    """tritonclient.grpc and PyTriton's client; field numbers of our messages equal those in Triton's own files."""
    (port,) = [event["port"] for event in server.events() if event["event"] == "grpc"]
    schema = {message: dict(field_numbers(fields)) for message, fields in SCHEMA.items()}
    inputs = {"place": f"127.0.0.1:{port}", "rows": answers.rows, "texts": answers.open, "schema": schema}
    result = run_client(".venv-pytriton", "triton_grpc", inputs)
    assert result["differences"] == []
    assert all(result[name] for name in ("live", "ready", "model_ready"))
    assert result["unknown_ready"] is False
    assert result["server"]["name"] == "plaudit"
    assert [i["name"] for i in result["metadata"]["inputs"]] == ["sentences", "tokens", "sequence_lengths", "add_EOS"]
    assert result["config"]["output"][0]["data_type"] == "TYPE_FP32"
    assert {"sums", "reward_model"} <= {entry["name"] for entry in result["index"]["models"]}
    for form in ("infer", "version", "gzip", "pytriton"):
        assert result[form] == pytest.approx(answers.scores, abs=5e-5), form
    assert result["sentences"] == pytest.approx(answers.open_scores, abs=5e-5)
    assert result["id"] == "mine"
    assert result["unknown"]["status"] == "StatusCode.NOT_FOUND"
    assert result["missing"]["status"] == "StatusCode.INVALID_ARGUMENT"
    assert "sequence_lengths" in result["missing"]["message"]
    assert int(result["statistics"]["model_stats"][0]["inference_count"]) > 0


def field_numbers(fields: str) -> list[tuple[str, int]]:
    return [(field.partition(":")[0], int(field.rpartition("=")[2])) for field in fields.split()]
