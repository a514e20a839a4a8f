"""A score is the same alone, in any batch, with and without cache, as text, messages and tokens, as JSON and binary."""

from __future__ import annotations

import html
import json
import struct
from collections.abc import Iterator

import httpx
import numpy as np
import pytest

from plaudit.records import Item
from plaudit.reward import load_reward
from plaudit.worlds import get_world
from tests.serve.process import ServerProcess


@pytest.fixture(scope="module")
def server() -> Iterator[ServerProcess]:
    with ServerProcess() as server:
        yield server


def chains(count: int) -> list[tuple[str, str]]:
    world = get_world("sums")
    return [(p.prompt, text) for p, text in (world.demonstration("heldout", i) for i in range(count))]


@pytest.fixture(scope="module")
def local() -> dict[str, list[float]]:
    """The scores that the same models give in this process."""
    items = [Item(prompt=prompt, response=response) for prompt, response in chains(24)]
    outcome, steps = load_reward("sums"), load_reward("sums-steps")
    return {
        "sums": [s.value for s in outcome.score(items)],  # type: ignore[union-attr]
        "sums-steps": [s.aggregate for s in steps.score(items)],  # type: ignore[union-attr]
    }


@pytest.mark.parametrize("model", ["sums", "sums-steps"])
def test_single_batched_and_grouped_scores_equal_those_of_the_in_process_model(
    server: ServerProcess, local: dict[str, list[float]], model: str
) -> None:
    pairs = chains(24)
    batched = server.rewards([{"prompt": p, "responses": [r]} for p, r in pairs], model, cache=False).json()["items"]
    assert np.allclose([i["scores"][0] for i in batched], local[model], atol=5e-5)
    alone = [server.rewards([{"prompt": p, "responses": [r]}], model, cache=False).json() for p, r in pairs]
    assert np.allclose([reply["items"][0]["scores"][0] for reply in alone], local[model], atol=5e-5)
    cached = server.rewards([{"prompt": p, "responses": [r]} for p, r in pairs], model).json()["items"]
    again = server.rewards([{"prompt": p, "responses": [r]} for p, r in pairs], model).json()["items"]
    assert np.allclose([i["scores"][0] for i in cached], local[model], atol=5e-5)
    assert [i["scores"] for i in again] == [i["scores"] for i in cached]
    prompt = pairs[0][0]
    responses = [r for _, r in pairs[:8]]
    group = server.rewards([{"prompt": prompt, "responses": responses}], model, cache=False).json()["items"][0]
    single = [server.rewards([{"prompt": prompt, "responses": [r]}], model, cache=False).json() for r in responses]
    assert np.allclose(group["scores"], [s["items"][0]["scores"][0] for s in single], atol=5e-5)


def test_tokens_text_and_binary_give_the_score_of_the_prompt_and_response(server: ServerProcess) -> None:
    from plaudit.models import load_tokenizer

    tokenizer = load_tokenizer("sums")
    pairs = chains(6)
    ids = [[*tokenizer.encode(p + r), tokenizer.eos_token_id] for p, r in pairs]
    expected = [server.score(p, r) for p, r in pairs]
    as_tokens = server.rewards([{"tokens": t} for t in ids]).json()["items"]
    assert np.allclose([i["scores"][0] for i in as_tokens], expected, atol=5e-5)
    as_text = server.rewards([{"text": p + r + tokenizer.eos_token} for p, r in pairs]).json()["items"]
    assert np.allclose([i["scores"][0] for i in as_text], expected, atol=5e-5)
    offsets = np.cumsum([0, *map(len, ids)], dtype="<u4")
    body = (
        struct.pack("<I", len(ids))
        + offsets.tobytes()
        + np.array([t for row in ids for t in row], dtype="<i4").tobytes()
    )
    reply = server.http.post(
        "/v1/rewards?model=sums", content=body, headers={"content-type": "application/x-plaudit-tokens"}
    )
    assert reply.status_code == 200, reply.text
    (count,) = struct.unpack_from("<I", reply.content)
    assert count == len(ids)
    assert np.allclose(np.frombuffer(reply.content, "<f4", count, 4), expected, atol=5e-5)
    tail = json.loads(reply.content[4 + 4 * count :])
    assert tail["model"] == "sums"
    assert tail["errors"] == {}
    assert tail["usage"] == {"items": 6, "tokens": sum(map(len, ids))}


