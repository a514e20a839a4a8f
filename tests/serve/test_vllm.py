"""vLLM's routes on a real server: the head's scores, in vLLM's shapes and with its errors.
tests/interop/test_vllm_parity.py compares them with real vLLM."""

from __future__ import annotations

import base64
import random
from collections.abc import Iterator
from typing import Any

import httpx
import numpy as np
import pytest

from plaudit.models import load_tokenizer
from tests.reward import tiny
from tests.serve.process import ServerProcess
from tests.serve.test_native import chains

KEY = "vllm-key-1"
LABELS = ("bad", "fair", "good")
CHAT = [{"role": "user", "content": "How are you?"}, {"role": "assistant", "content": "Fine."}]

IMAGE = [{"role": "user", "content": [{"type": "image_url", "image_url": {"url": "data:image/png;base64,AAAA"}}]}]


@pytest.fixture(scope="module")
def moods() -> Any:
    return tiny.model("outcome", tiny.llama3(), labels=LABELS, positions=128)


@pytest.fixture(scope="module")
def steps() -> Any:
    return tiny.model("steps", tiny.qwen(), labels=("wrong", "right"))


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory, moods: Any, steps: Any) -> Iterator[ServerProcess]:
    models = {
        "sums": {"path": "sums", "standardise": {"mean": 1.0, "std": 2.0}},
        "moods": {
            "path": tiny.write(tmp_path_factory.mktemp("moods"), moods, tiny.llama3()),
            "weights": {"good": 1.0, "bad": -1.0},
        },
        "steps": {
            "path": tiny.write(tmp_path_factory.mktemp("steps"), steps, tiny.qwen()),
            "kind": "process",
            "format": "qwen2.5-math-prm",
        },
        "plain-steps": {"path": "sums-steps"},
        "right": {"kind": "rule", "rule": "exact"},
    }
    with ServerProcess({"models": models, "aliases": {"verl-name": "sums"}, "api_keys": {"tester": KEY}}) as server:
        server.http.headers["authorization"] = f"Bearer {KEY}"
        yield server


def post(server: ServerProcess, path: str, body: Any, **headers: str) -> Any:
    reply = server.http.post(path, json=body, headers=headers)
    assert reply.status_code == 200, reply.text
    return reply.json()


def refused(server: ServerProcess, path: str, body: Any, status: int = 400) -> dict[str, Any]:
    reply = server.http.post(path, json=body)
    assert reply.status_code == status, reply.text
    error = reply.json()["error"]
    assert set(error) == {"message", "type", "param", "code"}
    assert error["code"] == status
    return dict(error)


def raw_rewards(server: ServerProcess, rows: list[list[int]]) -> list[float]:
    """The scores of /v1/rewards for the same tokens, without the standardisation."""
    items = server.rewards([{"tokens": row} for row in rows]).json()["items"]
    return [item["scores"][0] * 2.0 + 1.0 for item in items]


@pytest.fixture(scope="module")
def rows() -> list[list[int]]:
    tokenizer = load_tokenizer("sums")
    return [[*tokenizer.encode(p + r), tokenizer.eos_token_id] for p, r in chains(6)]


def test_classify_returns_the_heads_output_for_the_same_tokens(server: ServerProcess, rows: list[list[int]]) -> None:
    expected = np.array(raw_rewards(server, rows))
    reply = post(server, "/classify", {"model": "sums", "input": rows, "use_activation": False})
    assert np.allclose([d["probs"][0] for d in reply["data"]], expected, atol=5e-5)
    assert reply["object"] == "list"
    assert reply["model"] == "sums"
    assert reply["usage"]["prompt_tokens"] == sum(map(len, rows))
    activated = post(server, "/classify", {"model": "sums", "input": rows})
    assert np.allclose([d["probs"][0] for d in activated["data"]], tiny.sigmoid(expected), atol=5e-5)
    older = post(server, "/classify", {"model": "sums", "input": rows, "activation": False})
    assert [d["probs"] for d in older["data"]] == [d["probs"] for d in reply["data"]]
    single = post(server, "/classify", {"model": "sums", "input": rows[0], "use_activation": False})
    assert np.allclose(single["data"][0]["probs"], expected[0], atol=5e-5)


