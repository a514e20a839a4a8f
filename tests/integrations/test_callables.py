"""Reward functions for trainers, called as each trainer calls them, against a real server."""

from __future__ import annotations

import asyncio
import logging
import os
from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any

import pytest

from plaudit.errors import ConfigError, RequestRefused, RewardUnavailable, ServerError
from plaudit.integrations import openrlhf, slime, verl
from plaudit.integrations.connection import from_environment
from plaudit.integrations.trl import AsyncRemoteReward, RemoteReward
from plaudit.records import Item
from tests.serve.process import ServerProcess, free_port
from tests.serve.test_native import chains

TOO_LONG = "1+" * 256
PAIRS = chains(8)
PROMPTS, COMPLETIONS = [p for p, _ in PAIRS], [r for _, r in PAIRS]
KEY = "key-of-the-trainer"
# Keyword arguments that TRL passes to every reward function in addition to the texts.
EXTRAS: dict[str, Any] = {
    "completion_ids": [[1]] * 8, "trainer_state": SimpleNamespace(global_step=3), "log_extra": print,
    "log_metric": print,
}  # fmt: skip


@pytest.fixture(scope="module")
def server() -> Iterator[ServerProcess]:
    tree = {
        "models": {
            "sums": {"kind": "outcome", "path": "plaudit/embedded/sums"},
            "exact": {"kind": "rule", "rule": "exact", "answer": r"#(\d+)"},
        },
        "api_keys": {"trainer": KEY},
    }
    with ServerProcess(tree) as server:
        server.http.headers["authorization"] = f"Bearer {KEY}"
        yield server


@pytest.fixture(scope="module")
def expected(server: ServerProcess) -> list[float]:
    items = [{"prompt": p, "responses": [r]} for p, r in PAIRS]
    return [item["scores"][0] for item in server.rewards(items).json()["items"]]


@pytest.fixture
def environment(server: ServerProcess, monkeypatch: pytest.MonkeyPatch) -> pytest.MonkeyPatch:
    for name in [name for name in os.environ if name.startswith("PLAUDIT_")]:
        monkeypatch.delenv(name)
    monkeypatch.setenv("PLAUDIT_URL", server.url)
    monkeypatch.setenv("PLAUDIT_MODEL", "sums")
    monkeypatch.setenv("PLAUDIT_API_KEY", KEY)
    return monkeypatch


# TRL


def test_trl_reward_function_returns_rewards_in_the_order_of_completions(
    server: ServerProcess, expected: list[float]
) -> None:
    reward = RemoteReward(server.url, model="sums", api_key=KEY)
    rewards = reward(prompts=PROMPTS, completions=COMPLETIONS, **EXTRAS)
    assert rewards == pytest.approx(expected, abs=5e-5)
    assert reward.__name__ == "plaudit_sums"
    assert RemoteReward(server.url).__name__ == "plaudit"
    reward.close()


def test_async_trl_reward_function_returns_the_same_rewards_in_any_event_loop(
    server: ServerProcess, expected: list[float]
) -> None:
    reward = AsyncRemoteReward(server.url, model="sums", api_key=KEY)

    async def together() -> list[Any]:
        return await asyncio.gather(*(reward(prompts=PROMPTS, completions=COMPLETIONS, **EXTRAS) for _ in range(3)))

    for _ in range(2):  # asyncio.run creates a new event loop for each call
        for rewards in asyncio.run(together()):
            assert rewards == pytest.approx(expected, abs=5e-5)
    reward.close()


def test_completion_without_a_score_gets_none_instead_of_a_number(
    server: ServerProcess, expected: list[float], caplog: pytest.LogCaptureFixture
) -> None:
    completions = [*COMPLETIONS[:-1], TOO_LONG]
    reward = RemoteReward(server.url, model="sums", api_key=KEY)
    with caplog.at_level(logging.WARNING, "plaudit"):
        rewards = reward(prompts=PROMPTS, completions=completions, **EXTRAS)
    assert rewards == [*(pytest.approx(value, abs=5e-5) for value in expected[:-1]), None]
    assert "1 of 8 completions have no reward; the first: too_long" in caplog.text
    strict = RemoteReward(server.url, model="sums", api_key=KEY, failures="raise")
    with pytest.raises(ServerError, match=r"completion\[7\]: too_long"):
        strict(prompts=PROMPTS, completions=completions, **EXTRAS)
    truncating = RemoteReward(server.url, model="sums", api_key=KEY, truncate="left")
    assert isinstance(truncating(prompts=PROMPTS, completions=completions, **EXTRAS)[7], float)
    for each in (reward, strict, truncating):
        each.close()


def test_trl_conversations_are_sent_as_messages() -> None:
    from plaudit.integrations.trl import _item

    user, answer = {"role": "user", "content": "1+2?"}, {"role": "assistant", "content": "3"}
    tool = {"role": "tool", "content": "3"}
    assert _item([user], [answer], "3") == Item(prompt=(user,), response="3", truth="3")
    assert _item([user], [answer, tool, answer], None) == Item(messages=(user, answer, tool, answer))
    called = {"role": "assistant", "content": "", "tool_calls": [{"name": "add"}]}
    assert _item([user], [called], None) == Item(messages=(user, called))
    with pytest.raises(ConfigError, match="messages"):
        _item([user], "3", None)


def test_trl_conversations_get_the_score_of_the_same_messages(server: ServerProcess) -> None:
    reward = RemoteReward(server.url, model="sums", api_key=KEY)
    prompt, completion = [{"role": "user", "content": "1+2="}], [{"role": "assistant", "content": "1+2=3;#3"}]
    (native,) = server.rewards([{"messages": [*prompt, *completion]}]).json()["items"][0]["scores"]
    assert reward(prompts=[prompt], completions=[completion]) == [pytest.approx(native, abs=5e-5)]
    assert reward(prompts=[prompt], completions=[[{"role": "tool", "content": "3"}]]) == [None]
    reward.close()


