"""Requests of ETS and REBASE to their reward server, by their own client's loop, compared with plain transformers."""

from __future__ import annotations

import json
import urllib.error
import urllib.request
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import numpy as np
import pytest
import torch
from transformers import PreTrainedTokenizerFast

from tests.reward import tiny
from tests.serve.process import ServerProcess

KEY = "rebase-key-1"
QUESTION = "Janet has 3 eggs."
STEPS = ["Step 1: 1+2 = 3 ки\n", "Step 2: 3*3 = 9 ки\n", "Step 3: so 9 ки\n"]


class RuntimeEndpoint:
    """The calls of sglang 0.1.14's RuntimeEndpoint: urllib, no timeout, no retry."""

    def __init__(self, base_url: str, api_key: str | None = None) -> None:
        self.base_url = base_url
        self.api_key = api_key
        self.model_info = json.loads(self._request("/get_model_info"))

    def _request(self, path: str, body: Any = None) -> bytes:
        headers = {"Content-Type": "application/json; charset=utf-8"}
        if self.api_key is not None:
            headers["X-API-Key"] = self.api_key
        data = None if body is None else bytes(json.dumps(body), encoding="utf-8")
        request = urllib.request.Request(self.base_url + path, headers=headers, data=data)
        with urllib.request.urlopen(request) as response:
            content: bytes = response.read()
        return content

    def cache_prefix(self, prefix: str) -> None:
        self._request("/generate", {"text": prefix, "sampling_params": {"max_new_tokens": 0}})

    def generate(self, text: Any, **extra: Any) -> Any:
        params = {
            "skip_special_tokens": True, "max_new_tokens": 0, "stop": [], "temperature": 1.0, "top_p": 1.0, "top_k": -1,
            "frequency_penalty": 0.0, "presence_penalty": 0.0, "ignore_eos": False, "regex": None, "forward_only": True,
            **extra,
        }  # fmt: skip
        return json.loads(self._request("/generate", {"text": text, "sampling_params": params}))

    def score(self, text: str, require: Any) -> list[float]:
        obj = self.generate(text, logits_require_id=require)
        assert obj["forward_only"]
        assert obj["text"] == ""
        return list(obj["scores"])


@pytest.fixture(scope="module")
def tokenizer() -> PreTrainedTokenizerFast:
    return tiny.sentence_piece()