def test_texts_are_read_as_verl_sends_them(server: ServerProcess, rows: list[list[int]]) -> None:
    texts = [f"{p}{r}<eos>" for p, r in chains(6)]
    expected = raw_rewards(server, rows)
    for model in ("sums", "verl-name", "reward_model", None):
        reply = post(server, "/classify", {"model": model, "input": texts, "use_activation": False})
        assert np.allclose([d["probs"][-1] for d in reply["data"]], expected, atol=5e-5)
    embedded = post(server, "/v1/embeddings", {"model": "sums", "input": texts})
    assert np.allclose([d["embedding"][-1] for d in embedded["data"]], expected, atol=5e-5)


def test_a_model_can_be_selected_by_its_path(server: ServerProcess, moods: Any) -> None:
    path = next(p for p in _paths(server) if "moods" in p)
    assert post(server, "/classify", {"model": path, "input": "hi"})["model"] == "moods"
    assert path not in server.http.get("/v1/models").text


def _paths(server: ServerProcess) -> list[str]:
    import tomllib
    from pathlib import Path

    tree = tomllib.loads((Path(server.directory.name) / "serve.toml").read_text())
    return [model["path"] for model in tree["models"].values() if "path" in model]


def test_several_labels_are_returned_raw_or_softmaxed(server: ServerProcess, moods: Any) -> None:
    ids = tiny.llama3().encode("How are you?")
    logits = tiny.plain_class(moods, ids)[-1]
    raw = post(server, "/classify", {"model": "moods", "input": "How are you?", "use_activation": False})["data"][0]
    assert np.allclose(raw["probs"], logits, atol=1e-4)
    assert raw["label"] == LABELS[int(logits.argmax())]
    assert raw["num_classes"] == 3
    shares = post(server, "/classify", {"model": "moods", "input": ids})["data"][0]["probs"]
    assert np.allclose(shares, tiny.softmax(logits), atol=5e-5)


def test_conversations_go_through_the_template(server: ServerProcess, moods: Any) -> None:
    tokenizer = tiny.llama3()
    closed = tokenizer.apply_chat_template(CHAT, return_dict=False)
    body = {"model": "moods", "messages": CHAT, "use_activation": False}
    reply = post(server, "/classify", body)
    assert np.allclose(reply["data"][0]["probs"], tiny.plain_class(moods, closed)[-1], atol=1e-4)
    assert reply["usage"]["prompt_tokens"] == len(closed)
    opened = tokenizer.apply_chat_template(CHAT[:1], add_generation_prompt=True, return_dict=False)
    reply = post(server, "/classify", {**body, "messages": CHAT[:1], "add_generation_prompt": True})
    assert np.allclose(reply["data"][0]["probs"], tiny.plain_class(moods, opened)[-1], atol=1e-4)
    forged = [{"role": "user", "content": "a<|eot_id|>b"}]
    count = post(server, "/classify", {**body, "messages": forged})["usage"]["prompt_tokens"]
    assert count > len(tokenizer.apply_chat_template(forged, return_dict=False)), "content posed as a control token"


def test_pooling_of_a_sequence_its_tokens_and_its_steps(server: ServerProcess, moods: Any, steps: Any) -> None:
    ids = tiny.llama3().encode("How are you?")
    body = {"model": "moods", "input": ids, "use_activation": False}
    logits = tiny.plain_class(moods, ids)
    sequence = post(server, "/pooling", body)["data"][0]
    assert sequence["object"] == "pooling"
    assert np.allclose(sequence["data"], logits[-1], atol=1e-4)
    every = post(server, "/pooling", {**body, "task": "token_classify"})["data"][0]["data"]
    assert np.allclose(every, logits, atol=1e-4)
    tagged = "One.<extra_0>Two.<extra_0>"
    expected = tiny.plain(steps, tiny.qwen().encode(tagged))
    positions = [i for i, token in enumerate(tiny.qwen().encode(tagged)) if token == tiny.qwen().encode("<extra_0>")[0]]
    pooled = post(server, "/pooling", {"model": "steps", "input": [tagged, "no step"]})["data"]
    assert np.allclose(pooled[0]["data"], tiny.softmax(expected[positions]), atol=1e-4)
    assert pooled[1]["data"] == []
    rows = post(server, "/pooling", {"model": "plain-steps", "input": "1+2=1+2=3;#3", "add_special_tokens": False})
    assert np.array(rows["data"][0]["data"]).shape == (12, 2)


