"""OpenAI's SDK and huggingface_hub read rewards as embeddings and as classes; OpenAI's SDK also requests text."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest

from plaudit.core import Engine, SamplingParams
from tests.interop.conftest import Chains
from tests.interop.environments import run_client
from tests.reward.tiny import sigmoid
from tests.serve.judge_model import CHAT, prompt_of, write_judge
from tests.serve.process import ServerProcess

pytestmark = pytest.mark.interop


def test_openai(server: ServerProcess, answers: Chains) -> None:
    texts = [text.removeprefix("<bos>") for text in answers.rendered]
    inputs = {"url": server.url, "key": "any", "model": "sums", "tokens": answers.rows, "texts": texts}
    result = run_client(".venv-interop", "openai_sdk", inputs)
    for form in ("tokens", "texts", "floats", "asynchronous"):
        assert [row[0] for row in result[form]] == pytest.approx(answers.scores, abs=5e-5), form
        assert all(len(row) == 1 for row in result[form])
    assert result["card"]["max_model_len"] == 256
    assert (result["unknown"]["class"], result["unknown"]["status"]) == ("NotFoundError", 404)
    assert (result["empty"]["class"], result["empty"]["status"]) == ("BadRequestError", 400)
    assert "at least one" in result["empty"]["body"]["message"]


def test_openai_texts(tmp_path: Path) -> None:
    directory = write_judge(tmp_path)
    engine = Engine.load(directory, device="cpu")
    with ServerProcess({"models": {"sums": {"path": "sums"}, "judge": {"path": str(directory)}}}) as server:
        inputs = {"url": server.url, "model": "judge", "messages": CHAT, "prompt": "hello"}
        result = run_client(".venv-interop", "openai_texts", inputs)
    (sample,) = engine.generate([prompt_of(engine)], SamplingParams(temperature=0, max_tokens=12))
    assert {result["text"], result["streamed"]["text"], *result["asynchronous"]} == {sample.text}
    assert result["logprobs"] == pytest.approx(sample.raw_logprobs, abs=1e-5)
    assert result["usage"] == result["streamed"]["usage"]
    assert result["usage"]["completion_tokens"] == len(sample.token_ids)
    samples = engine.generate(["hello"], SamplingParams(temperature=0.9, seed=7, max_tokens=12, n=2))
    assert result["samples"] == [each.text for each in samples]
    for logprobs, each in zip(result["sample_logprobs"], samples, strict=True):
        assert logprobs == pytest.approx(each.raw_logprobs, abs=1e-5)
    assert result["models"] == ["sums", "judge"]
    errors = [(result[name]["class"], result[name]["code"]) for name in ("unknown", "long")]
    assert errors == [("NotFoundError", "model_not_found"), ("BadRequestError", "context_length_exceeded")]
    assert json.loads(result["json"]) in ("good", "bad")
    assert (result["yaml"]["class"], result["yaml"]["param"]) == ("BadRequestError", "response_format")


def test_huggingface_hub(server: ServerProcess, answers: Chains) -> None:
    texts = [text.removeprefix("<bos>") for text in answers.rendered]
    result = run_client(".venv-interop", "huggingface_hub_client", {"url": server.url, "texts": texts})
    assert [row[0]["score"] for row in result["raw"]] == pytest.approx(answers.scores, abs=5e-5)
    assert {row[0]["label"] for row in result["raw"]} == {"reward"}
    probabilities = sigmoid(np.array(answers.scores)).tolist()
    assert [row[0]["score"] for row in result["activated"]] == pytest.approx(probabilities, abs=5e-5)
    assert result["asynchronous"] == pytest.approx(probabilities, abs=5e-5)
    assert result["refused"] == 413
    assert result["below"] == pytest.approx(answers.scores, abs=5e-5)
    assert result["others"] == [422] * 4, "another task never gets a classification"