def test_every_step_has_a_score_and_wrong_steps_score_low(server: ServerProcess) -> None:
    reply = server.rewards(
        [{"prompt": "3+4+5=", "responses": ["3+4=7;7+5=12;#12", ["3+4=9;", "9+5=14;", "#14"]]}],
        "sums-steps",
        steps=True,
    ).json()
    right, wrong = reply["items"][0]["steps"]
    assert len(right) == len(wrong) == 3
    assert min(right) > 0.5 > max(wrong)
    assert reply["items"][0]["scores"] == [right[-1], wrong[-1]]


def test_replies_name_model_version_and_usage(server: ServerProcess) -> None:
    reply = server.rewards([{"prompt": "1+2=", "responses": ["1+2=3;#3"]}], "sums")
    body = reply.json()
    assert body["model"] == "sums"
    assert body["version"].startswith("0-")
    assert len(body["version"]) == 14
    assert body["usage"]["items"] == 1
    assert reply.headers["x-request-id"] == body["request_id"]
    unnamed = server.http.post("/v1/rewards", json={"items": [{"text": "1+2=#3"}]}).json()
    assert unnamed["model"] == "sums"


def test_identical_items_of_one_request_are_computed_once(server: ServerProcess) -> None:
    before = server.metric("plaudit_tokens_total", model="sums", kind="deduplicated")
    item = {"prompt": "8+8+8=", "responses": ["8+8=16;16+8=24;#24"] * 5}
    reply = server.rewards([item], cache=False).json()
    assert len(set(reply["items"][0]["scores"])) == 1
    tokens = reply["usage"]["tokens"] // 5
    assert server.metric("plaudit_tokens_total", model="sums", kind="deduplicated") - before == 4 * tokens


def test_startup_messages_list_the_models_and_the_url(server: ServerProcess) -> None:
    loading, ready = (line for line in server.log().splitlines() if line.startswith("plaudit serve: "))
    assert loading == f"plaudit serve: loading sums (outcome), sums-steps (process); will listen on {server.url}"
    assert ready.startswith(f"plaudit serve: sums (outcome), sums-steps (process) on {server.url} ")


def test_the_documentation_names_every_route(server: ServerProcess) -> None:
    paths = server.http.get("/openapi.json").json()["paths"]
    assert {"/v1/rewards", "/v1/models", "/admin/swap", "/health/live", "/health/ready", "/metrics", "/"} <= set(paths)
    page = server.http.get("/docs").text
    for path, methods in paths.items():
        assert f"<code>{path}</code>" in page
        for method, about in methods.items():
            assert len(about["summary"].split()) >= 4, f"{method} {path}: {about['summary']}"
            for summary in about["summary"].split("; or "):
                assert html.escape(summary) in page
    generate = paths["/generate"]["post"]
    assert "ETS and REBASE: scores of a path's steps" in generate["summary"]
    assert "SGLang: log-probabilities of a text's tokens" in generate["summary"]
    assert "logits_require_id" in page
    assert paths["/v2/models/sums/versions/1"]["get"]["summary"].startswith("Triton: inputs and outputs of the model")


def test_without_keys_only_local_hosts_and_origins_are_accepted(server: ServerProcess) -> None:
    """A page whose domain resolves to 127.0.0.1 must not send requests from its visitor's browser."""

    def get_models(**headers: str) -> httpx.Response:
        return server.http.get("/v1/models", headers=headers)

    for header, value in (
        ("host", "evil.example:5555"),
        ("host", "127.0.0.1.evil.example"),
        ("origin", "http://evil.example"),
    ):
        reply = get_models(**{header: value})
        assert (reply.status_code, reply.json()["error"]["type"]) == (403, "bad_host")
    for header, value in (
        ("host", "localhost:1"),
        ("host", "[::1]:5555"),
        ("origin", f"http://127.0.0.1:{server.port}"),
    ):
        assert get_models(**{header: value}).status_code == 200
