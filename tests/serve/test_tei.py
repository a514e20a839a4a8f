"""TEI, huggingface_hub and Infinity on a real server: their shapes, their errors, the scores of /v1/rewards."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import httpx
import numpy as np
import pytest

from plaudit.models import load_tokenizer
from tests.reward import tiny
from tests.serve.process import ServerProcess

KEY = "tei-key-1"
LABELS = ("bad", "fair", "good")
TEXTS = ["1+2=3;#3", "1+2=4;#4", "#3"]


@pytest.fixture(scope="module")
def moods() -> Any:
    return tiny.model("outcome", tiny.llama3(), labels=LABELS)


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory, moods: Any) -> Iterator[ServerProcess]:
    path = tiny.write(tmp_path_factory.mktemp("moods"), moods, tiny.llama3())
    models = {"sums": {"path": "sums"}, "moods": {"path": path, "weights": {"good": 1.0}}}
    with ServerProcess({"models": models, "api_keys": {"tester": KEY}, "limits": {"items": 100}}) as server:
        server.http.headers["authorization"] = f"Bearer {KEY}"
        yield server


@pytest.fixture(scope="module")
def rewards(server: ServerProcess) -> list[float]:
    """The rewards of the pairs of "1+2=" and each text."""
    tokenizer = load_tokenizer("sums")
    rows = [{"tokens": tokenizer("1+2=", text)["input_ids"]} for text in TEXTS]
    return [item["scores"][0] for item in server.rewards(rows).json()["items"]]


def call(server: ServerProcess, path: str, body: Any) -> Any:
    reply = server.http.post(path, json=body)
    assert reply.status_code == 200, reply.text
    return reply.json()


def test_predict_accepts_all_input_shapes(server: ServerProcess, rewards: list[float]) -> None:
    pair = call(server, "/predict", {"inputs": ["1+2=", TEXTS[0]], "raw_scores": True})
    assert pair == [{"score": pytest.approx(rewards[0], abs=5e-5), "label": "reward"}]
    batch = call(server, "/predict", {"inputs": [["1+2=", text] for text in TEXTS], "raw_scores": True})
    assert [row[0]["score"] for row in batch] == pytest.approx(rewards, abs=5e-5)
    activated = call(server, "/predict", {"inputs": [["1+2=", text] for text in TEXTS]})
    assert [row[0]["score"] for row in activated] == pytest.approx(tiny.sigmoid(np.array(rewards)), abs=5e-5)
    one = call(server, "/predict", {"inputs": "1+2=3;#3"})
    assert (
        one
        == call(server, "/predict", {"inputs": ["1+2=3;#3"]})
        == call(server, "/predict", {"inputs": [["1+2=3;#3"]]})[0]
    )


def test_texts_are_truncated_only_on_request(server: ServerProcess) -> None:
    digits = "1234567890" * 40
    tokenizer = load_tokenizer("sums")
    ids = tokenizer.encode(digits)
    reply = server.http.post("/predict", json={"inputs": digits})
    assert (reply.status_code, reply.json()["error_type"]) == (413, "Validation")
    assert "256" in reply.json()["error"]
    kept = {"right": ids[:256], "left": [ids[0], *ids[-255:]]}
    for side, tokens in kept.items():
        body = {"inputs": digits, "raw_scores": True, "truncate": True, "truncation_direction": side}
        expected = server.rewards([{"tokens": tokens}]).json()["items"][0]["scores"][0]
        assert call(server, "/predict", body)[0]["score"] == pytest.approx(expected, abs=5e-5)


def test_rerank_orders_texts_by_score(server: ServerProcess, rewards: list[float]) -> None:
    body = {"query": "1+2=", "texts": TEXTS, "raw_scores": True}
    order = np.argsort(rewards)[::-1].tolist()
    ranks = call(server, "/rerank", body)
    assert [rank["index"] for rank in ranks] == order
    assert [rank["score"] for rank in ranks] == pytest.approx([rewards[i] for i in order], abs=5e-5)
    assert all(set(rank) == {"index", "score"} for rank in ranks)
    with_text = call(server, "/rerank", {**body, "return_text": True})
    assert [rank["text"] for rank in with_text] == [TEXTS[i] for i in order]


def test_info_and_health(server: ServerProcess) -> None:
    info = server.http.get("/info").json()
    assert info["model_id"] == "sums"
    assert info["model_type"] == {"reranker": {"id2label": {"0": "reward"}, "label2id": {"reward": 0}}}
    assert info["max_input_length"] == 256
    assert info["max_client_batch_size"] == 100
    assert server.http.get("/health").status_code == 200


@pytest.mark.parametrize(
    ("path", "body", "status", "kind"),
    [
        ("/predict", {}, 422, "Validation"),
        ("/predict", {"inputs": 5}, 422, "Validation"),
        ("/predict", {"inputs": []}, 400, "Empty"),
        ("/predict", {"inputs": ["a", "b", "c"]}, 422, "Validation"),
        ("/predict", {"inputs": [["a"], "b"]}, 422, "Validation"),
        ("/predict", {"inputs": [["a"]] * 101}, 413, "Validation"),
        ("/predict", {"inputs": "a", "truncation_direction": "up"}, 422, "Validation"),
        ("/rerank", {"query": "a", "texts": []}, 400, "Empty"),
        ("/rerank", {"query": 5, "texts": ["a"]}, 422, "Validation"),
        ("/", {"inputs": {"a": 1}, "parameters": {}}, 422, "Validation"),
        ("/", {"inputs": [], "parameters": {}}, 400, "Empty"),
    ],
)
def test_errors_have_teis_format(
    server: ServerProcess, path: str, body: dict[str, Any], status: int, kind: str
) -> None:
    reply = server.http.post(path, json=body)
    assert reply.status_code == status, reply.text
    assert set(reply.json()) == {"error", "error_type"}
    assert reply.json()["error_type"] == kind


def test_text_classification_requests_of_huggingface_hub(server: ServerProcess) -> None:
    raw = call(server, "/", {"inputs": "1+2=3;#3", "parameters": {"function_to_apply": "none"}})
    expected = server.rewards([{"tokens": load_tokenizer("sums").encode("1+2=3;#3")}]).json()["items"][0]["scores"][0]
    assert raw == [[{"score": pytest.approx(expected, abs=5e-5), "label": "reward"}]]
    several = call(server, "/", {"inputs": ["1+2=3;#3", "#3"], "parameters": {"top_k": 1}})
    assert len(several) == 2
    assert several[0][0]["score"] == pytest.approx(float(tiny.sigmoid(np.array(expected))), abs=5e-5)
    assert "<html" in server.http.get("/").text


def test_infinity_routes_return_scores_and_models(server: ServerProcess, rewards: list[float], moods: Any) -> None:
    logits = tiny.plain_class(moods, tiny.llama3().encode("How are you?"))[-1]
    for path in ("/classify", "/infinity/classify"):
        reply = call(server, path, {"model": "moods", "input": ["How are you?"], "raw_scores": True})
        assert reply["object"] == "classify"
        assert [entry["score"] for entry in reply["data"][0]] == pytest.approx(sorted(logits)[::-1], abs=1e-4)
        assert {entry["label"] for entry in reply["data"][0]} == set(LABELS)
        assert reply["usage"] == {"prompt_tokens": 13, "total_tokens": 13}
    body = {"query": "1+2=", "documents": TEXTS, "raw_scores": True, "return_documents": True, "top_n": 2}
    for path in ("/rerank", "/infinity/rerank"):
        reply = call(server, path, body)
        order = np.argsort(rewards)[::-1].tolist()[:2]
        assert [r["index"] for r in reply["results"]] == order
        assert [r["relevance_score"] for r in reply["results"]] == pytest.approx([rewards[i] for i in order], abs=5e-5)
        assert reply["results"][0]["document"] == TEXTS[order[0]]
    listed = server.http.get("/infinity/models").json()
    assert listed["data"][0]["id"] == "sums"
    assert listed == server.http.get("/models").json()
    error = server.http.post("/infinity/classify", json={"input": "a"})
    assert error.status_code == 422
    assert set(error.json()["error"]) == {"message", "type", "param", "code"}
    assert server.http.post("/infinity/classify", json={"input": ["1" * 500]}).status_code == 422
    assert server.http.post("/infinity/nowhere", json={}).json()["error"]["code"] == 404


def test_a_key_is_required(server: ServerProcess) -> None:
    for path in ("/predict", "/rerank", "/", "/infinity/classify"):
        assert httpx.post(f"{server.url}{path}", json={"inputs": "a"}).status_code == 401
    assert httpx.get(f"{server.url}/info").status_code == 401
