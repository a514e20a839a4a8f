"""Encoders with a class head over every protocol that supports them: the numbers of plain transformers."""

from __future__ import annotations

import json
import random
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from plaudit.client.client import RewardClient
from plaudit.errors import ConfigError
from plaudit.reward.load import load_reward
from tests.models.encoders import encoder, plain
from tests.serve.process import ServerProcess

QUERY = "who is it?"
DOCUMENTS = ["he", "a longer text, the end of which [SEP] nobody knows", "she", "nobody at all", "x" * 200]
LABELS = {"0": "toxic", "1": "insult", "2": "threat"}


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    root = tmp_path_factory.mktemp("encoders")
    named = {"id2label": LABELS, "label2id": {name: int(i) for i, name in LABELS.items()}}
    return {
        "bert": encoder(root / "bert", "bert"),
        "xlmr": encoder(root / "xlmr", "xlm-roberta"),
        "labels": encoder(root / "labels", "distilbert", 3, **named, problem_type="multi_label_classification"),
    }


@pytest.fixture(scope="module")
def server(models: dict[str, Path]) -> Iterator[ServerProcess]:
    with ServerProcess(None, *(w for name, path in models.items() for w in ("--model", f"{name}={path}"))) as server:
        yield server


def expected(directory: Path, pairs: list[tuple[str, str | None]]) -> np.ndarray:
    """Truncated by the tokenizer as in TEI: to the model's maximum length, the longer text of a pair first."""
    return plain(directory, pairs, truncation=True, max_length=64).numpy()


def sigmoid(values: np.ndarray) -> np.ndarray:
    return 1 / (1 + np.exp(-values.astype(np.float64)))


def call(server: ServerProcess, path: str, **body: Any) -> Any:
    reply = server.http.post(path, json=body)
    assert reply.status_code == 200, reply.text + server.log()
    return reply.json()


def test_tei_rerank_truncates_long_texts_unless_truncate_is_false(
    server: ServerProcess, models: dict[str, Path]
) -> None:
    raw = expected(models["bert"], [(QUERY, text) for text in DOCUMENTS])[:, 0]
    ranks = call(server, "/rerank", query=QUERY, texts=DOCUMENTS, raw_scores=True)
    assert [rank["index"] for rank in ranks] == np.argsort(-raw).tolist()
    assert np.abs(np.array([rank["score"] for rank in ranks]) - np.sort(raw)[::-1]).max() < 1e-5
    shown = call(server, "/rerank", query=QUERY, texts=DOCUMENTS, return_text=True)
    assert shown[0]["text"] == DOCUMENTS[int(raw.argmax())]
    assert abs(shown[0]["score"] - sigmoid(raw).max()) < 1e-5
    refused = server.http.post("/rerank", json={"query": QUERY, "texts": DOCUMENTS, "truncate": False})
    assert refused.status_code == 413
    assert "texts[4]" in refused.text
    assert server_info(server)["auto_truncate"] is True
    alone = call(server, "/predict", inputs=[QUERY, DOCUMENTS[1]], raw_scores=True)
    assert abs(alone[0]["score"] - raw[1]) < 1e-5
    left = plain(models["bert"], [(QUERY + DOCUMENTS[4], None)], truncation=True, max_length=64).numpy()
    predicted = call(server, "/predict", inputs=QUERY + DOCUMENTS[4], raw_scores=True)
    assert abs(predicted[0]["score"] - left[0, 0]) < 1e-5


def server_info(server: ServerProcess) -> Any:
    return server.http.get("/info").json()


@pytest.mark.parametrize("name", ["bert", "xlmr"])
def test_every_reranking_protocol_gives_the_scores_of_transformers(
    server: ServerProcess, models: dict[str, Path], name: str
) -> None:
    short = DOCUMENTS[:4]
    raw = expected(models[name], [(QUERY, text) for text in short])[:, 0]
    scores: dict[str, list[tuple[int, float]]] = {}
    body = {"model": name, "query": QUERY, "documents": short}
    infinity = call(server, "/infinity/rerank", **body, raw_scores=True)
    scores["infinity"] = [(each["index"], each["relevance_score"]) for each in infinity["results"]]
    vllm = call(server, "/vllm/v1/rerank", **body, use_activation=False)
    scores["vllm"] = [(each["index"], each["relevance_score"]) for each in vllm["results"]]
    pairs = call(server, "/vllm/score", model=name, text_1=QUERY, text_2=short, use_activation=False)
    scores["score"] = [(each["index"], each["score"]) for each in pairs["data"]]
    sglang = call(server, "/sglang/v1/rerank", **body)
    scores["sglang"] = [(each["index"], each["score"]) for each in sglang]
    native = server.rewards([{"prompt": QUERY, "responses": [short[0], short[2], short[3]]}], model=name).json()
    for protocol, ranked in scores.items():
        assert np.abs(np.array([score for _, score in sorted(ranked)]) - raw).max() < 1e-5, protocol
    assert np.abs(np.array(native["items"][0]["scores"]) - raw[[0, 2, 3]]).max() < 1e-5