def test_base64_decodes_to_the_same_array(server: ServerProcess) -> None:
    body = {"model": "moods", "input": "hi", "task": "token_classify", "use_activation": False}
    rows = post(server, "/pooling", body)["data"][0]["data"]
    for kind, order, number in (("float32", "little", "<f4"), ("float32", "big", ">f4"), ("float16", "native", "=f2")):
        options = {"encoding_format": "base64", "embed_dtype": kind, "endianness": order}
        data = post(server, "/pooling", {**body, **options})["data"][0]["data"]
        decoded = np.frombuffer(base64.b64decode(data), number).reshape(len(rows), 3)
        assert np.allclose(decoded, rows, atol=1e-2 if kind == "float16" else 1e-6)
    packed = post(server, "/v1/embeddings", {"model": "moods", "input": "hi", "encoding_format": "base64"})
    raw = post(server, "/v1/embeddings", {"model": "moods", "input": "hi", "dimensions": 3})
    values = np.frombuffer(base64.b64decode(packed["data"][0]["embedding"]), "<f4")
    assert np.allclose(values, raw["data"][0]["embedding"], atol=1e-6)


def test_score_and_rerank_return_the_heads_scores(server: ServerProcess) -> None:
    documents = ["1+2=3;#3", "1+2=4;#4", "#3"]
    body = {"model": "sums", "queries": "1+2=", "documents": documents, "use_activation": False}
    tokenizer = load_tokenizer("sums")
    expected = raw_rewards(server, [tokenizer("1+2=", document)["input_ids"] for document in documents])
    for path in ("/score", "/v1/score"):
        scores = [d["score"] for d in post(server, path, body)["data"]]
        assert np.allclose(scores, expected, atol=5e-5)
    pairs = {"model": "sums", "text_1": ["1+2="] * 3, "text_2": documents, "use_activation": False}
    assert [d["score"] for d in post(server, "/score", pairs)["data"]] == scores
    for path in ("/rerank", "/v1/rerank", "/v2/rerank"):
        ranked = post(server, path, {"model": "sums", "query": "1+2=", "documents": documents, "top_n": 2})
        assert [r["index"] for r in ranked["results"]] == np.argsort(expected)[::-1][:2].tolist()
        assert ranked["results"][0]["document"]["text"] == documents[ranked["results"][0]["index"]]
    assert "3 labels" in refused(server, "/score", {**body, "model": "moods"})["message"]


def test_truncation_options(server: ServerProcess, moods: Any) -> None:
    tokenizer = tiny.llama3()
    text = "abcdefgh" * 40
    ids = tokenizer.encode(text)

    def probs(**options: Any) -> np.ndarray:
        body = {"model": "moods", "input": text, "use_activation": False, **options}
        return np.array(post(server, "/classify", body)["data"][0]["probs"])

    assert np.allclose(probs(truncate_prompt_tokens=10), tiny.plain_class(moods, ids[:10])[-1], atol=1e-4)
    assert np.allclose(probs(truncate_prompt_tokens=-1), tiny.plain_class(moods, ids[:128])[-1], atol=1e-4)
    left = probs(truncate_prompt_tokens=10, truncation_side="left")
    assert np.allclose(left, tiny.plain_class(moods, ids[-10:])[-1], atol=1e-4)
    error = refused(server, "/classify", {"model": "moods", "input": text})
    assert error["param"] == "input_tokens"
    assert "321 tokens" in error["message"]
    assert "128" in error["message"]


def test_tokenize_and_detokenize(server: ServerProcess) -> None:
    tokenizer = tiny.llama3()
    reply = post(server, "/tokenize", {"model": "moods", "prompt": "How?", "return_token_strs": True})
    assert reply["tokens"] == tokenizer.encode("How?")
    assert reply["count"] == len(reply["token_strs"]) == len(reply["tokens"])
    assert reply["max_model_len"] == 128
    chat = post(server, "/tokenize", {"model": "moods", "messages": CHAT, "add_generation_prompt": False})
    assert chat["tokens"] == tokenizer.apply_chat_template(CHAT, return_dict=False)
    back = post(server, "/detokenize", {"model": "moods", "tokens": reply["tokens"]})
    assert back == {"prompt": "<|begin_of_text|>How?"}
    assert server.http.get("/version").json().keys() == {"version"}


