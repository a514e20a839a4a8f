"""Rules, LLM judges and blends over the same route as models."""

from __future__ import annotations

import json
import threading
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import pytest

from tests.serve.process import ServerProcess

SLOW: list[str] = []  # questions that the judge answered slowly
FUNCTION = """
import time

def length(prompt, response, truth):
    if response == "sleep":
        time.sleep(60)
    if response == "raise":
        raise ValueError("no")
    return len(response) / 10
"""


class OpenAI(BaseHTTPRequestHandler):
    """Replies 'score: <number of digits in the question>', or nonsense if the question contains that word."""

    def do_POST(self) -> None:
        body = json.loads(self.rfile.read(int(self.headers["content-length"])))
        question = body["messages"][-1]["content"]
        if "slow" in question:
            SLOW.append(question)
            time.sleep(0.2)
        text = "I would rather not" if "nonsense" in question else f"score: {sum(c.isdigit() for c in question)}"
        message = {"role": "assistant", "content": text}
        reply = json.dumps({"choices": [{"message": message, "finish_reason": "stop"}]}).encode()
        self.send_response(200)
        self.send_header("content-type", "application/json")
        self.send_header("content-length", str(len(reply)))
        self.end_headers()
        self.wfile.write(reply)

    def log_message(self, format: str, *args: object) -> None:
        pass


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[ServerProcess]:
    directory: Path = tmp_path_factory.mktemp("rules")
    (directory / "rules.py").write_text(FUNCTION)
    judge = ThreadingHTTPServer(("127.0.0.1", 0), OpenAI)
    threading.Thread(target=judge.serve_forever, daemon=True).start()
    tree: dict[str, Any] = {
        "models": {
            "sums": {"path": "sums"},
            "exact": {"kind": "rule", "rule": "exact", "answer": "#(\\d+)"},
            "length": {"kind": "rule", "rule": "function", "function": f"{directory}/rules.py:length", "timeout": 1.0},
            "regex": {"kind": "rule", "rule": "regex", "pattern": "(a+)+$", "timeout": 0.5},
            "few": {
                "kind": "judge", "url": f"http://127.0.0.1:{judge.server_port}/v1", "model": "any", "concurrency": 2,
                "template": "{prompt}{response}", "pattern": "score: (\\d+)",
            },
            "judge": {
                "kind": "judge", "url": f"http://127.0.0.1:{judge.server_port}/v1", "model": "any",
                "template": "{prompt}{response}", "pattern": "score: (\\d+)",
            },
            "writer": {
                "kind": "judge", "path": "sums-policy", "template": "{prompt}{response}", "pattern": "#(\\d+)",
                "high": 100.0, "max_tokens": 40,
            },
            "cut": {
                "kind": "judge", "path": "sums-policy", "template": "{prompt}{response}", "pattern": "(\\d+)",
                "high": 100.0, "max_tokens": 3,
            },
            "blend": {"kind": "blend", "members": {"sums": 0.5, "exact": 2.0}},
        }
    }  # fmt: skip
    with ServerProcess(tree) as server:
        yield server
    judge.shutdown()
    judge.server_close()


def results(server: ServerProcess, model: str, *responses: str, prompt: str = "7+8=", truth: Any = "15") -> Any:
    reply = server.rewards([{"prompt": prompt, "responses": list(responses), "truth": truth}], model)
    assert reply.status_code == 200, reply.text
    return reply.json()["items"][0]


def test_a_rule_checks_the_answer(server: ServerProcess) -> None:
    assert results(server, "exact", "7+8=15;#15", "#16", "none")["scores"] == [1.0, 0.0, 0.0]


def test_a_function_that_hangs_or_raises_fails_only_its_own_item(server: ServerProcess) -> None:
    result = results(server, "length", "12345", "sleep", "raise", "1234567890")
    assert result["scores"] == [0.5, None, None, 1.0]
    assert [e and e["type"] for e in result["errors"]] == [None, "timeout", "rule_failed", None]


def test_an_http_judge_gives_the_number_in_its_reply(server: ServerProcess) -> None:
    result = results(server, "judge", "15", "nonsense")
    assert result["scores"] == [4.0, None]
    assert result["errors"][1]["type"] == "judge_unreadable"


def test_a_local_judge_gives_the_number_in_its_text(server: ServerProcess) -> None:
    assert results(server, "writer", "7+8=15;")["scores"] == [15.0]


def test_a_local_judges_answer_that_was_cut_has_no_score(server: ServerProcess) -> None:
    error = results(server, "cut", "7+8=15;")["error"]
    assert error["type"] == "judge_unreadable"
    assert "finish_reason 'length'): it needs more than max_tokens = 3" in error["message"]


def test_a_blend_is_the_weighted_sum_of_its_members(server: ServerProcess) -> None:
    sums = results(server, "sums", "7+8=15;#15", "#16")["scores"]
    blended = results(server, "blend", "7+8=15;#15", "#16")
    assert blended["scores"] == pytest.approx([0.5 * sums[0] + 2.0, 0.5 * sums[1]], abs=5e-5)
    assert blended["attributes"][0] == pytest.approx({"sums": sums[0], "exact": 1.0}, abs=5e-5)


def test_a_failed_member_fails_the_blend(server: ServerProcess) -> None:
    reply = server.rewards([{"prompt": "7+8=", "responses": ["#15"]}], "blend")  # no truth for the rule
    assert reply.json()["items"][0]["error"]["type"] == "member_failed"


def test_models_are_listed_with_their_kind(server: ServerProcess) -> None:
    listed = {m["id"]: m["kind"] for m in server.http.get("/v1/models").json()["data"]}
    assert listed == {
        "sums": "outcome", "exact": "rule", "length": "rule", "judge": "judge", "writer": "judge", "blend": "blend",
        "regex": "rule", "few": "judge", "cut": "judge",
    }  # fmt: skip


def test_steps_of_a_rule_are_rejected(server: ServerProcess) -> None:
    reply = server.rewards([{"prompt": "1+1=", "responses": ["#2"]}], "exact", steps=True)
    assert reply.status_code == 422
    assert reply.json()["error"]["type"] == "not_a_process_model"


@pytest.mark.slow
def test_slow_items_of_one_request_do_not_delay_another(server: ServerProcess) -> None:
    endless = "a" * 60 + "b"
    with ThreadPoolExecutor(1) as threads:
        pending = threads.submit(results, server, "regex", "aaa", *[endless] * 30)
        while server.http.get("/stats").json()["open_tokens"] == 0:
            assert not pending.done()
        assert results(server, "regex", "aaa")["scores"] == [1.0]
        assert not pending.done()
        first, *others = pending.result()["errors"]
        assert first is None
        assert {error["type"] for error in others} == {"timeout"}


def test_a_judge_is_not_called_for_an_expired_request(server: ServerProcess) -> None:
    item = {"prompt": "slow ", "responses": [str(i) for i in range(200)]}
    reply = server.http.post("/v1/rewards", json={"model": "few", "items": [item]}, headers={"x-deadline": "1"})
    assert reply.status_code == 504
    calls = len(SLOW)
    assert calls < 100
    time.sleep(1.0)
    assert len(SLOW) <= calls + 2  # calls that were already in flight
    assert results(server, "few", "12")["scores"] == [4.0]
