"""Searches on a real server: answers equal to the library's, streams, limits, keys, many clients, disconnects."""

from __future__ import annotations

import json
import socket
import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import httpx
import pytest

import plaudit
from tests.serve.process import ServerProcess

KEY = "key-of-the-searcher"
QUESTION = "7+8+4+9+2+6+3+5="
STEPS = {"answer_after": "#", "max_step_tokens": 24, "max_tokens": 180}
WAIT = 120.0  # seconds to wait for an expected event


@pytest.fixture(scope="module")
def server() -> Iterator[ServerProcess]:
    names = ("sums-policy", "sums-steps", "sums")
    tree = {
        "models": {name: {"path": name} for name in names}, "api_keys": {"holder": KEY},
        "search": {"max_width": 32, "concurrent": 40, "max_generated": 20_000},
    }  # fmt: skip
    with ServerProcess(tree) as server:
        server.http.headers["authorization"] = f"Bearer {KEY}"
        yield server


def body(question: str = QUESTION, **search: Any) -> dict[str, Any]:
    return {"prompt": question, "seed": 1, "search": {"method": "rebase", "width": 8, "steps": STEPS, **search}}


def post(server: ServerProcess, content: dict[str, Any], path: str = "/v1/search") -> dict[str, Any]:
    reply = server.http.post(path, json=content)
    assert reply.status_code == 200, reply.text
    result: dict[str, Any] = reply.json()
    return result


def events(reply: httpx.Response) -> list[dict[str, Any]]:
    lines = [line.removeprefix("data: ") for line in reply.iter_lines() if line.startswith("data: ")]
    assert lines[-1] == "[DONE]"
    return [json.loads(line) for line in lines[:-1]]


@pytest.mark.parametrize("method", ["best-of-n", "rebase", "ets"])
def test_answer_equals_that_of_the_library(server: ServerProcess, method: str) -> None:
    (outcome,) = plaudit.search(
        [QUESTION], engine="sums-policy", prm="sums-steps", rule=method, width=8, seed=1, threads=1, stop=";",
        answer=r"#(\d+)$", options={"clusters": "text"}, max_step_tokens=24, max_tokens=180,
    )  # fmt: skip
    result = post(server, body(method=method))
    assert outcome.answer is not None
    assert (result["answer"], result["stopped"]) == (outcome.answer.text, "done")
    assert result["response"] == outcome.tree.response(outcome.answer.node)
    costs = outcome.driver.costs
    assert (result["rounds"], result["calls"], result["kv_tokens"]) == (costs.rounds, costs.calls, costs.kv_tokens)
    prompt = len(outcome.question.prompt_ids)
    assert result["usage"] == {
        "prompt_tokens": prompt, "completion_tokens": costs.generated, "total_tokens": prompt + costs.generated,
    }  # fmt: skip
    assert (result["model"], result["prm"], result["method"], result["seed"]) == (
        "sums-policy",
        "sums-steps",
        method,
        1,
    )
    assert sum(each["votes"] for each in result["votes"]) == pytest.approx(sum(a.weight for a in outcome.answers))


def test_auto_uses_the_given_ground_and_needs_one(server: ServerProcess) -> None:
    ground = {"steps": 8, "accuracy": 0.3, "auc": 0.8}
    result = post(server, body(method="auto", ground=ground))
    assert (result["method"], result["response"]) == ("rebase", post(server, body(method="rebase"))["response"])
    assert result["why"].startswith("the nearest cell of the table (8 steps, 30% right, AUC 0.8, width 4) says rebase")
    chat = {"messages": [{"role": "user", "content": QUESTION}], "seed": 1}
    search = {"method": "auto", "ground": ground, "width": 8, "steps": STEPS}
    details = post(server, {**chat, "search": search}, "/v1/chat/completions")["search"]
    assert (details["method"], details["why"]) == ("rebase", result["why"])
    rejected = server.http.post("/v1/search", json=body(method="auto"))
    assert rejected.status_code == 422
    assert "a server has no correct answers to measure with: set search.ground" in rejected.json()["error"]["message"]


def test_outcome_model_scores_best_of_n(server: ServerProcess) -> None:
    steps = {**STEPS, "stop": ";"}  # an outcome model does not define steps
    result = post(server, {**body(method="best-of-n", vote="best", steps=steps), "prm": "sums"})
    assert (result["prm"], result["stopped"]) == ("sums", "done")
    assert result["answer"] is not None
    reply = server.http.post("/v1/search", json={**body(), "prm": "sums"})
    assert reply.status_code == 422
    assert "best-of-n" in reply.json()["error"]["message"]


@pytest.mark.slow
def test_stream_reports_every_round(server: ServerProcess) -> None:
    expected = post(server, body())
    with server.http.stream("POST", "/v1/search", json={**body(), "stream": True}) as reply:
        assert reply.headers["content-type"] == "text/event-stream"
        *rounds, result = events(reply)
    assert [each["object"] for each in rounds] == ["search.progress"] * len(rounds)
    assert [each["round"] for each in rounds] == list(range(1, len(rounds) + 1))
    assert len(rounds) in (expected["rounds"], expected["rounds"] - 1), "the last look finds nothing to expand"
    assert rounds[-1]["generated"] == expected["usage"]["completion_tokens"]
    assert rounds[-1]["leading"] == expected["answer"]
    assert {key: value for key, value in result.items() if key != "id"} == {
        key: value for key, value in expected.items() if key != "id"
    }


