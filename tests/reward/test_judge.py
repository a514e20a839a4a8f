"""LLM judges: their prompts, the parsing of their answers, and requests to a small real server."""

import json
import threading
import time
from collections.abc import Callable, Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import pytest
from tokenizers import AddedToken

from plaudit.config.reward import JudgeTable, parse_reward
from plaudit.errors import ConfigError, Refused
from plaudit.records import Item, Score
from plaudit.reward import EngineAsk, HttpAsk, Judge, JudgeReward, load_reward
from plaudit.reward.judges.judge import generated_answer

from . import tiny

TEMPLATE = "Question: {prompt}\nAnswer: {response}\nRate it from 0 to 10."


def judge_table(**keys: Any) -> JudgeTable:
    source = {} if "path" in keys else {"url": "http://127.0.0.1:1/v1", "model": "m"}
    table = parse_reward({"kind": "judge", "template": TEMPLATE, **source, **keys}, "test")
    assert isinstance(table, JudgeTable)
    return table


def test_judge_prompt_is_built_from_the_template() -> None:
    judge = Judge(judge_table(system="Be strict.", template="{prompt}|{response}|{truth}|{other}"))
    assert judge.messages(Item(prompt="p {truth}", response="r {prompt}", truth=19)) == [
        {"role": "system", "content": "Be strict."},
        {"role": "user", "content": "p {truth}|r {prompt}|19|{other}"},
    ]
    chat = ({"role": "user", "content": "a"}, {"role": "assistant", "content": "b"}, {"role": "user", "content": "c"})
    (message,) = Judge(judge_table(template="{prompt}|{response}")).messages(Item(prompt=chat, response="d"))
    assert message["content"] == "user: a\n\nassistant: b\n\nuser: c|d"
    with pytest.raises(Refused) as caught:
        judge.messages(Item(prompt="p", response="r"))
    assert caught.value.type == "no_truth"
    with pytest.raises(Refused) as caught:
        judge.messages(Item(text="p r"))
    assert caught.value.type == "unsupported_form"


@pytest.mark.parametrize(
    ("text", "value"),
    [
        ("7", 7.0), ("First 3, but then: 8.5.", 8.5), ("0", 0.0), ("10", 10.0), ("10.5", None), ("-1", None),
        ("", None), ("seven", None), ("9" * 400, None), ("NaN", None),
    ],
)  # fmt: skip
def test_rating_is_parsed_from_the_answer(text: str, value: float | None) -> None:
    score = Judge(judge_table()).read(text)
    assert score.value == value
    if value is None:
        assert score.error is not None
        assert score.error.type == "judge_unreadable"


def test_custom_pattern_extracts_the_rating() -> None:
    judge = Judge(judge_table(pattern=r"\[\[(.+?)\]\]", low=-1.0, high=1.0))
    assert judge.read("7 of 10: [[0.5]]").value == 0.5
    assert judge.read("[[half]]").error is not None
    assert judge.read("0.5").error is not None


class Server:
    """An OpenAI-compatible server; `answer` maps the request's JSON to (status, body)."""

    def __init__(self, answer: Callable[[dict[str, Any]], tuple[int, Any]]) -> None:
        self.requests: list[tuple[str, dict[str, str], dict[str, Any]]] = []
        server = self

        class Handler(BaseHTTPRequestHandler):
            def do_POST(self) -> None:
                body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
                server.requests.append((self.path, dict(self.headers), body))
                status, reply = answer(body)
                content = reply if isinstance(reply, bytes) else json.dumps(reply).encode()
                self.send_response(status)
                if status in (302, 307):
                    self.send_header("Location", "/elsewhere")
                self.send_header("Content-Length", str(len(content)))
                self.end_headers()
                self.wfile.write(content)

            do_GET = do_POST

            def log_message(self, *_: Any) -> None:
                pass

        self._http = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        self._http.daemon_threads = True
        self._thread = threading.Thread(target=self._http.serve_forever, kwargs={"poll_interval": 0.02})
        self._thread.start()
        self.url = f"http://127.0.0.1:{self._http.server_port}/v1"

    def close(self) -> None:
        self._http.shutdown()
        self._thread.join()
        self._http.server_close()


def reply_with(text: Any, finish: Any = "stop", **fields: Any) -> tuple[int, Any]:
    message = {"role": "assistant", "content": text, **fields}
    return 200, {"choices": [{"message": message, "finish_reason": finish}]}


@pytest.fixture
def serve() -> Iterator[Callable[[Callable[[dict[str, Any]], tuple[int, Any]]], Server]]:
    servers: list[Server] = []

    def start(answer: Callable[[dict[str, Any]], tuple[int, Any]]) -> Server:
        servers.append(Server(answer))
        return servers[-1]

    yield start
    for server in servers:
        server.close()


