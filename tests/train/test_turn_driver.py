"""Turns that join a running batch: from any thread, in any engine, and leave no requests behind."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

import pytest

from plaudit.core import Engine, SamplingParams
from plaudit.errors import Aborted, RequestError
from plaudit.models import encode, load_policy
from plaudit.records import Sample
from plaudit.train.agents.turn_driver import CallDriver, CoreDriver, TurnDriver, new_driver

LOADED = load_policy("sums-policy", "float32", "cpu")
TOKENIZER = LOADED.tokenizer
GREEDY = SamplingParams(temperature=0.0, max_tokens=24)


@pytest.fixture(autouse=True)
def calls_end() -> Iterator[None]:
    """Joins threads that still compute, which would crash the interpreter at its exit."""
    yield
    for thread in threading.enumerate():
        if thread.name == "turn":
            thread.join(30.0)


def tokens(text: str) -> list[int]:
    return [TOKENIZER.bos_token_id, *encode(TOKENIZER, text)]


def engine() -> Engine:
    return Engine(LOADED.module, TOKENIZER)


class Away:
    """The engine as if in another process: one blocking call, which several threads may make."""

    def __init__(self) -> None:
        self.engine = engine()
        self.lock = threading.Lock()
        self.mends = 0

    def generate(self, prompts: list[list[int]], params: list[SamplingParams]) -> list[Sample]:
        with self.lock:
            return self.engine.generate(prompts, params)

    def restart_lost(self) -> None:
        self.mends += 1


def drive(driver: TurnDriver, until: Callable[[], bool]) -> None:
    for _ in range(1000):
        if until():
            return
        driver.wait(30.0)
        driver.advance()
    raise AssertionError("1000 steps were not enough")


@pytest.mark.parametrize("make", [engine, Away])
def test_a_turn_joins_while_others_run(make: Callable[[], Any]) -> None:
    results: dict[str, Any] = {}
    with new_driver(make()) as driver:
        assert isinstance(driver, CoreDriver if make is engine else CallDriver)

        def submit_late() -> None:
            driver.submit(tokens("5+6="), GREEDY, partial(results.__setitem__, "second"))

        driver.submit(tokens("7+8+4="), GREEDY, partial(results.__setitem__, "first"))
        driver.wait(1.0)
        driver.advance()
        thread = threading.Thread(target=submit_late)
        thread.start()
        drive(driver, lambda: len(results) == 2)
        thread.join()
        assert not driver.generating
    expected = [engine().generate([tokens(text)], GREEDY)[0] for text in ("7+8+4=", "5+6=")]
    assert [results[name].token_ids for name in ("first", "second")] == [sample.token_ids for sample in expected]


def test_turn_that_the_engine_rejects_gets_its_own_error() -> None:
    results: list[Any] = []
    with new_driver(engine()) as driver:
        driver.submit([5] * 10_000, GREEDY, results.append)
        driver.submit(tokens("5+6="), GREEDY, results.append)
        drive(driver, lambda: len(results) == 2)
        with pytest.raises(RequestError, match="n is 2"):
            driver.submit([5], SamplingParams(n=2), results.append)
    assert isinstance(results[0], RequestError)
    assert isinstance(results[1], Sample)


@pytest.mark.parametrize("make", [engine, Away])
def test_cancelled_turn_gives_no_result(make: Callable[[], Any]) -> None:
    results: list[Any] = []
    used_engine = make()
    with new_driver(used_engine) as driver:
        turn = driver.submit(tokens("7+8+4="), GREEDY, results.append)
        driver.wait(1.0)
        driver.advance()
        driver.cancel(turn)
        driver.submit(tokens("5+6="), GREEDY, results.append)
        drive(driver, lambda: not driver.generating)
    assert [sample.prompt_ids for sample in results] == [tuple(tokens("5+6="))]
    if isinstance(used_engine, Engine):
        assert not used_engine.open_requests
        used_engine.check()


@pytest.mark.parametrize("make", [engine, Away])
def test_closing_aborts_waiting_turns(make: Callable[[], Any]) -> None:
    results: list[Any] = []
    used_engine = make()
    with new_driver(used_engine) as driver:
        driver.submit(tokens("7+8+4="), GREEDY, results.append)
        driver.wait(1.0)
        driver.advance()
        driver.submit(tokens("5+6="), GREEDY, results.append)
    assert [type(result) for result in results] == [Aborted, Aborted]
    with pytest.raises(Aborted, match="has ended"):
        driver.submit(tokens("5+6="), GREEDY, results.append)
    if isinstance(used_engine, Engine):
        assert not used_engine.open_requests
        used_engine.check()


def test_sleeping_engine_is_an_error() -> None:
    used_engine = engine()
    used_engine.sleep()
    with new_driver(used_engine) as driver:
        driver.submit(tokens("5+6="), GREEDY, lambda _: None)
        with pytest.raises(RequestError, match=r"call wake\(\) first"):
            drive(driver, lambda: False)


def test_lost_engines_are_restarted_while_turns_wait_for_them() -> None:
    """Only the training thread can restart them, and it is the one that waits."""
    remote_engine, results = Away(), list[Any]()
    with new_driver(remote_engine) as driver, remote_engine.lock:  # blocks generation
        driver.submit(tokens("5+6="), GREEDY, results.append)
        driver.advance()
        driver.wait(0.01)
        assert remote_engine.mends == 1
    assert isinstance(results[0], Aborted)
