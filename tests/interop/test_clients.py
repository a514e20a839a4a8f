"""Clients of rewards and of a causal LM that other projects ship: each gets what the server's own routes say."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest

from plaudit.core import Engine
from plaudit.models import resolve
from tests.interop.environments import run_client
from tests.serve.process import ServerProcess

pytestmark = pytest.mark.interop
KEY = "a-key-of-the-clients"
WRITER = "org/policy"  # as models of a hub are named
PROMPT = "7+8+4="
ANSWER = "7+8=15;15+4=19;#19"
TEXTS = [f"{PROMPT}{ANSWER}", "3"]


@pytest.fixture(scope="module")
def clients() -> Iterator[ServerProcess]:
    models = ("--model", "sums", "--model", "sums-steps", "--model", f"{WRITER}=sums-policy")
    with ServerProcess(None, *models, "--api-key", KEY) as server:
        server.http.headers["authorization"] = f"Bearer {KEY}"
        yield server


def run(server: ServerProcess, script: str, environment: str = ".venv-clients", **inputs: Any) -> Any:
    return run_client(environment, script, {"url": server.url, "key": KEY, **inputs})


def test_its_hub_searches_steps(clients: ServerProcess) -> None:
    """Steps are continued messages, and a step keeps its delimiter or not: both find the answer."""
    for result in run(clients, "its_hub_search", writer=WRITER, judge="sums-steps", prompt=PROMPT):
        assert result["texts"][0] == ANSWER
        assert set(result["steps"]) == {3}
        items = [{"prompt": PROMPT, "responses": result["texts"]}]
        scores = clients.rewards(items, "sums-steps").json()["items"][0]["scores"]
        assert result["scores"] == pytest.approx(scores, abs=1e-6)


def test_nemo_gym_gets_token_ids(clients: ServerProcess) -> None:
    result = run(clients, "nemo_gym_model", ".venv-gym", model=WRITER, prompt=PROMPT)
    engine = Engine.load("sums-policy", device="cpu")
    end = engine.tokenizer.eos_token_id
    prompt = engine.tokenizer.encode(PROMPT)
    generated = [*engine.tokenizer.encode(ANSWER, add_special_tokens=False), end]
    for message in (result["response"], result["chat"]):
        assert [int(token) for token in message["generation_token_ids"]] == generated
        assert message["prompt_token_ids"] == prompt
        logprobs = engine.logprobs([[*prompt, *generated]])[0][len(prompt) - 1 :]
        assert message["generation_log_probs"] == pytest.approx(logprobs.tolist(), abs=1e-4)
    assert result["chat"]["content"] == result["response"]["content"][0]["text"] == ANSWER


def test_lm_eval_computes_loglikelihoods(clients: ServerProcess) -> None:
    wrong, text = "7+8=16;", f"{PROMPT}7+8=15;"
    tokenizer = resolve("sums-policy")
    inputs = {"model": WRITER, "tokenizer": str(tokenizer), "pairs": [[PROMPT, ANSWER], [PROMPT, wrong]]}
    result = run(clients, "lm_eval_loglikelihood", **inputs, texts=[text])
    engine = Engine.load("sums-policy", device="cpu")
    ids = [engine.tokenizer.encode(PROMPT + each, add_special_tokens=False) for each in (ANSWER, wrong)]
    begin = len(engine.tokenizer.encode(PROMPT, add_special_tokens=False))
    sums = [float(values[begin - 1 :].sum()) for values in engine.logprobs(ids)]
    assert [value for value, _ in result["pairs"]] == pytest.approx(sums, abs=1e-4)
    assert result["pairs"][1][1] is False
    whole = engine.logprobs([engine.tokenizer.encode(text)])[0]
    assert result["rolling"] == pytest.approx([float(whole.sum())], abs=1e-4)


def test_langchain_cohere_reranks(clients: ServerProcess) -> None:
    documents = [*TEXTS, "7+8=15"]
    result = run(clients, "cohere_rerank", model="sums", query=PROMPT, texts=documents)
    reply = clients.http.post("/rerank", json={"model": "sums", "query": PROMPT, "documents": documents}).json()
    expected = [{"index": each["index"], "relevance_score": each["relevance_score"]} for each in reply["results"]]
    assert result["ranks"] == expected
    assert result["first"] == expected[:1]
    assert result["documents"] == [[documents[each["index"]], each["relevance_score"]] for each in expected]
    assert result["refused"] == "UnauthorizedError"


def test_litellm_reads_embeddings_ranks_and_texts(clients: ServerProcess) -> None:
    result = run(clients, "litellm_client", texts=TEXTS, query=PROMPT, writer=WRITER)
    raw = clients.http.post("/classify", json={"model": "sums", "input": TEXTS, "use_activation": False}).json()
    rows = [row["probs"] for row in raw["data"]]
    assert np.allclose(result["embeddings"], rows, atol=1e-6)
    assert np.allclose(result["hosted"], rows, atol=1e-6)
    assert result["embeddings"][0][0] == pytest.approx(rows[0][0])
    assert [index for index, _ in result["reranked"]] == [index for index, _ in result["first"]] + [1]
    assert all(0 < score < 1 for _, score in result["reranked"])
    assert result["chat"] == ANSWER
    assert {(each["class"], each["status"]) for each in result["refused"]} == {("AuthenticationError", 401)}
