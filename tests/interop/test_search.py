"""OpenAI's own SDK against a server that runs searches: 32 concurrent clients, with a worker killed in the middle."""

from __future__ import annotations

import time
from concurrent.futures import ThreadPoolExecutor

import pytest

from tests.interop.environments import run_client
from tests.search.test_service import STEPS
from tests.search.test_service_load import QUESTIONS
from tests.serve.process import ServerProcess


@pytest.mark.slow
def test_openai_sdk_gets_unchanged_search_answers_when_a_worker_is_killed() -> None:
    tree = {"models": {name: {"path": name} for name in ("sums-policy", "sums-steps")}}
    search = {"method": "rebase", "width": 4, "steps": STEPS}
    with ServerProcess(tree) as server, ThreadPoolExecutor(1) as threads:
        inputs = {
            "url": server.url, "model": "sums-policy", "questions": QUESTIONS, "search": search, "clients": 32,
        }  # fmt: skip
        clients = threads.submit(run_client, ".venv-interop", "openai_search", inputs, 300)
        deadline = time.monotonic() + 120
        while not clients.done() and not server.metric("plaudit_held_tokens") and time.monotonic() < deadline:
            time.sleep(0.05)
        server.workers()[0].kill()
        result = clients.result(400)
        chat = [{"role": "user", "content": QUESTIONS[5]}]
        plain = server.http.post("/v1/search", json={"messages": chat, "seed": 5, "search": search}).json()
    assert len(result["answers"]) == 32
    assert all(each["content"] and each["search"]["stopped"] == "done" for each in result["answers"])
    answer = result["answers"][5]
    assert (answer["content"], answer["usage"]) == (plain["response"], plain["usage"])
    assert result["streamed"] == result["answers"][0]["content"]
    assert (result["refusal"]["class"], result["refusal"]["status"]) == ("BadRequestError", 400)
    assert "did you mean 'width'?" in result["refusal"]["message"]
