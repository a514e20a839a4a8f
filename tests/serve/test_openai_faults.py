"""Completions whose request or worker is interrupted, and many completions at once."""

from __future__ import annotations

import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest

from plaudit.core import Engine, SamplingParams
from tests.serve.faults import Faults
from tests.serve.judge_model import CHAT, chat, events, prompt_of, streamed, write_judge
from tests.serve.process import ServerProcess

pytestmark = pytest.mark.slow


@pytest.fixture(scope="module")
def directory(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_judge(tmp_path_factory.mktemp("judge"))


@pytest.fixture(scope="module")
def engine(directory: Path) -> Engine:
    return Engine.load(directory, device="cpu")


@pytest.fixture(scope="module")
def faults() -> Iterator[Faults]:
    with Faults() as faults:
        yield faults


@pytest.fixture(scope="module")
def server(directory: Path, faults: Faults) -> Iterator[ServerProcess]:
    with ServerProcess({"models": {"judge": {"path": str(directory)}}}, environment=faults.environment) as server:
        yield server


@pytest.fixture(autouse=True)
def sound(faults: Faults) -> Iterator[None]:
    yield
    faults.clear()


def until(what: str, condition: Any, seconds: float = 120) -> None:
    end = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < end, f"not {what} within {seconds} s"
        time.sleep(0.02)


def test_concurrent_requests_share_decode_steps(server: ServerProcess, faults: Faults) -> None:
    contents = [f"hello {number}" for number in range(8)]

    def generate(content: str) -> str:
        messages = [{"role": "user", "content": content}]
        text: str = chat(server, messages=messages, max_tokens=20, ignore_eos=True)["choices"][0]["message"]["content"]
        return text

    alone = [generate(content) for content in contents]
    faults.set("hold")
    with ThreadPoolExecutor(9) as threads:
        blocked = threads.submit(generate, "the first, in whose step the others come")
        until("held", lambda: stored_tokens(server) > 0)
        baseline = stored_tokens(server)
        together = [threads.submit(generate, content) for content in contents]
        until("held", lambda: stored_tokens(server) > baseline + 8 * 20)
        before = faults.steps()
        faults.clear()
        assert [each.result(120) for each in together] == alone
        blocked.result(120)
    assert faults.steps() - before < 16  # alone each takes 4 steps: its prompt, then 8 tokens per step


def stored_tokens(server: ServerProcess) -> int:
    models = server.http.get("/stats").json()["models"]
    return int(next(model["held_tokens"] for model in models if model["name"] == "judge"))


def test_a_client_disconnect_ends_its_generation(server: ServerProcess, faults: Faults, engine: Engine) -> None:
    prompt = prompt_of(engine)
    (sample,) = engine.generate([prompt], SamplingParams(temperature=0, max_tokens=2, ignore_eos=True))
    faults.set("hold", begins=[*prompt, *sample.token_ids[:2]])
    body = {"model": "judge", "messages": CHAT, "temperature": 0, "max_tokens": 180, "ignore_eos": True, "stream": True}
    with server.http.stream("POST", "/v1/chat/completions", json=body) as reply:
        assert next(events(reply.iter_lines()))["choices"][0]["delta"]["role"] == "assistant"
    until("cancelled", lambda: stored_tokens(server) == 0)
    steps = faults.steps()
    faults.clear()
    assert chat(server, max_tokens=2)["usage"]["completion_tokens"] <= 2
    assert faults.steps() - steps < 10  # a decode step is 8 tokens, and 170 were left


def test_a_worker_crash_during_generation_does_not_change_the_text(
    server: ServerProcess, faults: Faults, engine: Engine
) -> None:
    prompt = prompt_of(engine)
    options: dict[str, Any] = {"temperature": 0.8, "seed": 3, "max_tokens": 16, "ignore_eos": True}
    (sample,) = engine.generate([prompt], SamplingParams(**options))
    faults.set("exit", begins=[*prompt, *sample.token_ids[:2]], once=True)
    pieces = streamed(server, "/v1/chat/completions", messages=CHAT, logprobs=True, **options)
    assert faults.met
    assert "".join(p["choices"][0]["delta"].get("content", "") for p in pieces) == sample.text
    rows = [row for p in pieces for row in (p["choices"][0]["logprobs"] or {"content": []})["content"]]
    assert [row["logprob"] for row in rows] == pytest.approx(sample.raw_logprobs, abs=1e-5)


def test_a_failed_step_is_sampled_again_with_the_same_result(
    server: ServerProcess, faults: Faults, engine: Engine
) -> None:
    prompt = prompt_of(engine)
    options: dict[str, Any] = {"temperature": 0.8, "seed": 3, "max_tokens": 16, "ignore_eos": True, "n": 2}
    samples = engine.generate([prompt], SamplingParams(**options))
    faults.set("raise", begins=[*prompt, *samples[0].token_ids[:2]], once=True)
    choices = chat(server, **options)["choices"]
    assert faults.met
    assert [choice["message"]["content"] for choice in choices] == [sample.text for sample in samples]


def test_a_deadline_ends_a_request(server: ServerProcess, faults: Faults, engine: Engine) -> None:
    prompt = prompt_of(engine)
    (sample,) = engine.generate([prompt], SamplingParams(temperature=0, max_tokens=30, ignore_eos=True))
    body = {"model": "judge", "messages": CHAT, "temperature": 0, "max_tokens": 30, "ignore_eos": True}
    faults.set("hold", begins=[*prompt, *sample.token_ids[:2]])
    late = server.http.post("/v1/chat/completions", json=body, headers={"x-deadline": "1"})
    assert (late.status_code, late.json()["error"]["code"]) == (504, "deadline")


def test_an_error_in_a_stream_is_its_last_event(server: ServerProcess, faults: Faults, engine: Engine) -> None:
    prompt = prompt_of(engine)
    (sample,) = engine.generate([prompt], SamplingParams(temperature=0, max_tokens=2, ignore_eos=True))
    faults.set("exit", begins=[*prompt, *sample.token_ids])
    pieces = streamed(server, "/v1/chat/completions", messages=CHAT, temperature=0, max_tokens=30, ignore_eos=True)
    assert pieces[0]["choices"][0]["delta"]["role"] == "assistant"
    assert pieces[-1]["error"]["code"] == "worker_crash"
    assert pieces[-1]["error"]["type"] == "server_error"
