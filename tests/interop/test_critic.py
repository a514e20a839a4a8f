"""Triton's and NeMo-Aligner's own clients, training a critic."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from plaudit.models import load_tokenizer, load_value
from tests.interop.environments import run_client
from tests.serve.critic_process import CriticProcess
from tests.serve.test_native import chains

pytestmark = pytest.mark.interop
END = 2


@pytest.fixture
def server() -> Iterator[CriticProcess]:
    with CriticProcess({"reward": "sums"}) as server:
        yield server


def training_inputs(server: CriticProcess) -> dict[str, object]:
    tokenizer = load_tokenizer("sums-policy")
    pairs = chains(12)
    return {
        "url": server.url, "rows": [[*tokenizer.encode(p + r), END] for p, r in pairs],
        "prompts": [len(tokenizer.encode(p)) for p, _ in pairs], "returns": [1.0 if i % 2 else -1.0 for i in range(12)],
    }  # fmt: skip


def test_tritonclient(server: CriticProcess) -> None:
    result = run_client(".venv-interop", "critic_triton", training_inputs(server))
    assert result["ready"] == [True] * 3
    assert {name: config["max_batch_size"] for name, config in result["config"].items()} == {
        "critic_infer": 4096, "critic_train": 0, "critic_save": 0,
    }  # fmt: skip
    assert result["shapes"] == [[12, 64], [12, 1]]
    assert result["losses"][-1] < 0.8 * result["losses"][0]
    assert result["once"][0] == result["once"][1]
    assert result["status"] == [[0], "int64"]
    assert result["refused"][0] == "400"
    assert "returns[0, " in result["refused"][1]
    assert server.state()["updates"] == 11
    assert load_value(server.saves / str(server.state()["save"]) / "model")


def test_nemo_aligner(server: CriticProcess) -> None:
    result = run_client(".venv-pytriton", "critic_nemo", training_inputs(server))
    assert len(result["rewards"]) == 12
    assert result["shape"] == [1]
    assert result["losses"][-1] < 0.8 * result["losses"][0]
    assert result["status"] == [0]
    assert server.state()["updates"] == server.state()["saved"] == 10
