"""Blocking calls run in the order of the fair queue."""

from __future__ import annotations

import asyncio
import threading
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor

import pytest

from plaudit.serve.http.message import HttpError
from plaudit.serve.workers.calls import FairCalls


def test_keys_take_turns_and_abandoned_calls_are_not_started() -> None:
    order: list[str] = []
    gate = threading.Event()

    def call(name: str) -> Callable[[], str]:
        def run() -> str:
            gate.wait(30)
            order.append(name)
            return name

        return run

    async def main() -> None:
        with ThreadPoolExecutor(1) as threads:
            calls = FairCalls(threads, 1)
            deadline = time.monotonic() + 60
            many = asyncio.create_task(calls.run([(call(f"a{i}"), 10) for i in range(6)], "ann", deadline))
            cancelled = asyncio.create_task(calls.run([(call("gone"), 10)], "cid", deadline))
            await asyncio.sleep(0)
            with pytest.raises(HttpError) as late:
                await calls.run([(call("late"), 10)], "dan", time.monotonic() + 0.01)
            assert late.value.type == "deadline"
            cancelled.cancel()
            one = asyncio.create_task(calls.run([(call("b"), 10)], "bob", deadline))
            await asyncio.sleep(0)
            gate.set()
            assert await one == ["b"]
            assert await many == [f"a{i}" for i in range(6)]

    asyncio.run(main())
    assert sorted(order) == ["a0", "a1", "a2", "a3", "a4", "a5", "b"]
    assert order.index("b") <= 2


def test_an_error_is_raised_only_in_its_own_request() -> None:
    async def main() -> None:
        with ThreadPoolExecutor(1) as threads:
            calls = FairCalls(threads, 1)
            deadline = time.monotonic() + 60
            with pytest.raises(ZeroDivisionError):
                await calls.run([(lambda: 1 // 0, 1), (lambda: 1, 1)], "ann", deadline)
            assert await calls.run([(lambda: 2, 1)], "bob", deadline) == [2]

    asyncio.run(main())