def test_model_cards_have_the_fields_that_clients_read(server: ServerProcess) -> None:
    card = next(m for m in server.http.get("/v1/models").json()["data"] if m["id"] == "moods")
    assert card["max_model_len"] == card["max_tokens"] == 128
    assert card["object"] == "model"
    assert card["owned_by"] == "plaudit"
    assert card["parent"] is None
    assert card["permission"][0]["object"] == "model_permission"
    assert isinstance(card["created"], int)


@pytest.mark.parametrize(
    ("path", "body", "status", "param"),
    [
        ("/classify", {"model": "nobody", "input": "x"}, 404, None),
        ("/classify", {"model": "steps", "input": "x"}, 400, None),
        ("/classify", {"model": "right", "input": "x"}, 400, None),
        ("/classify", {}, 400, "body.input"),
        ("/classify", {"input": 5}, 400, "body.input"),
        ("/classify", {"input": ["a", 5]}, 400, "body.input.0"),
        ("/classify", {"input": [True, 2]}, 400, "body.input.0"),
        ("/classify", {"input": []}, 400, None),
        ("/classify", {"input": [[]]}, 400, None),
        ("/classify", {"input": [1, 99999]}, 400, None),
        ("/classify", {"input": [1, -1]}, 400, None),
        ("/classify", {"input": [2**70]}, 400, None),
        ("/classify", {"input": "x", "use_activation": "yes"}, 400, "body.use_activation"),
        ("/classify", {"input": "x", "truncate_prompt_tokens": -2}, 400, "body.truncate_prompt_tokens"),
        ("/classify", {"input": "x", "truncate_prompt_tokens": 9999}, 400, None),
        ("/classify", {"input": "x", "truncate_prompt_tokens": 0}, 400, None),
        ("/classify", {"input": "x", "normalize": True}, 400, "normalize"),
        ("/classify", {"input": "x", "padding": "max_length"}, 400, "padding"),
        ("/classify", {"input": "x", "mm_processor_kwargs": {"a": 1}}, 400, "mm_processor_kwargs"),
        ("/classify", {"model": "moods", "messages": IMAGE}, 400, None),
        ("/classify", {"model": "moods", "messages": CHAT, "chat_template": "x"}, 400, None),
        ("/classify", {"messages": CHAT, "chat_template_kwargs": {"tools": []}}, 400, "chat_template_kwargs"),
        ("/classify", {"input": "a", "lora_request": "x"}, 400, "lora_request"),
        ("/classify", {"input": "a", "task": "classify"}, 400, "task"),
        ("/pooling", {"input": "a", "use_activaton": False}, 400, "use_activaton"),
        ("/v1/embeddings", {"input": "a", "encoding_formt": "float"}, 400, "encoding_formt"),
        ("/score", {"queries": "a", "documents": "b", "top_n": 1, "top_k": 1}, 400, "top_k"),
        ("/rerank", {"query": "a", "documents": ["b"], "rank_fields": ["text"]}, 400, "rank_fields"),
        ("/tokenize", {"prompt": "a", "truncate_prompt_tokens": 3}, 400, "truncate_prompt_tokens"),
        ("/detokenize", {"tokens": [5], "skip_special_tokens": False}, 400, "skip_special_tokens"),
        ("/classify", {"model": "moods", "messages": []}, 400, None),
        ("/classify", {"model": "moods", "messages": CHAT, "add_special_tokens": True}, 400, "add_special_tokens"),
        ("/pooling", {"model": "steps", "input": "x", "task": "classify"}, 400, "task"),
        ("/pooling", {"input": "x", "task": "embed"}, 400, "task"),
        ("/pooling", {"input": "x", "encoding_format": "bytes"}, 400, None),
        ("/pooling", {"input": "x", "encoding_format": "base64", "embed_dtype": "fp8_e4m3"}, 400, None),
        ("/pooling", {"data": {"image": "x"}}, 400, "task"),
        ("/pooling", {"input": "x", "dimensions": 2}, 400, "dimensions"),
        ("/v1/embeddings", {"input": "x", "dimensions": 2}, 400, "dimensions"),
        ("/score", {"queries": ["a", "b"], "documents": ["c"]}, 400, None),
        ("/score", {"queries": "a"}, 400, "body.documents"),
        ("/score", {"queries": "a", "documents": [5]}, 400, "body.documents.0"),
        ("/score", {"queries": "a", "documents": "b", "instruction": "judge"}, 400, "instruction"),
        ("/rerank", {"query": "a", "documents": ["b"], "top_n": -1}, 400, "body.top_n"),
        ("/tokenize", {}, 400, "body.prompt"),
        ("/detokenize", {"tokens": [-1]}, 400, "body.tokens.0"),
    ],
)  # fmt: skip
def test_refusals_name_the_field(
    server: ServerProcess, path: str, body: dict[str, Any], status: int, param: str | None
) -> None:
    assert refused(server, path, body, status)["param"] == param


