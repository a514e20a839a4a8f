"""Clients after a fork, pickled into other processes, and in several event loops."""

from __future__ import annotations

import asyncio
import multiprocessing
import os
import pickle
import select
import signal
import threading
from collections.abc import Callable
from concurrent.futures import ProcessPoolExecutor, ThreadPoolExecutor
from typing import Any

import pytest

from plaudit import AsyncRewardClient, RewardClient
from plaudit.errors import ConfigError
from plaudit.integrations.connection import Connection, from_environment
from plaudit.integrations.trl import AsyncRemoteReward, RemoteReward
from plaudit.records import Item
from tests.serve.scripted import Scripted

ITEMS = [Item(prompt=f"p{number}", response=str(number)) for number in range(5)]  # a scripted server's scores
SCORES = [0.0, 1.0, 2.0, 3.0, 4.0]
SECONDS = 60.0


def in_a_fork(act: Callable[[], object]) -> str:
    """What `act` returns in a forked process, as text; a process that hangs is killed."""
    reads, writes = os.pipe()
    pid = os.fork()
    if pid == 0:
        try:
            try:
                text = repr(act())
            except BaseException as error:
                text = f"{type(error).__name__}: {error}"
            os.write(writes, text.encode())
        finally:
            os._exit(0)
    os.close(writes)
    ready = select.select([reads], [], [], SECONDS)[0]
    text = os.read(reads, 1 << 16).decode() if ready else "it hangs"
    os.close(reads)
    os.kill(pid, signal.SIGKILL)
    os.waitpid(pid, 0)
    return text


def values(client: Any) -> list[float | None]:
    return [result.value for result in client.score(ITEMS)]


def rewards(reward: Any) -> list[float | None]:
    answer = reward(prompts=[item.prompt for item in ITEMS], completions=[item.response for item in ITEMS])
    found: list[float | None] = asyncio.run(answer) if asyncio.iscoroutine(answer) else answer
    return found


async def scored(client: AsyncRewardClient) -> list[float | None]:
    return [result.value for result in await client.score(ITEMS)]


def test_client_is_usable_after_a_fork_and_the_parents_too() -> None:
    with Scripted() as scripted, RewardClient(scripted.url, timeout=30) as client:
        assert values(client) == SCORES
        for _ in range(3):
            assert in_a_fork(lambda: values(client)) == repr(SCORES)
            assert in_a_fork(client.close) == "None"
            assert in_a_fork(lambda: in_a_fork(lambda: values(client))) == repr(repr(SCORES))
            assert values(client) == SCORES


def test_client_is_usable_after_a_fork_in_the_middle_of_calls() -> None:
    with Scripted() as scripted, RewardClient(scripted.url, timeout=30) as client:
        ended = threading.Event()

        def call() -> None:
            while not ended.is_set():
                assert values(client) == SCORES

        with ThreadPoolExecutor(4) as threads:
            calls = [threads.submit(call) for _ in range(4)]
            found = [in_a_fork(lambda: values(client)) for _ in range(10)]
            ended.set()
            for each in calls:
                each.result(SECONDS)
        assert found == [repr(SCORES)] * 10


def test_async_client_and_integrations_are_usable_after_a_fork() -> None:
    with Scripted() as scripted:
        client, reward = AsyncRewardClient(scripted.url, timeout=30), RemoteReward(scripted.url)
        assert asyncio.run(scored(client)) == SCORES
        assert rewards(reward) == SCORES
        assert in_a_fork(lambda: asyncio.run(scored(client))) == repr(SCORES)
        assert in_a_fork(lambda: rewards(reward)) == repr(SCORES)
        assert from_environment(scripted.url) is from_environment(scripted.url)
        assert [score.value for score in from_environment(scripted.url).scores(ITEMS)] == SCORES
        assert in_a_fork(lambda: [score.value for score in from_environment(scripted.url).scores(ITEMS)]) == repr(
            SCORES
        )
        reward.close()
        from_environment(scripted.url).close()


def test_grpc_after_a_fork_is_an_error_and_does_not_hang() -> None:
    pytest.importorskip("grpc")
    client = RewardClient("grpc://127.0.0.1:1", timeout=30)
    assert in_a_fork(lambda: values(client)).startswith(
        "ConfigError: grpc://127.0.0.1:1: gRPC does not survive os.fork()"
    )


@pytest.mark.parametrize("protocol", range(2, pickle.HIGHEST_PROTOCOL + 1))
def test_copies_have_the_settings_and_not_the_connections(protocol: int) -> None:
    settings: dict[str, Any] = {
        "model": "m", "api_key": "key", "timeout": 7.0, "retries": 2, "hedge": 3.0, "on_retry": print,
    }  # fmt: skip
    with Scripted() as scripted, RewardClient([scripted.url], **settings) as client:
        assert values(client) == SCORES
        copy = pickle.loads(pickle.dumps(client, protocol))
        assert copy._client._settings == client._client._settings
        assert copy._thread is None
        assert values(copy) == SCORES
        copy.close()
        with pytest.raises(RuntimeError, match="the client is closed"):
            copy.score(ITEMS)
        assert values(client) == SCORES
        assert scripted.asked[-1].headers["authorization"] == "Bearer key"


@pytest.mark.slow
def test_clients_and_rewards_are_sent_to_a_spawned_pool() -> None:
    with Scripted() as scripted:
        sent: list[tuple[Callable[[Any], Any], Any]] = [
            (values, RewardClient(scripted.url)), (values, Connection(scripted.url)._client),
            (rewards, RemoteReward(scripted.url, model="m")), (rewards, AsyncRemoteReward(scripted.url)),
        ]  # fmt: skip
        for act, each in sent:
            assert act(each) == SCORES  # connected before it is sent
        with ProcessPoolExecutor(1, multiprocessing.get_context("spawn")) as pool:
            assert [pool.submit(*pair).result(SECONDS) for pair in sent] == [SCORES] * 4
        for _, each in sent:
            each.close()


def test_async_client_works_in_every_event_loop() -> None:
    with Scripted() as scripted:
        client = AsyncRewardClient(scripted.url, timeout=30)
        for _ in range(3):
            assert asyncio.run(scored(client)) == SCORES

        async def closing() -> list[float | None]:
            async with client:
                return await scored(client)

        for _ in range(3):
            assert asyncio.run(closing()) == SCORES
        loops = [asyncio.new_event_loop() for _ in range(2)]
        for loop in loops * 3:
            assert loop.run_until_complete(scored(client)) == SCORES
        for loop in loops:
            loop.run_until_complete(client.close())
            loop.close()
        with ThreadPoolExecutor(4) as threads:
            assert list(threads.map(lambda _: asyncio.run(closing()), range(16))) == [SCORES] * 16


def test_a_contended_async_client_works_in_the_next_loop() -> None:
    """More calls than connections: what they wait for belongs to a loop too."""

    async def many(client: AsyncRewardClient) -> list[list[float | None]]:
        return await asyncio.gather(*(scored(client) for _ in range(100)))

    with Scripted() as scripted:
        client = AsyncRewardClient(scripted.url, timeout=60)
        for _ in range(2):
            assert asyncio.run(many(client)) == [SCORES] * 100


def test_bad_settings_are_still_refused_when_a_client_is_made(tmp_path: Any) -> None:
    with pytest.raises(ConfigError, match="cannot be used"):
        RewardClient("https://127.0.0.1:1", ca_file=tmp_path / "missing.pem")
