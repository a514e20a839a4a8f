"""OpenAI's SDK and huggingface_hub read rewards as embeddings and as classes; the former also requests text."""

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
    given = {"url": server.url, "key": "any", "model": "sums", "tokens": answers.rows, "texts": texts}
    found = run_client(".venv-interop", "openai_sdk", given)
    for way in ("tokens", "texts", "floats", "asynchronous"):
        assert [row[0] for row in found[way]] == pytest.approx(answers.scores, abs=5e-5), way
        assert all(len(row) == 1 for row in found[way])
    assert found["card"]["max_model_len"] == 256
    assert (found["unknown"]["class"], found["unknown"]["status"]) == ("NotFoundError", 404)
    assert (found["empty"]["class"], found["empty"]["status"]) == ("BadRequestError", 400)
    assert "at least one" in found["empty"]["body"]["message"]


def test_openai_texts(tmp_path: Path) -> None:
    directory = write_judge(tmp_path)
    engine = Engine.load(directory, device="cpu")
    with ServerProcess({"models": {"sums": {"path": "sums"}, "judge": {"path": str(directory)}}}) as server:
        given = {"url": server.url, "model": "judge", "messages": CHAT, "prompt": "hello"}
        found = run_client(".venv-interop", "openai_texts", given)
    (sample,) = engine.generate([prompt_of(engine)], SamplingParams(temperature=0, max_tokens=12))
    assert {found["text"], found["streamed"]["text"], *found["asynchronous"]} == {sample.text}
    assert found["logprobs"] == pytest.approx(sample.raw_logprobs, abs=1e-5)
    assert found["usage"] == found["streamed"]["usage"]
    assert found["usage"]["completion_tokens"] == len(sample.token_ids)
    samples = engine.generate(["hello"], SamplingParams(temperature=0.9, seed=7, max_tokens=12, n=2))
    assert found["samples"] == [each.text for each in samples]
    for logprobs, each in zip(found["sample_logprobs"], samples, strict=True):
        assert logprobs == pytest.approx(each.raw_logprobs, abs=1e-5)
    assert found["models"] == ["sums", "judge"]
    errors = [(found[name]["class"], found[name]["code"]) for name in ("unknown", "long")]
    assert errors == [("NotFoundError", "model_not_found"), ("BadRequestError", "context_length_exceeded")]
    assert json.loads(found["json"]) in ("good", "bad")
    assert (found["yaml"]["class"], found["yaml"]["param"]) == ("BadRequestError", "response_format")


def test_huggingface_hub(server: ServerProcess, answers: Chains) -> None:
    texts = [text.removeprefix("<bos>") for text in answers.rendered]
    found = run_client(".venv-interop", "huggingface_hub_client", {"url": server.url, "texts": texts})
    assert [row[0]["score"] for row in found["raw"]] == pytest.approx(answers.scores, abs=5e-5)
    assert {row[0]["label"] for row in found["raw"]} == {"reward"}
    chances = sigmoid(np.array(answers.scores)).tolist()
    assert [row[0]["score"] for row in found["activated"]] == pytest.approx(chances, abs=5e-5)
    assert found["asynchronous"] == pytest.approx(chances, abs=5e-5)
    assert found["refused"] == 413