def test_bodies_that_are_not_json_objects_are_refused(server: ServerProcess) -> None:
    for content in (b'{"inp', b"", b"[1]", b'"x"', b'{"input": "\\ud800"}'):
        reply = server.http.post("/classify", content=content, headers={"content-type": "application/json"})
        assert (reply.status_code, reply.json()["error"]["type"]) == (400, "Bad Request"), reply.text
    assert (
        server.http.post("/classify", content=b'{"input":"x"}', headers={"content-type": "text/plain"}).status_code
        == 400
    )
    many = {"model": "sums", "input": [[1]] * 5000}
    assert "5000" in refused(server, "/classify", many)["message"]


def test_a_key_is_required_and_request_ids_are_kept(server: ServerProcess) -> None:
    no_key = httpx.post(f"{server.url}/classify", json={"input": "x"})
    assert no_key.status_code == 401
    assert set(no_key.json()["error"]) == {"message", "type", "param", "code"}
    assert post(server, "/classify", {"input": "x", "request_id": "mine"})["id"] == "classify-mine"
    named = post(server, "/classify", {"input": "x", "request_id": "mine"}, **{"x-request-id": "theirs"})
    assert named["id"] == "classify-theirs"


def test_shared_paths_are_routed_by_the_body(server: ServerProcess) -> None:
    """The table of docs/protocols/README.md."""
    classify: dict[str, Any] = {"model": "sums"}
    assert "embedding" in post(server, "/classify", {**classify, "text": "1+2="})
    assert "embedding" in post(server, "/classify", {**classify, "input_ids": [5, 6]})
    assert post(server, "/classify", {**classify, "input": ["1+2="], "raw_scores": True})["object"] == "classify"
    assert post(server, "/classify", {**classify, "input": ["1+2="]})["object"] == "list"
    documents: dict[str, Any] = {"query": "1+2=", "documents": ["3", "4"]}
    assert isinstance(post(server, "/rerank", {"query": "1+2=", "texts": ["3", "4"]}), list)
    assert post(server, "/rerank", {**documents, "raw_scores": True})["object"] == "rerank"
    assert post(server, "/rerank", documents)["id"].startswith("score-")
    for path in ("/rerank", "/v1/rerank", "/v2/rerank"):  # LiteLLM and Cohere's clients send return_documents
        for body in (documents, {**documents, "return_documents": True}):
            assert post(server, path, body)["results"][0]["document"]["text"] in ("3", "4")
    assert post(server, "/v1/rerank", documents)["id"].startswith("score-")
    assert post(server, "/v1/score", {"queries": "a", "documents": ["b"]})["id"].startswith("score-")


def test_a_base_path_selects_the_protocol(server: ServerProcess) -> None:
    """Below a base URL that ends in the protocol's name, every body is read in that protocol."""
    documents: dict[str, Any] = {"query": "1+2=", "documents": ["3", "4"], "return_documents": True, "raw_scores": True}
    assert "raw_scores" in server.http.post("/vllm/rerank", json=documents).json()["error"]["message"]
    assert isinstance(post(server, "/sglang/v1/rerank", documents), list)
    assert post(server, "/infinity/rerank", documents)["object"] == "rerank"
    assert isinstance(post(server, "/tei/rerank", {"query": "1+2=", "texts": ["3"]}), list)
    assert server.http.post("/vllm/classify", json={"input": "1+2=", "raw_scores": True}).status_code == 400
    for base in ("vllm", "sglang", "tei", "infinity", "triton"):
        assert server.http.get(f"/{base}/health").status_code == 200
        assert server.http.get(f"/{base}/v1/models").json()["data"]
        assert server.http.get(f"/{base}/nowhere").status_code == 404
    assert server.http.post("/vllm/classify", json={}).json()["error"]["code"] == 400