def scores_over_http(server: Server, items: list[Item], **keys: Any) -> list[Any]:
    table = judge_table(url=server.url, **keys)
    reward = JudgeReward(Judge(table), HttpAsk(table))
    try:
        return [r.error.type if r.error else r.value for r in reward.score(items)]  # type: ignore[union-attr]
    finally:
        reward.close()


def rate_by_length(body: dict[str, Any]) -> tuple[int, Any]:
    """Rate an answer by its length."""
    answer = body["messages"][-1]["content"].partition("Answer: ")[2].partition("\n")[0]
    return reply_with(f"I say {len(answer)}")


ITEMS = [Item(prompt="q", response="x" * i) for i in range(1, 8)]


def test_judge_over_http_sends_the_request_and_parses_the_ratings(serve: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("JUDGE_KEY", "sesame")
    monkeypatch.setenv("HTTP_PROXY", "http://127.0.0.1:9")  # requests would fail if this proxy were used
    server = serve(rate_by_length)
    items = [*ITEMS, Item(text="raw"), Item(prompt="q", response="x" * 11)]
    scores = scores_over_http(server, items, key_env="JUDGE_KEY", max_tokens=99)
    assert scores == [*map(float, range(1, 8)), "unsupported_form", "judge_unreadable"]
    path, headers, body = server.requests[0]
    assert path == "/v1/chat/completions"
    assert headers["Authorization"] == "Bearer sesame"
    assert (body["model"], body["temperature"], body["max_tokens"], body["stream"]) == ("m", 0.0, 99, False)
    monkeypatch.delenv("JUDGE_KEY")
    with pytest.raises(ConfigError, match="JUDGE_KEY, but this environment variable is not set"):
        HttpAsk(judge_table(key_env="JUDGE_KEY"))


@pytest.mark.parametrize("status", [429, 500, 503])
def test_transient_errors_are_retried(serve: Any, status: int) -> None:
    calls: list[int] = []

    def flaky(body: dict[str, Any]) -> tuple[int, Any]:
        calls.append(1)
        return (status, {"error": "busy"}) if len(calls) <= 2 else rate_by_length(body)

    assert scores_over_http(serve(flaky), ITEMS[:1], retries=2) == [1.0]
    assert len(calls) == 3
    calls.clear()
    assert scores_over_http(serve(flaky), ITEMS[:1], retries=1) == ["judge_failed"]


@pytest.mark.parametrize("reply", [
    (302, b""), (307, b""), (400, b"{}"), (401, b"{}"), (200, b"not json"), (200, b"[]"), (200, b'{"choices": []}'),
    reply_with(None), reply_with(7), (200, b"[" * 100_000), (200, b"x" * (5 << 20)),
])  # fmt: skip
def test_permanent_errors_are_not_retried(serve: Any, reply: tuple[int, Any]) -> None:
    server = serve(lambda body: reply)
    assert scores_over_http(server, ITEMS[:1]) == ["judge_failed"]
    assert [path for path, *_ in server.requests] == ["/v1/chat/completions"]


@pytest.mark.parametrize("finish", ["length", "content_filter", "tool_calls", "abort", "", None, 7])
def test_answer_that_is_not_finished_has_no_score(serve: Any, finish: Any) -> None:
    server = serve(lambda body: reply_with("<think>Criterion 1 is met. Criterion 2", finish))
    assert scores_over_http(server, ITEMS[:1]) == ["judge_unreadable"]
    server = serve(lambda body: reply_with("I say 3", finish))
    assert scores_over_http(server, ITEMS[:1]) == ["judge_unreadable"]
    server = serve(lambda body: reply_with(None, finish, reasoning_content="3"))
    assert scores_over_http(server, ITEMS[:1]) == ["judge_unreadable"]
    assert len(server.requests) == 1, "it would be cut again"


def test_server_without_finish_reason_is_not_trusted(serve: Any) -> None:
    reply = {"choices": [{"message": {"role": "assistant", "content": "7"}}]}
    table = judge_table(url=serve(lambda body: (200, reply)).url)
    reward = JudgeReward(Judge(table), HttpAsk(table))
    (score,) = reward.score(ITEMS[:1])
    reward.close()
    assert score.error is not None
    assert score.error.message.startswith("the judge's server sent no finish_reason")


@pytest.mark.parametrize(
    ("text", "score"),
    [
        ("<think>Criterion 1 is met. Criterion 2 is not.</think>\nI say 7", 7.0),
        ("3 of the criteria are met, or 4?</think>I say 7", 7.0),  # the template wrote <think>
        ("I say 7\n<think>or rather 3", 7.0),
        ("<think>3", "judge_unreadable"), ("<think>3</think>", "judge_unreadable"), ("3</think>", "judge_unreadable"),
        ("<think>1</think>I say 7<think>2</think>.", 7.0), ("<think>1 <think>2</think> 3</think>I say 7", 7.0),
    ],
)  # fmt: skip
def test_thinking_is_not_read(serve: Any, text: str, score: Any) -> None:
    assert scores_over_http(serve(lambda body: reply_with(text)), ITEMS[:1]) == [score]


@pytest.mark.parametrize("field", ["reasoning_content", "reasoning"])
def test_thinking_in_a_field_is_not_read(serve: Any, field: str) -> None:
    fields = {field: "Criterion 3 is met"}
    assert scores_over_http(serve(lambda body: reply_with("I say 7", **fields)), ITEMS[:1]) == [7.0]
    assert scores_over_http(serve(lambda body: reply_with("", **fields)), ITEMS[:1]) == ["judge_unreadable"]
    assert scores_over_http(serve(lambda body: reply_with(None, **fields)), ITEMS[:1]) == ["judge_unreadable"]


def test_timeout_and_unreachable_judge_are_errors(serve: Any) -> None:
    def slow(body: dict[str, Any]) -> tuple[int, Any]:
        release.wait(60)
        return rate_by_length(body)

    release = threading.Event()
    assert scores_over_http(serve(slow), ITEMS[:3], timeout=0.3) == ["timeout"] * 3
    release.set()
    table = judge_table(timeout=60.0)
    ask = HttpAsk(table)
    (answer,) = ask([[{"role": "user", "content": "x"}]])
    ask.close()
    assert getattr(answer, "type", None) == "judge_failed"


def test_concurrent_requests_stay_within_the_limit(serve: Any) -> None:
    now, most = 0, 0
    lock = threading.Lock()

    def counting(body: dict[str, Any]) -> tuple[int, Any]:
        nonlocal now, most
        with lock:
            now += 1
            most = max(most, now)
        time.sleep(0.02)
        with lock:
            now -= 1
        return rate_by_length(body)

    assert scores_over_http(serve(counting), ITEMS * 3, concurrency=3) == [*map(float, range(1, 8))] * 3
    assert most <= 3


def test_judge_in_this_process_by_the_core_engine(tmp_path: Path) -> None:
    tokenizer = tiny.chatml()
    path = tiny.write(tmp_path, tiny.model("causal", tokenizer, positions=256), tokenizer)
    table = judge_table(path=path, max_tokens=8, pattern="(.)", low=-1.0)
    reward = load_reward(table)
    assert isinstance(reward, JudgeReward)
    ask = reward.ask
    assert isinstance(ask, EngineAsk)
    conversations = [reward.judge.messages(item) for item in ITEMS]
    long = [{"role": "user", "content": "y" * 1000}]
    texts = ask([conversations[0], long, conversations[1]])
    assert texts[0] == ask([conversations[0]])[0]
    assert getattr(texts[1], "type", None) == "judge_failed"
    assert texts[2] == ask([conversations[1]])[0]
    # an untrained judge gives unreadable answers, which are errors and not numbers
    assert {r.error.type for r in reward.score(ITEMS) if r.error} <= {"judge_unreadable"}
    reward.close()


@pytest.mark.parametrize(("max_tokens", "expected"), [(40, 15.0), (3, "judge_unreadable"), (1, "judge_unreadable")])
def test_only_a_finished_answer_of_the_core_engine_is_read(max_tokens: int, expected: Any) -> None:
    table = judge_table(
        path="sums-policy", template="{prompt}{response}", pattern=r"(\d+)", high=100.0, max_tokens=max_tokens
    )
    reward = load_reward(table)
    (score,) = reward.score([Item(prompt="7+8=", response="7+8=15;")])
    assert isinstance(score, Score)
    assert (score.error.type if score.error else score.value) == expected
    reward.close()


@pytest.mark.parametrize("special", [False, True])
def test_thinking_of_the_core_engine_is_not_read(special: bool) -> None:
    tokenizer = tiny.chatml()
    tokenizer.add_tokens([AddedToken(tag, special=special, normalized=False) for tag in ("<think>", "</think>")])

    def answer(prompt: str, text: str, finish: str = "stop") -> Any:
        ids = tokenizer.encode(text, add_special_tokens=False)
        shown = tokenizer.decode(ids, skip_special_tokens=True)
        found = generated_answer(tokenizer, tokenizer.encode(prompt), ids, shown, finish, 99)
        return found if isinstance(found, str) else found.type

    assert answer("q", "<think>3</think>7") == "7"
    assert answer("q<think>\n", "3</think>7") == "7"
    assert answer("q<think>\n", "3") == ""
    assert answer("q<think>\n\n</think>\n\n", "7") == "7"
    assert answer("q", "<think>3") == ""
    assert answer("q", "7", "length") == answer("q", "7", "abort") == "judge_unreadable"
