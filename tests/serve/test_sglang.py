"""SGLang's routes on a real server: rewards as embeddings, log-probs exactly where SGLang puts them."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import httpx
import numpy as np
import pytest

from plaudit.core import Engine
from plaudit.models import load_tokenizer
from tests.reward import tiny
from tests.serve.process import ServerProcess

KEY = "sglang-key-1"
LABELS = ("angry", "calm", "glad")


@pytest.fixture(scope="module")
def module() -> Any:
    return tiny.model("outcome", tiny.llama3(), labels=LABELS)


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory, module: Any) -> Iterator[ServerProcess]:
    moods = tiny.write(tmp_path_factory.mktemp("moods"), module, tiny.llama3())
    models = {
        "sums": {"path": "sums"},
        "sums-policy": {"path": "sums-policy"},
        "moods": {"path": moods, "weights": {"glad": 1.0}},
    }
    with ServerProcess({"models": models, "api_keys": {"tester": KEY}}) as server:
        server.http.headers["x-api-key"] = KEY
        yield server


@pytest.fixture(scope="module")
def policy() -> Engine:
    return Engine.load("sums-policy", device="cpu")


def call(server: ServerProcess, path: str, body: Any, method: str = "POST") -> Any:
    reply = server.http.request(method, path, json=body)
    assert reply.status_code == 200, reply.text
    return reply.json()


def refused(server: ServerProcess, path: str, body: Any, status: int = 400) -> str:
    reply = server.http.post(path, json=body)
    assert reply.status_code == status, reply.text
    content = reply.json()
    if "/v1/" not in path and "error" in content:
        assert set(content) == {"error"}
        return str(content["error"]["message"])
    # "Bad Request": rejected by the schema; this error is flat on every path
    assert content["type"] == "Bad Request" or ("/v1/" in path and content["type"] == "BadRequestError")
    assert {**content, "message": "", "type": ""} == {
        "object": "error", "message": "", "type": "", "param": None, "code": status,
    }  # fmt: skip
    return str(content["message"])


def native(server: ServerProcess, ids: list[int]) -> float:
    return float(server.rewards([{"tokens": ids}]).json()["items"][0]["scores"][0])


TEXTS = ["7+8=15;#15", "7+8=16;#16", "1+2=3;#3"]


@pytest.mark.parametrize("path", ["/classify", "/encode"])
@pytest.mark.parametrize("method", ["POST", "PUT"])
def test_a_reward_is_an_embedding_of_one_number(server: ServerProcess, path: str, method: str) -> None:
    ids = [load_tokenizer("sums").encode(text) for text in TEXTS]
    expected = [native(server, row) for row in ids]
    one = call(server, path, {"text": TEXTS[0], "model": "somebody-elses-name"}, method)
    assert one["embedding"] == pytest.approx([expected[0]], abs=5e-5)
    assert one["meta_info"]["prompt_tokens"] == len(ids[0])
    assert one["meta_info"]["weight_version"].startswith("0-")
    for body in ({"text": TEXTS}, {"input_ids": ids}):
        replies = call(server, path, body, method)
        assert [r["embedding"][0] for r in replies] == pytest.approx(expected, abs=5e-5)
    assert call(server, path, {"input_ids": ids[1]}, method)["embedding"] == pytest.approx([expected[1]], abs=5e-5)
    assert len(call(server, path, {"text": TEXTS[:1]}, method)) == 1


def test_classify_returns_raw_labels_and_v1_classify_probabilities(server: ServerProcess, module: Any) -> None:
    text = "hello 1\nhell 2"
    ids = tiny.llama3().encode(text)
    logits = tiny.plain_class(module, ids)[-1]
    assert call(server, "/classify", {"text": text, "model": "moods"})["embedding"] == pytest.approx(
        logits.tolist(), abs=5e-5
    )
    (row,) = call(server, "/v1/classify", {"input": text, "model": "moods"})["data"]
    assert row["probs"] == pytest.approx(tiny.softmax(logits).tolist(), abs=5e-5)
    assert row["label"] == LABELS[int(logits.argmax())]
    assert row["num_classes"] == 3
    assert "always 1" in refused(server, "/v1/classify", {"input": text})
    scored = call(server, "/v1/score", {"query": "hello 1", "items": ["\nhell 2"], "model": "moods"})
    assert scored["scores"][0] == pytest.approx(logits.tolist(), abs=5e-5)
    assert scored["object"] == "scoring"


def test_generate_has_log_probs_where_sglang_has_them(server: ServerProcess, policy: Engine) -> None:
    ids = policy.tokenizer.encode("7+8+4=7+8=15;15+4=19;#19")
    (logprobs,) = policy.logprobs([ids])
    chosen = [policy.tokenizer.encode(text)[-1] for text in ("1", ";")]
    every = policy.score([ids], positions=[list(range(len(ids)))], columns=chosen, logprobs=True)[0]
    for start in (0, 1, 7, len(ids) - 1, len(ids)):
        body = {
            "input_ids": ids, "sampling_params": {"temperature": 0, "max_new_tokens": 0}, "return_logprob": True,
            "logprob_start_len": start, "token_ids_logprob": chosen,
        }  # fmt: skip
        meta = call(server, "/generate", body)["meta_info"]
        own, others = meta["input_token_logprobs"], meta["input_token_ids_logprobs"]
        assert [entry[1] for entry in own] == ids[start:]
        assert len(others) == len(own)
        for index, (entry, row) in enumerate(zip(own, others, strict=True)):
            if index == 0:
                assert entry[0] is None
                assert row is None
                continue
            assert entry[0] == pytest.approx(logprobs[start + index - 1], abs=1e-4)
            assert [e[1] for e in row] == chosen
            assert [e[0] for e in row] == pytest.approx(every[start + index - 1].tolist(), abs=1e-4)
        (last,) = meta["output_token_ids_logprobs"]
        assert [e[0] for e in last] == pytest.approx(every[-1].tolist(), abs=1e-4)
        assert meta["completion_tokens"] == 0
        assert meta["prompt_tokens"] == len(ids)


def test_slimes_request_to_a_teacher_returns_log_probs(server: ServerProcess, policy: Engine) -> None:
    """slime's rollout/on_policy_distillation.py posts this body and reads these fields."""
    ids = policy.tokenizer.encode("3+4=3+4=7;#7")
    body = {
        "input_ids": ids, "sampling_params": {"temperature": 1.0, "max_new_tokens": 0, "skip_special_tokens": False},
        "return_logprob": True, "logprob_start_len": 0,
    }  # fmt: skip
    meta = call(server, "/generate", body)["meta_info"]
    teacher = [entry[0] for entry in meta["input_token_logprobs"][1:]]
    assert teacher == pytest.approx(policy.logprobs([ids])[0].tolist(), abs=1e-4)