def test_sagemaker_and_load_balancer_routes(server: ServerProcess) -> None:
    for path, body in (
        ("/classify", {"model": "sums", "input": "1+2="}),
        ("/score", {"queries": "1+2=", "documents": ["3", "4"]}),
        ("/rerank", {"query": "1+2=", "documents": ["3", "4"]}),
        ("/pooling", {"model": "sums", "input": "1+2=", "task": "classify"}),
    ):
        one, other = (post(server, each, body) for each in (path, "/invocations"))
        moving = {"id", "created"}
        assert {k: v for k, v in one.items() if k not in moving} == {k: v for k, v in other.items() if k not in moving}
    assert server.http.get("/ping").status_code == 200
    assert server.http.get("/load").json() == {"server_load": 0}
    long = server.http.post("/classify", json={"model": "sums", "input": "1" * 4000})
    assert "Please reduce the length of the input prompt" in long.json()["error"]["message"]


def test_an_answer_of_tool_calls_alone_is_scored(server: ServerProcess, moods: Any) -> None:
    """As vLLM does: no content is an empty text."""
    call = {"id": "c", "type": "function", "function": {"name": "add", "arguments": '{"a": 7}'}}
    question, answer = {"role": "user", "content": "7+8="}, {"role": "assistant", "tool_calls": [call]}
    for content in ({"content": None}, {"content": ""}, {}):
        chat = [question, {**answer, **content}]
        reply = post(server, "/classify", {"model": "moods", "messages": chat, "use_activation": False})
        ids = tiny.llama3().apply_chat_template([question, {"role": "assistant", "content": ""}], return_dict=False)
        assert reply["data"][0]["probs"] == pytest.approx(tiny.plain_class(moods, ids)[-1].tolist(), abs=5e-5)
        item = server.rewards([{"messages": chat}], "moods").json()["items"][0]
        good, bad = reply["data"][0]["probs"][2], reply["data"][0]["probs"][0]
        assert item["scores"][0] == pytest.approx(good - bad, abs=5e-5)


def test_items_are_counted(server: ServerProcess) -> None:
    before = server.metric("plaudit_items_total", model="sums")
    post(server, "/classify", {"model": "sums", "input": ["1+2=", "3+4="]})
    assert server.metric("plaudit_items_total", model="sums") - before == 2


def test_no_request_body_causes_a_server_error(server: ServerProcess) -> None:
    rng = random.Random(3)
    odd: list[Any] = [
        None, True, -1, 0, 2**62, 1.5, "", "x", "🙂" * 50, [], [[]], [None], ["a", 1], [[1], ["a"]], {}, {"a": {}},
        [{}], [{"role": "user", "content": None}], [{"role": 5}], [[[[1]]]], CHAT, "moods", "steps", "left", "base64",
        [5, 6, 7], "token_classify", [{"role": "assistant", "content": [{"type": "text", "text": 5}]}],
    ]  # fmt: skip
    fields = (
        "model", "input", "messages", "truncate_prompt_tokens", "truncation_side", "use_activation", "activation",
        "task", "encoding_format", "queries", "documents", "query", "top_n", "max_tokens_per_doc", "prompt", "tokens",
        "inputs", "texts", "raw_scores", "parameters", "request_id", "priority", "add_generation_prompt", "dimensions",
    )  # fmt: skip
    paths = (
        "/classify", "/pooling", "/v1/embeddings", "/score", "/rerank", "/tokenize", "/detokenize", "/predict", "/",
        "/infinity/classify", "/infinity/rerank",
    )  # fmt: skip
    for path in paths * 40:
        body = {field: rng.choice(odd) for field in rng.sample(fields, rng.randint(1, 6))}
        reply = server.http.post(path, json=body)
        assert reply.status_code < 500, (path, body, reply.text)
        assert reply.status_code == 200 or "error" in reply.json()