@pytest.fixture(scope="module")
def module(tokenizer: PreTrainedTokenizerFast) -> Any:
    """Like the published Llemma reward model: its head repeats two rows."""
    module = tiny.model("causal", tokenizer)
    with torch.no_grad():
        weight = module.lm_head.weight
        weight.copy_(weight[:2].repeat(len(weight) // 2, 1))
    return module


@pytest.fixture(scope="module")
def server(
    tmp_path_factory: pytest.TempPathFactory, module: Any, tokenizer: PreTrainedTokenizerFast
) -> Iterator[ServerProcess]:
    path = tiny.write(tmp_path_factory.mktemp("llemma"), module, tokenizer)
    models = {"llemma-prm": {"path": path, "kind": "process", "format": "llemma"}}
    with ServerProcess({"models": models, "api_keys": {"search": KEY}}) as server:
        server.http.headers["x-api-key"] = KEY
        yield server


@pytest.fixture(scope="module")
def client(server: ServerProcess) -> RuntimeEndpoint:
    return RuntimeEndpoint(server.url, KEY)


@pytest.fixture(scope="module")
def tag(tokenizer: PreTrainedTokenizerFast) -> int:
    return int(tokenizer.encode("ки")[-1])


def by_tag(module: Any, ids: list[int], tag: int) -> np.ndarray:
    """hf_score.py: the sigmoid of the mean over the vocabulary, at every tag."""
    return tiny.sigmoid(tiny.plain(module, ids)[[i for i, t in enumerate(ids) if t == tag]].mean(axis=1))


def by_pair(module: Any, ids: list[int], positions: list[int], pair: list[int]) -> list[float]:
    return tiny.softmax(tiny.plain(module, ids)[positions][:, pair])[:, 0].tolist()


def test_a_growing_path_has_a_score_for_every_tag_with_any_cache_state(
    client: RuntimeEndpoint, module: Any, tokenizer: PreTrainedTokenizerFast, tag: int
) -> None:
    assert client.model_info["model_path"] == "llemma-prm"
    text = f"{QUESTION} "
    client.cache_prefix(text)
    for depth, step in enumerate(STEPS, 1):
        text += step
        expected = by_tag(module, tokenizer.encode(text), tag)
        assert len(expected) == depth
        assert client.score(text, tag) == pytest.approx(expected.tolist(), abs=5e-5)
    # The fork answers the same text sent again with an empty list.
    assert client.score(text, tag) == client.score(text, tag) == pytest.approx(expected.tolist(), abs=5e-5)


def test_an_added_step_computes_only_its_own_tokens(
    server: ServerProcess, client: RuntimeEndpoint, tokenizer: PreTrainedTokenizerFast, tag: int
) -> None:
    def computed() -> float:
        return server.metric("plaudit_tokens_total", model="llemma-prm", kind="computed")

    for require in (tag, [5, 6, tag]):
        text = f"{QUESTION} {require} "
        client.cache_prefix(text)
        for depth in range(1, 9):
            before, text = computed(), text + STEPS[depth % 3]
            assert len(client.score(text, require)) == depth
            assert computed() - before <= len(tokenizer.encode(STEPS[depth % 3])) + 2


@pytest.mark.parametrize("door", ["/v1/rewards", "/pooling", "/v2/models/llemma-prm/infer"])
def test_an_added_step_computes_only_its_own_tokens_on_other_routes(
    server: ServerProcess, tokenizer: PreTrainedTokenizerFast, door: str
) -> None:
    def computed() -> float:
        return server.metric("plaudit_tokens_total", model="llemma-prm", kind="computed")

    def send(ids: list[int]) -> None:
        rows = [("tokens", [1, len(ids)], ids), ("sequence_lengths", [1, 1], [len(ids)])]
        inputs = [{"name": name, "shape": shape, "datatype": "INT64", "data": data} for name, shape, data in rows]
        bodies: dict[str, Any] = {
            "/v1/rewards": {"model": "llemma-prm", "items": [{"tokens": ids}]},
            "/pooling": {"model": "llemma-prm", "input": [ids]},
            "/v2/models/llemma-prm/infer": {"inputs": inputs},
        }
        reply = server.http.post(door, json=bodies[door])
        assert reply.status_code == 200, reply.text

    text = f"{QUESTION} {door} {STEPS[0]}"
    send(tokenizer.encode(text))
    for depth in range(1, 6):
        before, text = computed(), text + STEPS[depth % 3]
        send(tokenizer.encode(text))
        assert computed() - before <= len(tokenizer.encode(STEPS[depth % 3])) + 2
    before = computed()
    send(tokenizer.encode(text))
    assert computed() == before


def test_the_scores_are_those_of_the_native_route(server: ServerProcess, client: RuntimeEndpoint, tag: int) -> None:
    text = f"{QUESTION} " + "".join(STEPS)
    reply = server.rewards([{"text": text}], "llemma-prm", steps=True).json()
    assert client.score(text, tag) == pytest.approx(reply["items"][0]["steps"][0], abs=5e-5)


def test_two_tokens_at_every_tag_or_at_a_position(
    client: RuntimeEndpoint, module: Any, tokenizer: PreTrainedTokenizerFast, tag: int
) -> None:
    text = f"{QUESTION} " + "".join(STEPS)
    ids = tokenizer.encode(text)
    plus, minus = (int(tokenizer.convert_tokens_to_ids(t)) for t in ("▁+", "▁-"))
    assert (plus - minus) % 2  # one from each of the head's two rows
    positions = [i for i, token in enumerate(ids) if token == tag]
    assert client.score(text, [plus, minus, tag]) == pytest.approx(
        by_pair(module, ids, positions, [plus, minus]), abs=5e-5
    )
    for back in (1, 3, len(ids)):
        expected = by_pair(module, ids, [len(ids) - back], [plus, minus])
        assert client.score(text, [plus, minus, -back]) == pytest.approx(expected, abs=5e-5)


def test_concurrent_requests_do_not_mix(
    client: RuntimeEndpoint, module: Any, tokenizer: PreTrainedTokenizerFast, tag: int
) -> None:
    """In the fork the options of the last request apply to its whole batch."""
    texts = [f"{QUESTION} {i} " + "".join(STEPS[: 1 + i % 3]) for i in range(24)]
    letters = [int(tokenizer.convert_tokens_to_ids(t)) for t in ("S", "t", "e", "p")]
    requires: list[Any] = [tag, [letters[0], letters[1], tag], [letters[1], letters[2], -2], [5, 6, -1]]
    with ThreadPoolExecutor(12) as pool:
        replies = list(pool.map(lambda i: client.score(texts[i], requires[i % 4]), range(24)))
    for i, scores in enumerate(replies):
        ids, require = tokenizer.encode(texts[i]), requires[i % 4]
        if isinstance(require, int):
            expected = by_tag(module, ids, require).tolist()
        elif require[2] >= 0:
            expected = by_pair(module, ids, [p for p, t in enumerate(ids) if t == require[2]], require[:2])
        else:
            expected = by_pair(module, ids, [len(ids) + require[2]], require[:2])
        assert scores == pytest.approx(expected, abs=5e-5)


def test_a_list_gets_a_list_and_options_may_be_at_any_level(
    server: ServerProcess, client: RuntimeEndpoint, tag: int
) -> None:
    texts = [f"{QUESTION} " + "".join(STEPS[:n]) for n in (1, 2, 3)]
    single = [client.score(text, tag) for text in texts]
    listed = client.generate(texts, logits_require_id=tag)
    assert [reply["scores"] for reply in listed] == single
    top = {"text": texts[1], "sampling_params": {"max_new_tokens": 0}, "forward_only": True, "logits_require_id": tag}
    reply = server.http.post("/generate", json=top).json()
    assert reply["scores"] == single[1]
    assert reply["meta_info"]["prompt_tokens"] > 0
    each = [{"forward_only": True, "logits_require_id": r} for r in (tag, [5, 6, -1], tag)]
    mixed = server.http.post("/generate", json={"text": texts, "sampling_params": each}).json()
    assert [len(reply["scores"]) for reply in mixed] == [1, 1, 3]
    assert mixed[1]["scores"] == client.score(texts[1], [5, 6, -1])


def test_a_step_without_a_tag_has_an_empty_list(client: RuntimeEndpoint, tag: int) -> None:
    """ETS's client does not handle errors: its thread would end, and the search would wait for it forever."""
    for require in (tag, [5, 6, tag], [5, 6, -999]):
        reply = client.generate("Step 1: no tag", logits_require_id=require)
        assert (reply["scores"], reply["forward_only"], reply["text"]) == ([], True, "")
        assert reply["meta_info"]["prompt_tokens"] > 0
        two = client.generate([f"{QUESTION} {STEPS[0]}", "b"], logits_require_id=require)
        assert [len(each["scores"]) for each in two] == [0 if require == [5, 6, -999] else 1, 0]


def test_a_later_step_without_a_tag_does_not_get_its_parents_score(
    server: ServerProcess, client: RuntimeEndpoint, tag: int
) -> None:
    """The search takes the last score of the list: a step that hit its token limit must not get its parent's score."""
    parent = f"{QUESTION} {STEPS[0]}{STEPS[1]}"
    for require in (tag, [5, 6, tag]):
        assert len(client.score(parent, require)) == 2
        before = server.metric("plaudit_errors_total", type="no_steps")
        assert client.score(f"{parent}Step 3: cut off in the mid", require) == []
        assert server.metric("plaudit_errors_total", type="no_steps") == before + 1
        assert client.score(f"{parent} \n", require) == client.score(parent, require), "blanks are no step"


def test_every_text_that_a_search_can_send_is_answered(
    server: ServerProcess, client: RuntimeEndpoint, tag: int
) -> None:
    """Untagged, empty, overlong and repeated texts, sent by threads as in the search, all get status 200."""
    long = f"{QUESTION} " + "Step 1: 1+2 = 3 ки\n" * 400
    texts = [f"{QUESTION} {STEPS[0]}", f"{QUESTION} no tag", "", long, f"{QUESTION} {STEPS[0]}", long]
    before = server.metric("plaudit_errors_total", type="too_long")
    for require in (tag, [5, 6, tag], [5, 6, -1]):
        with ThreadPoolExecutor(len(texts)) as threads:
            lists = list(threads.map(client.score, texts, [require] * len(texts)))
        assert lists[3] == lists[5] == []
        assert lists[0] == lists[4] != []
        if require != [5, 6, -1]:
            assert lists[1] == lists[2] == []
    assert server.metric("plaudit_errors_total", type="too_long") == before + 6


def test_invalid_logits_require_id_is_rejected(server: ServerProcess, tag: int) -> None:
    def refused(text: Any, require: Any) -> str:
        params = {"max_new_tokens": 0, "forward_only": True, "logits_require_id": require}
        reply = server.http.post("/generate", json={"text": text, "sampling_params": params})
        assert reply.status_code == 400, reply.text
        return str(reply.json()["error"]["message"])

    assert f"ends with {tag} ('ки')" in refused("a ки", 8094)
    assert "logits_require_id has 99999" in refused("a ки", [5, 99999, tag])
    for wrong in (None, "8094", 1.5, [1, 2], [1, -2, 3], True):
        assert "logits_require_id is" in refused("a ки", wrong)


def test_requests_without_the_key_get_401(server: ServerProcess) -> None:
    with pytest.raises(urllib.error.HTTPError, match="401"):
        RuntimeEndpoint(server.url)