def test_batch_options_apply_to_all_or_to_each(server: ServerProcess, policy: Engine) -> None:
    ids = [policy.tokenizer.encode(text) for text in TEXTS[:2]]
    body: dict[str, Any] = {
        "text": TEXTS[:2], "sampling_params": {"max_new_tokens": 1}, "return_logprob": True,
        "logprob_start_len": [0, -1], "token_ids_logprob": [[5], [6, 7]], "return_text_in_logprobs": True,
    }  # fmt: skip
    first, second = (reply["meta_info"] for reply in call(server, "/generate", body))
    assert [e[1] for e in first["input_token_logprobs"]] == ids[0]
    assert first["input_token_logprobs"][1][2] == policy.tokenizer.decode([ids[0][1]])
    assert second["input_token_logprobs"] == []
    assert second["input_token_ids_logprobs"] == []
    assert [e[1] for e in second["output_token_ids_logprobs"][0]] == [6, 7]
    only = call(server, "/generate", {"text": TEXTS, "sampling_params": {"max_new_tokens": 0}})
    assert [set(r["meta_info"]) & {"input_token_logprobs", "output_token_logprobs"} for r in only] == [set()] * 3
    assert "logprob_start_len has 2 entries" in refused(server, "/generate", {**body, "text": TEXTS})


def test_label_tokens_are_scored_by_their_probability(server: ServerProcess, policy: Engine) -> None:
    labels = [policy.tokenizer.encode(text)[-1] for text in ("3", "4", "5")]
    query, items = "1+2=", ["1+2=", "1+2=3;#"]
    ids = [policy.tokenizer.encode(query + item) for item in items]
    logs = [row.tolist() for row in policy.score(ids, columns=labels, logprobs=True)]
    body = {"query": query, "items": items, "label_token_ids": labels, "model": "sums-policy"}
    plain = call(server, "/v1/score", body)
    assert np.allclose(plain["scores"], np.exp(logs), atol=5e-5)
    assert plain["usage"]["prompt_tokens"] == sum(map(len, ids))
    shares = call(server, "/v1/score", {**body, "apply_softmax": True})["scores"]
    assert np.allclose(shares, tiny.softmax(np.array(logs)), atol=5e-5)
    by_ids = {"query": ids[0], "items": [[], ids[1][-2:]], "label_token_ids": labels, "item_first": True}
    second = policy.score([ids[1][-2:] + ids[0]], columns=labels, logprobs=True)[0]
    assert np.allclose(call(server, "/v1/score", by_ids)["scores"], np.exp([logs[0], second]), atol=5e-5)


def test_reranked_documents_are_ordered_best_first(server: ServerProcess) -> None:
    tokenizer = load_tokenizer("sums")
    documents = ["7+8=16;#16", "7+8=15;#15", "#9"]
    values = [native(server, tokenizer("7+8=", d)["input_ids"]) for d in documents]
    for path in ("/sglang/v1/rerank", "/v1/rerank"):
        body = {"query": "7+8=", "documents": documents}
        ranked = call(server, path, body) if path.startswith("/sglang") else server.http.put(path, json=body).json()
        assert [r["index"] for r in ranked] == sorted(range(3), key=lambda i: -values[i])
        assert [r["score"] for r in ranked] == pytest.approx(sorted(values, reverse=True), abs=5e-5)
        assert all(r["document"] == documents[r["index"]] for r in ranked)
    fewer = call(
        server, "/sglang/v1/rerank", {"query": "7+8=", "documents": documents, "return_documents": False, "top_n": 1}
    )
    assert len(fewer) == 1
    assert "document" not in fewer[0]