def test_trl_reward_reads_the_truth_from_a_column(server: ServerProcess) -> None:
    reward = RemoteReward(server.url, model="exact", api_key=KEY, truth="answer")
    columns = {"prompts": ["1+2=", "1+2="], "completions": ["#3", "#4"]}
    assert reward(**columns, answer=["3", "3"]) == [1.0, 0.0]
    with pytest.raises(ConfigError, match="'answer', which is not a column"):
        reward(**columns, solution=["3", "3"])
    reward.close()


def test_unreachable_server_or_rejected_request_raises(server: ServerProcess) -> None:
    unreachable = RemoteReward(f"http://127.0.0.1:{free_port()}", timeout=0.5)
    with pytest.raises(RewardUnavailable):
        unreachable(prompts=["1+2="], completions=["#3"])
    unknown = RemoteReward(server.url, model="summs", api_key=KEY)
    with pytest.raises(RequestRefused, match="sums"):
        unknown(prompts=["1+2="], completions=["#3"])
    keyless = RemoteReward(server.url, model="sums")
    with pytest.raises(RequestRefused, match="401"):
        keyless(prompts=["1+2="], completions=["#3"])
    for reward in (unreachable, unknown, keyless):
        reward.close()


# OpenRLHF, verl, slime


def test_openrlhf(environment: pytest.MonkeyPatch, expected: list[float]) -> None:
    queries = [f"<bos>{p}{r}<eos>" for p, r in PAIRS]
    result = openrlhf.reward_func(queries, PROMPTS, [None] * 8)
    assert set(result) == {"rewards", "scores", "extra_logs"}
    assert result["rewards"].shape == (8,)
    assert result["rewards"].tolist() == pytest.approx(expected, abs=5e-5)
    with pytest.raises(ServerError, match=r"query\[1\]: too_long"):
        openrlhf.reward_func([queries[0], TOO_LONG], PROMPTS[:2], [None] * 2)
    environment.setenv("PLAUDIT_TRUNCATE", "right")
    assert openrlhf.reward_func([TOO_LONG], [""], [None])["rewards"].isfinite().all()


def test_verl(environment: pytest.MonkeyPatch, server: ServerProcess, expected: list[float]) -> None:
    async def score_all() -> list[float]:
        calls = [
            verl.compute_score(
                data_source="sums", solution_str=r, ground_truth="7", extra_info={"prompt": p, "num_turns": 1}
            )
            for p, r in PAIRS
        ]
        return list(await asyncio.gather(*calls))

    assert asyncio.run(score_all()) == pytest.approx(expected, abs=5e-5)
    with pytest.raises(ServerError, match=r"solution of sums\[0\]: too_long"):
        asyncio.run(verl.compute_score("sums", TOO_LONG, None, {"prompt": "1="}))
    with pytest.raises(ConfigError, match=r"extra_info has no 'prompt'.*\['question'\]"):
        asyncio.run(verl.compute_score("sums", "#3", None, {"question": "1+2="}))
    environment.delenv("PLAUDIT_URL")
    environment.delenv("PLAUDIT_MODEL")
    settings = {"url": server.url, "model": "exact", "prompt_key": "question", "reward_router_address": None}
    assert asyncio.run(verl.compute_score("sums", "#3", "3", {"question": "1+2="}, **settings)) == 1.0
    assert verl.compute_score_sync("sums", "#3", "3", {"question": "1+2="}, **settings) == 1.0
    with pytest.raises(ConfigError, match="extra_info has no"):
        verl.compute_score_sync("sums", "#3", None, {"question": "1+2="})


def test_slime(environment: pytest.MonkeyPatch, expected: list[float]) -> None:
    args = SimpleNamespace(rm_url=None)
    samples = [SimpleNamespace(prompt=p, response=r, label=None) for p, r in PAIRS]
    assert asyncio.run(slime.custom_rm(args, samples[0])) == pytest.approx(expected[0], abs=5e-5)
    assert asyncio.run(slime.custom_rm(args, samples)) == pytest.approx(expected, abs=5e-5)
    long = SimpleNamespace(prompt="1=", response=TOO_LONG, label=None)
    with pytest.raises(ServerError, match=r"sample\[1\]: too_long"):
        asyncio.run(slime.custom_rm(args, [samples[0], long]))
    environment.setenv("PLAUDIT_RENDERED", "true")
    prompt, response = PAIRS[0]
    sample = SimpleNamespace(prompt=f"<bos>{prompt}", response=f"{response}<eos>", label=None)
    assert asyncio.run(slime.custom_rm(args, sample)) == pytest.approx(expected[0], abs=5e-5)
    environment.setenv("PLAUDIT_RENDERED", "yes")
    with pytest.raises(ConfigError, match="PLAUDIT_RENDERED"):
        asyncio.run(slime.custom_rm(args, sample))


def test_invalid_environment_settings_are_named_in_the_error(environment: pytest.MonkeyPatch) -> None:
    assert from_environment() is from_environment()
    assert from_environment(model="exact") is not from_environment()
    for name, value in (("PLAUDIT_TRUNCATE", "middle"), ("PLAUDIT_TIMEOUT", "soon"), ("PLAUDIT_TIMEOUT", "-1")):
        environment.setenv(name, value)
        with pytest.raises(ConfigError, match=f"{name} is '{value}'"):
            from_environment()
        environment.delenv(name)