def test_a_batch_of_ragged_pairs_is_scored_like_each_pair_alone(server: ServerProcess, models: dict[str, Path]) -> None:
    draw = random.Random(3)
    texts = ["".join(draw.choices("abc ?", k=draw.randint(1, 45))) for _ in range(60)]
    raw = expected(models["xlmr"], [("q", text) for text in texts])[:, 0]
    with RewardClient(server.url, model="xlmr") as client:
        rewards = client.score([{"prompt": "q", "response": text} for text in texts])
    assert np.abs(np.array([each.value for each in rewards]) - raw).max() < 1e-5


def test_native_protocol_does_not_parse_control_tokens_in_texts(server: ServerProcess) -> None:
    first, second = (
        server.rewards([{"prompt": QUERY, "responses": [text]}], model="bert").json()["items"][0]["scores"][0]
        for text in ("a [SEP] b", "a  b")
    )
    assert abs(first - second) > 1e-4
    ids = server.http.post("/tokenize", json={"model": "bert", "prompt": "a[SEP]b"}).json()["tokens"]
    assert ids.count(2) == 2  # other servers parse it as a control token


def test_messages_must_be_one_question_and_one_answer(server: ServerProcess, models: dict[str, Path]) -> None:
    chat = [{"role": "user", "content": QUERY}, {"role": "assistant", "content": "he"}]
    raw = float(expected(models["bert"], [(QUERY, "he")])[0, 0])
    assert abs(server.rewards([{"messages": chat}], model="bert").json()["items"][0]["scores"][0] - raw) < 1e-5
    longer = server.rewards([{"messages": [*chat, *chat]}], model="bert").json()["items"][0]["error"]
    assert longer["type"] == "unsupported_form"
    assert "one question and one answer" in longer["message"]


def test_labels_without_weights_give_one_score_each_and_no_total(
    server: ServerProcess, models: dict[str, Path]
) -> None:
    row = expected(models["labels"], [(QUERY, None)])[0]
    classes = call(server, "/infinity/classify", model="labels", input=[QUERY], raw_scores=False)["data"][0]
    assert {each["label"] for each in classes} == set(LABELS.values())
    scores = [next(each["score"] for each in classes if each["label"] == label) for label in LABELS.values()]
    assert np.abs(np.array(scores) - sigmoid(row)).max() < 1e-5  # multi-label: each label is independent
    probs = call(server, "/classify", model="labels", input=QUERY)["data"][0]["probs"]
    assert np.abs(np.array(probs) - sigmoid(row)).max() < 1e-5
    item = server.rewards([{"text": QUERY}], model="labels").json()["items"][0]
    assert item["scores"] == [None]
    assert item["errors"][0]["type"] == "no_weights"
    assert "weights = " in item["errors"][0]["message"]
    assert np.abs(np.array([item["attributes"][0][label] for label in LABELS.values()]) - row).max() < 1e-5
    with RewardClient(server.url, model="labels") as client:
        (score,) = client.score([{"text": QUERY}])
    assert score.attributes == item["attributes"][0]
    assert (
        server.http.post("/vllm/rerank", json={"model": "labels", "query": "a", "documents": ["b"]}).status_code == 400
    )


def test_unsupported_encoder_features_are_rejected_in_each_protocol(server: ServerProcess) -> None:
    tokens = server.http.post("/pooling", json={"model": "bert", "input": "x", "task": "token_classify"})
    assert tokens.status_code in (400, 422)
    assert "whole texts" in tokens.text
    assert server.http.post("/generate", json={"text": "x", "sampling_params": {}}).status_code in (400, 422)
    refused = server.rewards([{"prompt": QUERY, "responses": ["x" * 300]}], model="bert").json()["items"][0]["error"]
    assert refused["type"] == "too_long"
    cut = server.rewards([{"prompt": QUERY, "responses": ["x" * 300]}], model="bert", truncate="right").json()["items"][
        0
    ]
    assert cut["truncated"] == [True]


def test_an_in_process_encoder_gives_the_same_rewards(models: dict[str, Path], tmp_path: Path) -> None:
    rows = tmp_path / "rows.jsonl"
    rows.write_text(json.dumps({"prompt": QUERY, "responses": DOCUMENTS[:4]}) + "\n")
    raw = expected(models["bert"], [(QUERY, text) for text in (*DOCUMENTS[:1], *DOCUMENTS[2:4])])[:, 0]
    reward = load_reward(models["bert"])
    from plaudit.records import Item

    results = reward.score([Item(prompt=QUERY, response=text) for text in DOCUMENTS])
    assert np.abs(np.array([results[index].value for index in (0, 2, 3)]) - raw).max() < 1e-5
    assert results[4].error is not None
    with pytest.raises(ConfigError, match="set the weight of each"):
        load_reward(models["labels"])