@pytest.mark.parametrize(
    ("path", "body", "message"),
    [
        ("/classify", {"text": 3}, "$.text"),
        ("/classify", {"text": []}, "text is an empty list"),
        ("/classify", {"text": "a", "input_ids": [1]}, "not both"),
        ("/classify", {"input_ids": [[1], 2]}, "input_ids mixes"),
        ("/classify", {"input_ids": [10**6]}, "input_ids[0]: token 0 is 1000000"),
        ("/classify", {"text": ["1+1=", "1" * 4000]}, "text[1]: "),
        ("/generate", {"text": "1+1="}, "max_new_tokens is missing"),
        ("/generate", {"text": "1+1=", "sampling_params": {"max_new_tokens": 16}}, "max_new_tokens is 16"),
        ("/generate", {"text": "1+1=", "sampling_params": {"max_new_tokens": 1}}, "max_new_tokens is 1"),
        ("/generate", {"text": "1", "sampling_params": {"max_new_tokens": 0}, "stream": True}, "stream is true"),
        ("/generate", {"text": "1", "sampling_params": {"max_new_tokens": 0}, "top_logprobs_num": 5}, "top_logprobs"),
        ("/generate", {"text": "1", "sampling_params": {"max_new_tokens": 0}, "return_logprob": True,
                       "logprob_start_len": 99}, "logprob_start_len is 99"),
        ("/generate", {"text": "1", "sampling_params": {"max_new_tokens": 0}, "return_logprob": True,
                       "token_ids_logprob": [999999]}, "token_ids_logprob has 999999"),
        ("/v1/score", {"query": "a", "items": [[1]]}, "both be texts"),
        ("/v1/score", {"query": "a", "items": []}, "items is empty"),
        ("/v1/rerank", {"query": "a", "documents": ["b"], "instruct": "c"}, "instruct is not supported"),
        ("/sglang/v1/rerank", {"query": "a", "documents": []}, "documents is empty"),
    ],
)  # fmt: skip
def test_invalid_requests_name_the_field(server: ServerProcess, path: str, body: Any, message: str) -> None:
    assert message in refused(server, path, body)


def test_bodies_in_vllms_format_go_to_vllm(server: ServerProcess) -> None:
    text = TEXTS[0]
    raw = call(server, "/classify", {"text": text})["embedding"][0]
    reply = call(server, "/classify", {"input": text, "model": "sums", "use_activation": False})
    assert reply["data"][0]["probs"] == pytest.approx([raw], abs=5e-5)
    assert "results" in call(server, "/v1/rerank", {"query": "7+8=", "documents": ["#15"], "model": "sums"})


def test_information_health_and_keys(server: ServerProcess) -> None:
    for path in ("/get_model_info", "/model_info", "/server_info"):
        info = server.http.get(path).json()
        assert info["model_path"] == "sums-policy"
        assert info["is_generation"] is True
    with httpx.Client(base_url=server.url) as bare:
        assert bare.get("/health_generate").status_code == 200
        assert bare.get("/get_model_info").status_code == 401
        assert bare.post("/classify", json={"text": "1"}).status_code == 401
        denied = bare.post("/generate", json={}, headers={"x-api-key": "wrong"})
        assert denied.status_code == 401
        assert set(denied.json()) == {"error"}
        assert bare.get("/get_model_info", headers={"authorization": f"Bearer {KEY}"}).status_code == 200
    assert server.http.post("/flush_cache").status_code == 404


def test_a_model_for_log_probs_gives_no_score(server: ServerProcess) -> None:
    reply = server.rewards([{"text": "1+1="}], "sums-policy")
    assert reply.status_code == 422
    assert "returns no scores" in reply.json()["error"]["message"]
    kinds = {m["id"]: m["kind"] for m in server.http.get("/v1/models").json()["data"]}
    assert kinds["sums-policy"] == "logprobs"
    assert "needs an outcome" in refused(server, "/classify", {"text": "1", "model": "sums-policy"})


def test_a_second_request_for_the_last_token_uses_the_cache(server: ServerProcess, policy: Engine) -> None:
    ids = policy.tokenizer.encode("9+9+9+9+9=9+9=18;18+9=27;27+9=36;36+9=45;#45")
    body = {"input_ids": ids, "sampling_params": {"max_new_tokens": 0}, "return_logprob": True}
    call(server, "/generate", {**body, "token_ids_logprob": [5]})
    before = server.metric("plaudit_tokens_total", model="sums-policy", kind="computed")
    (last,) = call(server, "/generate", {**body, "token_ids_logprob": [6]})["meta_info"]["output_token_ids_logprobs"]
    computed = server.metric("plaudit_tokens_total", model="sums-policy", kind="computed") - before
    assert computed < 20 < len(ids)
    assert last[0][0] == pytest.approx(policy.score([ids], columns=[6], logprobs=True)[0][0], abs=1e-4)
