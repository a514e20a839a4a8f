"""Replayed clients of OpenRLHF, slime and NeMo Gym: what they send, how they use the reply, and each protocol's errors
for client mistakes."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest

from plaudit.serve.protocols import openrlhf
from tests.serve.hostile import Target
from tests.serve.mistakes import FORMS, MISTAKES, message_of, replies_to_mistakes, verify
from tests.serve.process import ServerProcess
from tests.serve.test_native import chains

LIMIT = 256  # maximum tokens of the embedded model


@pytest.fixture(scope="module")
def server() -> Iterator[ServerProcess]:
    with ServerProcess() as server:
        yield server


@pytest.fixture(scope="module")
def target(server: ServerProcess) -> Target:
    return Target(server)


def rendered(prompt: str, response: str) -> str:
    """The text as a trainer decodes its samples, with control tokens."""
    return f"<bos>{prompt}{response}<eos>"


@pytest.fixture(scope="module")
def texts() -> list[str]:
    return [rendered(*pair) for pair in chains(10)]


@pytest.fixture(scope="module")
def expected(server: ServerProcess) -> list[float]:
    items = [{"prompt": p, "responses": [r]} for p, r in chains(10)]
    return [item["scores"][0] for item in server.rewards(items).json()["items"]]


def get_reward(server: ServerProcess, body: Any, query: str = "") -> dict[str, Any]:
    reply = server.http.post(f"/get_reward{query}", json=body)
    assert reply.status_code == 200, reply.text
    content: dict[str, Any] = reply.json()
    assert set(content) == {"rewards", "scores", "extra_logs"}
    return content


# OpenRLHF


def test_the_oldest_client_sends_queries_and_reads_rewards(
    server: ServerProcess, texts: list[str], expected: list[float]
) -> None:
    assert get_reward(server, {"query": texts})["rewards"] == pytest.approx(expected, abs=5e-5)


def test_the_middle_client_shards_a_batch_over_urls(
    server: ServerProcess, texts: list[str], expected: list[float]
) -> None:
    """Contiguous shards with prompts and labels; the lists of all replies are concatenated."""
    urls, rewards = 3, []
    size = -(-len(texts) // urls)
    for start in range(0, len(texts), size):
        shard = texts[start : start + size]
        reply = get_reward(server, {"query": shard, "prompts": ["p"] * len(shard), "labels": [None] * len(shard)})
        assert len(reply["rewards"]) == len(reply["scores"]) == len(shard)
        rewards += reply["rewards"]
    assert rewards == pytest.approx(expected, abs=5e-5)


def test_the_newest_client_sends_one_sample_and_empty_lists_to_the_other_urls(
    server: ServerProcess, texts: list[str], expected: list[float]
) -> None:
    for text, value in zip(texts, expected, strict=True):
        replies = [
            get_reward(server, {"query": query, "prompts": query, "labels": query}) for query in ([text], [], [])
        ]
        assert replies[1] == replies[2] == {"rewards": [], "scores": [], "extra_logs": {}}
        info = replies[0]
        assert info["rewards"] == [pytest.approx(value, abs=5e-5)]
        assert info.get("scores", info["rewards"]) == info["rewards"]


def test_a_query_is_read_as_rendered_and_nothing_is_added(server: ServerProcess) -> None:
    from plaudit.models import load_tokenizer

    ids = load_tokenizer("sums").encode("1+2=3", add_special_tokens=False)
    (native,) = server.rewards([{"tokens": ids}]).json()["items"][0]["scores"]
    assert get_reward(server, {"query": ["1+2=3"]})["rewards"] == [pytest.approx(native, abs=5e-5)]


def test_a_long_query_is_rejected_or_truncated_as_the_url_says(target: Target) -> None:
    text = "1+" * LIMIT
    error = target.refused(target.server.http.post("/get_reward", json={"query": ["1+2=3", text]}), 422, "too_long")
    assert error["message"].startswith("query[1]")
    sides = {
        side: get_reward(target.server, {"query": [text + "2"]}, f"?truncate={side}")["rewards"][0]
        for side in ("left", "right")
    }
    assert sides["left"] != sides["right"]
    target.refused(target.server.http.post("/get_reward?truncate=middle", json={"query": []}), 422, "invalid_request")


@pytest.mark.parametrize(
    ("body", "type"),
    [
        (b"", "invalid_request"),
        (b"[]", "invalid_request"),
        (b"{}", "invalid_request"),
        (b'{"query": "1+2=3"}', "invalid_request"),
        (b'{"query": [1]}', "invalid_request"),
        (b'{"query": [null]}', "invalid_request"),
        (b'{"query": [""]}', "empty"),
        (b'{"query": ' + b"[" * 100_000, "invalid_request"),
    ],
)
def test_bad_queries_are_refused(target: Target, body: bytes, type: str) -> None:
    target.refused(target.server.http.post("/get_reward", content=body), 422, type)


def test_too_many_queries_are_refused_before_they_are_tokenised(target: Target) -> None:
    error = target.refused(
        target.server.http.post("/get_reward", json={"query": ["1+2=3"] * 4097}), 422, "too_many_items"
    )
    assert "4096" in error["message"]


def test_attributes_of_all_queries_are_logged() -> None:
    from plaudit.records import Score

    results = [Score(1.0, attributes={"helpful": 0.5, "safe": 2.0}), Score(2.0, attributes={"helpful": 1, "safe": 3.0})]
    assert openrlhf.attribute_logs(results) == {"helpful": [0.5, 1.0], "safe": [2.0, 3.0]}


# slime


def remote_rm(server: ServerProcess, body: Any, query: str = "") -> Any:
    reply = server.http.post(f"/remote_rm{query}", json=body)
    assert reply.status_code == 200, reply.text
    assert reply.headers["content-type"] == "application/json"  # aiohttp's json() checks it
    return reply.json()


def test_slime_reads_a_bare_number(server: ServerProcess, expected: list[float]) -> None:
    for (prompt, response), value in zip(chains(10), expected, strict=True):
        reward = remote_rm(server, {"prompt": prompt, "response": response, "label": None})
        assert isinstance(reward, float)
        assert reward == pytest.approx(value, abs=5e-5)


def test_an_already_rendered_prompt_is_not_scored_as_text(server: ServerProcess, expected: list[float]) -> None:
    """As slime sends it with --apply-chat-template and the plain URL."""
    sample = {"prompt": "<bos>7+8+4=", "response": "7+8=15;15+4=19;#19<eos>", "label": None}
    reply = server.http.post("/remote_rm", json=sample)
    assert reply.status_code == 422
    assert "begins with '<bos>', a control token" in reply.text
    assert "?rendered=true" in reply.text
    as_text = server.http.post("/remote_rm?rendered=false", json=sample)
    assert as_text.json() != pytest.approx(server.http.post("/remote_rm?rendered=true", json=sample).json(), abs=0.1)


def test_slime_reads_a_key_and_rendered_text(server: ServerProcess, expected: list[float]) -> None:
    prompt, response = chains(1)[0]
    sample = {"prompt": f"<bos>{prompt}", "response": f"{response}<eos>", "label": "7"}
    reply = remote_rm(server, sample, "?key=reward&rendered=true")
    assert reply == {"reward": pytest.approx(expected[0], abs=5e-5)}


def test_control_strings_in_an_unrendered_sample_stay_text(server: ServerProcess) -> None:
    sample = {"prompt": "1+2=", "response": "1+2=3;#3<eos>", "label": None}
    (native,) = server.rewards([{"prompt": "1+2=", "responses": ["1+2=3;#3<eos>"]}]).json()["items"][0]["scores"]
    assert remote_rm(server, sample) == pytest.approx(native, abs=5e-5)
    assert remote_rm(server, sample, "?rendered=true") != pytest.approx(native, abs=1e-3)


@pytest.mark.parametrize(
    ("body", "query", "type"),
    [
        (b"", "", "invalid_request"),
        (b"{}", "", "invalid_request"),
        (b'{"prompt": "1+2="}', "", "invalid_request"),
        (b'{"prompt": 1, "response": "3"}', "", "invalid_request"),
        (b'{"prompt": ["1"], "response": "3"}', "", "invalid_request"),
        (b'{"prompt": [{"role": "user", "content": "1"}], "response": "3"}', "?rendered=true", "invalid_request"),
        (b'{"prompt": "1+2=", "response": "3"}', "?rendered=1", "invalid_request"),
        (b'{"prompt": "1+2=", "response": "3"}', "?truncate=yes", "invalid_request"),
        (b'{"prompt": "1+2=", "response": "' + b"1+" * LIMIT + b'"}', "", "too_long"),
    ],
)
def test_bad_samples_are_refused(target: Target, body: bytes, query: str, type: str) -> None:
    target.refused(target.server.http.post(f"/remote_rm{query}", content=body), 422, type)


def test_messages_become_a_conversation() -> None:
    messages = [{"role": "user", "content": "1+2?"}]
    body = b'{"prompt": [{"role": "user", "content": "1+2?"}], "response": "3", "label": 3}'
    item = openrlhf.decode(body, openrlhf.Sample, "").item("false", None)
    assert (item.prompt, item.response, item.truth) == (tuple(messages), "3", 3)


# Rules, and keys


def test_a_rule_gets_the_label_and_only_open_protocols_need_no_key() -> None:
    tree = {
        "models": {"digits": {"kind": "rule", "rule": "exact", "answer": r"#(\d+)"}},
        "aliases": {"reward_model": "digits"},
        "api_keys": {"trainer": "secret-of-the-trainer"},
        "allow_open": ["openrlhf"],
    }
    with ServerProcess(tree) as server:
        queries = ["<bos>#7:1+2=#3", "<bos>#7:1+2=#4"]
        body = {"query": queries, "prompts": ["#7:1+2="] * 2, "labels": ["3", "3"]}
        assert get_reward(server, body)["rewards"] == [1.0, 0.0]  # openrlhf needs no key here
        for missing in ({"query": queries}, {**body, "prompts": ["4+5=", "4+5="]}, {**body, "labels": [None, None]}):
            unreadable = server.http.post("/get_reward", json=missing)
            assert unreadable.status_code == 422, unreadable.text
            assert "query[0]" in unreadable.json()["error"]["message"]
        sample = {"prompt": "1+2=", "response": "1+2=3;#3", "label": "3"}
        refused = server.http.post("/remote_rm", json=sample)
        assert refused.status_code == 401
        assert refused.json()["error"]["type"] == "unauthorized"
        key = httpx.Headers({"authorization": "Bearer secret-of-the-trainer"})
        assert server.http.post("/remote_rm", json=sample, headers=key).json() == 1.0
        assert server.http.post("/v1/rewards", json={"items": [{"text": "1"}]}).status_code == 401


# The documentation


PAGES = Path(__file__).parents[2] / "docs" / "protocols"


@pytest.mark.parametrize("page", ["nemo-aligner", "openrlhf", "slime"])
def test_documented_examples_get_the_documented_replies(server: ServerProcess, page: str) -> None:
    text = (PAGES / f"{page}.md").read_text()
    pattern = r"```bash\ncurl -s '?localhost:5555([^ ']+)'? -d '(.*?)'\n```\n\n```text\n(.*?)\n```"
    examples = re.findall(pattern, text, re.DOTALL)
    assert examples
    for path, body, expected in examples:
        reply = server.http.post(path, content=body)
        assert reply.status_code == 200, reply.text
        assert _rounded(reply.json()) == _rounded(json.loads(expected))


def _rounded(value: Any) -> Any:
    if isinstance(value, float):
        return round(value, 4)
    if isinstance(value, list):
        return [_rounded(item) for item in value]
    return {name: _rounded(item) for name, item in value.items()} if isinstance(value, dict) else value


# NeMo Gym


def test_nemo_gym_verify_returns_the_request_with_the_reward_of_the_chat(server: ServerProcess) -> None:
    thought = {"type": "reasoning", "id": "t", "summary": []}
    for number, (prompt, response) in enumerate(chains(3)):
        messages = [{"role": "user", "content": prompt}]
        item = {"messages": [*messages, {"role": "assistant", "content": response}]}
        (expected,) = server.rewards([item]).json()["items"][0]["scores"]
        parts = [{"role": "user", "content": [{"type": "input_text", "text": prompt}]}]
        for form in (prompt, messages, parts):
            body = verify(form, thought, message_of(response), verifier_metadata={"row": number})
            reply = server.http.post("/verify", json=body)
            assert reply.status_code == 200, reply.text
            content = reply.json()
            assert content.pop("reward") == pytest.approx(expected, abs=5e-5)
            assert content == body


def test_nemo_gym_session_ids_are_echoed_and_a_missing_reward_is_an_error(server: ServerProcess) -> None:
    assert server.http.post("/seed_session", json={}).json() == {}
    seed = {"resources_session_id": "s1", "episode_id": "e", "task_id": "t", "task_data": {}}
    assert server.http.post("/nemo-gym/seed_session", json=seed).json() == {"resources_session_id": "s1"}
    image = {"role": "user", "content": [{"type": "input_image", "image_url": "x"}]}
    for body, words in (
        ({}, "responses_create_params"),
        (verify("1+2="), "assistant"),
        (verify("1+2=", {"type": "web_search_call"}), "'web_search_call'"),
        (verify([image], message_of("#3")), "input[0] has content that is not text"),
    ):
        reply = server.http.post("/verify", json=body)
        assert reply.status_code == 422, reply.text
        assert set(reply.json()) == {"detail"}
        assert words in reply.json()["detail"]


# Mistakes


@pytest.mark.parametrize("name", FORMS)
def test_twelve_client_mistakes_get_the_protocols_own_errors(server: ServerProcess, name: str) -> None:
    replies = replies_to_mistakes(server.http, FORMS[name], f"/{name}")
    assert set(replies) == set(MISTAKES)
    assert {mistake: reply.status_code for mistake, reply in replies.items()} == FORMS[name].statuses
    for mistake, reply in replies.items():
        if reply.status_code != 200:
            assert FORMS[name].shape(reply.json()), (mistake, reply.text)
