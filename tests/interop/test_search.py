"""OpenAI's own SDK against a server that searches: 32 clients at once, with a worker killed in the middle."""

from __future__ import annotations

import time
from concurrent.futures import ThreadPoolExecutor

import pytest

from tests.interop.environments import run_client
from tests.search.test_service import STEPS
from tests.search.test_service_load import QUESTIONS
from tests.serve.process import ServerProcess


@pytest.mark.slow
def test_the_sdk_searches_unchanged_while_a_worker_dies() -> None:
    tree = {"models": {name: {"path": name} for name in ("sums-policy", "sums-steps")}}
    search = {"method": "rebase", "width": 4, "steps": STEPS}
    with ServerProcess(tree) as server, ThreadPoolExecutor(1) as threads:
        given = {
            "url": server.url, "model": "sums-policy", "questions": QUESTIONS, "search": search, "clients": 32,
        }  # fmt: skip
        asking = threads.submit(run_client, ".venv-interop", "openai_search", given, 300)
        until = time.monotonic() + 120
        while not asking.done() and not server.metric("plaudit_held_tokens") and time.monotonic() < until:
            time.sleep(0.05)
        server.workers()[0].kill()
        found = asking.result(400)
        chat = [{"role": "user", "content": QUESTIONS[5]}]
        plain = server.http.post("/v1/search", json={"messages": chat, "seed": 5, "search": search}).json()
    assert len(found["answers"]) == 32
    assert all(each["content"] and each["search"]["stopped"] == "done" for each in found["answers"])
    mine = found["answers"][5]
    assert (mine["content"], mine["usage"]) == (plain["response"], plain["usage"])
    assert found["streamed"] == found["answers"][0]["content"]
    assert (found["refusal"]["class"], found["refusal"]["status"]) == ("BadRequestError", 400)
    assert "did you mean 'width'?" in found["refusal"]["message"]