@pytest.mark.slow
def test_chat_completion_with_a_search(server: ServerProcess) -> None:
    """The request is that of `client.chat.completions.create(..., extra_body={"search": ...})`."""
    search = {"method": "rebase", "width": 8, "steps": STEPS}
    content = {"messages": [{"role": "user", "content": QUESTION}], "seed": 1, "search": search}
    expected = post(server, {"messages": content["messages"], "seed": 1, "search": search})
    for path in ("/v1/chat/completions", "/openai/v1/chat/completions"):
        result = post(server, {"model": "sums-policy", **content}, path)
        assert result["choices"] == [
            {
                "index": 0, "message": {"role": "assistant", "content": expected["response"], "refusal": None},
                "logprobs": None, "finish_reason": "stop",
            }
        ]  # fmt: skip
        assert (result["object"], result["usage"]) == ("chat.completion", expected["usage"])
        assert result["search"]["answer"] == expected["answer"]
    streamed = {**content, "stream": True, "stream_options": {"include_usage": True}}
    with server.http.stream("POST", "/v1/chat/completions", json=streamed) as reply:
        chunks = events(reply)
    assert {chunk["object"] for chunk in chunks} == {"chat.completion.chunk"}
    text = "".join(choice["delta"].get("content", "") for chunk in chunks for choice in chunk["choices"])
    assert text == expected["response"]
    assert (chunks[-1]["choices"], chunks[-1]["usage"]) == ([], expected["usage"])
    assert chunks[-2]["choices"][0]["finish_reason"] == "stop"
    plain = post(server, {"messages": content["messages"], "max_tokens": 8}, "/v1/chat/completions")
    assert "search" not in plain, "a chat without a search is as ever"


@pytest.mark.parametrize(
    ("change", "status", "message"),
    [
        ({"search": {"width": 33}}, 422, "search.width is 33; the limit of this server is 32"),
        ({"search": {"metod": "ets"}}, 422, "unknown field search.metod; did you mean 'method'"),
        ({"search": {"method": "dfs"}}, 422, "dfs"),
        ({"search": {"steps": {"answer": "(a+)+$"}}}, 422, "unknown field search.steps.answer"),
        ({"search": {"clusters": "encoder"}}, 422, "unknown field search.clusters"),
        ({"search": {"steps": {"max_tokens": 10**6}}}, 400, "maximum context length"),
        ({"search": {"budget": {"generated": 0}}}, 422, "budget.generated"),
        ({"search": 3}, 422, "search is a int"),
        ({"prompt": None}, 422, "either prompt, a text, or messages"),
        ({"model": "sums"}, 422, "generates no text"),
        ({"prm": "sums-policy"}, 422, "returns no scores"),
        ({"prm": "nobody"}, 404, "no model 'nobody'"),
        ({"seed": -1}, 422, "seed is -1"),
    ],
)
def test_invalid_request_is_rejected_with_the_reason(
    server: ServerProcess, change: dict[str, Any], status: int, message: str
) -> None:
    reply = server.http.post("/v1/search", json={**body(), **change})
    assert reply.status_code == status, reply.text
    assert message in reply.json()["error"]["message"]


def test_chat_errors_have_the_openai_format(server: ServerProcess) -> None:
    content = {"messages": [{"role": "user", "content": QUESTION}], "n": 2, "search": {}}
    reply = server.http.post("/v1/chat/completions", json=content)
    assert reply.status_code == 400
    assert reply.json()["error"]["type"] == "invalid_request_error"
    none = {**content, "n": 1, "search": {"width": 2, "steps": {**STEPS, "answer_after": "nowhere"}}}
    reply = server.http.post("/v1/chat/completions", json=none)
    assert (reply.status_code, reply.json()["error"]["code"]) == (400, "no_answer")
    assert "ended without an answer" in reply.json()["error"]["message"]


def test_api_key_is_required(server: ServerProcess) -> None:
    for path in ("/v1/search", "/v1/chat/completions"):
        reply = httpx.post(f"{server.url}{path}", json=body(), timeout=WAIT)
        assert reply.status_code == 401


def test_budgets_and_deadlines(server: ServerProcess) -> None:
    result = post(server, body(method="best-of-n", width=32, budget={"generated": 100}))
    assert result["stopped"] == "budget: generated"
    reply = server.http.post("/v1/search", json=body(), headers={"x-deadline": "0.000001"})
    assert (reply.status_code, reply.json()["error"]["type"]) == (504, "deadline")


@pytest.mark.slow
def test_concurrent_clients_get_the_same_answers_as_alone(server: ServerProcess) -> None:
    """Each client gets the same answer as alone, while other clients disconnect."""
    questions = [f"{a}+{b}+{a + 1}+{9 - b}+7+8=" for a in range(1, 5) for b in range(1, 5)]
    alone = {question: post(server, body(question, width=4)) for question in questions[:4]}
    stop = threading.Event()

    def disturb() -> None:
        while not stop.is_set():
            content = json.dumps(body(method="best-of-n", width=32)).encode()
            with socket.create_connection(("127.0.0.1", server.port), timeout=WAIT) as connection:
                head = f"POST /v1/search HTTP/1.1\r\nhost: 127.0.0.1\r\nauthorization: Bearer {KEY}\r\n"
                connection.sendall(f"{head}content-length: {len(content)}\r\n\r\n".encode() + content)
            stop.wait(0.05)

    disturber = threading.Thread(target=disturb)
    disturber.start()
    try:
        with ThreadPoolExecutor(16) as clients:
            results = list(clients.map(lambda question: post(server, body(question, width=4)), questions))
    finally:
        stop.set()
        disturber.join(WAIT)
    assert all(each["answer"] is not None for each in results)
    for question, each in zip(questions, results, strict=True):
        if question in alone:
            assert (each["response"], each["usage"]) == (alone[question]["response"], alone[question]["usage"])
