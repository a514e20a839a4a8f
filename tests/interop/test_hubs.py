"""OpenAI's SDK and huggingface_hub read rewards as embeddings and as classes."""

from __future__ import annotations

import numpy as np
import pytest

from tests.interop.conftest import Chains
from tests.interop.environments import run_client
from tests.reward.tiny import sigmoid
from tests.serve.process import ServerProcess

pytestmark = pytest.mark.interop


def test_openai(server: ServerProcess, answers: Chains) -> None:
    texts = [text.removeprefix("<bos>") for text in answers.rendered]
    given = {"url": server.url, "key": "any", "model": "sums", "tokens": answers.rows, "texts": texts}
    found = run_client(".venv-interop", "openai_sdk", given)
    for way in ("tokens", "texts", "floats", "asynchronous"):
        assert [row[0] for row in found[way]] == pytest.approx(answers.scores, abs=5e-5), way
        assert all(len(row) == 1 for row in found[way])
    assert found["card"]["max_model_len"] == 256
    assert (found["unknown"]["class"], found["unknown"]["status"]) == ("NotFoundError", 404)
    assert (found["empty"]["class"], found["empty"]["status"]) == ("BadRequestError", 400)
    assert "at least one" in found["empty"]["body"]["message"]


def test_huggingface_hub(server: ServerProcess, answers: Chains) -> None:
    texts = [text.removeprefix("<bos>") for text in answers.rendered]
    found = run_client(".venv-interop", "huggingface_hub_client", {"url": server.url, "texts": texts})
    assert [row[0]["score"] for row in found["raw"]] == pytest.approx(answers.scores, abs=5e-5)
    assert {row[0]["label"] for row in found["raw"]} == {"reward"}
    chances = sigmoid(np.array(answers.scores)).tolist()
    assert [row[0]["score"] for row in found["activated"]] == pytest.approx(chances, abs=5e-5)
    assert found["asynchronous"] == pytest.approx(chances, abs=5e-5)
    assert found["refused"] == 413
