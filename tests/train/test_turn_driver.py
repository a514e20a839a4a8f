"""Turns that join a running batch: from any thread, in any engine, with nothing left behind."""

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
    """A thread that still computes when the interpreter ends would take it down."""
    yield
    for thread in threading.enumerate():
        if thread.name == "turn":
            thread.join(30.0)


def tokens(text: str) -> list[int]:
    return [TOKENIZER.bos_token_id, *encode(TOKENIZER, text)]


def engine() -> Engine:
    return Engine(LOADED.module, TOKENIZER)


class Away:
    """The same engine as another process has it: one blocking call, and the calls of several threads."""

    def __init__(self) -> None:
        self.engine = engine()
        self.lock = threading.Lock()
        self.mends = 0

    def generate(self, prompts: list[list[int]], params: list[SamplingParams]) -> list[Sample]:
        with self.lock:
            return self.engine.generate(prompts, params)

    def mend(self) -> None:
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

        def late() -> None:
            driver.submit(tokens("5+6="), GREEDY, partial(results.__setitem__, "second"))

        driver.submit(tokens("7+8+4="), GREEDY, partial(results.__setitem__, "first"))
        driver.wait(1.0)
        driver.advance()
        thread = threading.Thread(target=late)
        thread.start()
        drive(driver, lambda: len(results) == 2)
        thread.join()
        assert not driver.generating
    alone = [engine().generate([tokens(text)], GREEDY)[0] for text in ("7+8+4=", "5+6=")]
    assert [results[name].token_ids for name in ("first", "second")] == [sample.token_ids for sample in alone]


def test_a_turn_that_the_engine_refuses_is_that_turns_error() -> None:
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
def test_a_cancelled_turn_is_never_heard_of(make: Callable[[], Any]) -> None:
    results: list[Any] = []
    mine = make()
    with new_driver(mine) as driver:
        turn = driver.submit(tokens("7+8+4="), GREEDY, results.append)
        driver.wait(1.0)
        driver.advance()
        driver.cancel(turn)
        driver.submit(tokens("5+6="), GREEDY, results.append)
        drive(driver, lambda: not driver.generating)
    assert [sample.prompt_ids for sample in results] == [tuple(tokens("5+6="))]
    if isinstance(mine, Engine):
        assert not mine.open_requests
        mine.check()


@pytest.mark.parametrize("make", [engine, Away])
def test_closing_tells_whoever_waits(make: Callable[[], Any]) -> None:
    results: list[Any] = []
    mine = make()
    with new_driver(mine) as driver:
        driver.submit(tokens("7+8+4="), GREEDY, results.append)
        driver.wait(1.0)
        driver.advance()
        driver.submit(tokens("5+6="), GREEDY, results.append)
    assert [type(result) for result in results] == [Aborted, Aborted]
    with pytest.raises(Aborted, match="has ended"):
        driver.submit(tokens("5+6="), GREEDY, results.append)
    if isinstance(mine, Engine):
        assert not mine.open_requests
        mine.check()


def test_an_engine_that_sleeps_is_an_error() -> None:
    mine = engine()
    mine.sleep()
    with new_driver(mine) as driver:
        driver.submit(tokens("5+6="), GREEDY, lambda _: None)
        with pytest.raises(RequestError, match=r"call wake\(\) first"):
            drive(driver, lambda: False)


def test_lost_engines_are_brought_back_while_turns_wait_for_them() -> None:
    """Only the thread that trains can do that, and it is the one that waits."""
    away, results = Away(), list[Any]()
    with new_driver(away) as driver, away.lock:  # until it is mended
        driver.submit(tokens("5+6="), GREEDY, results.append)
        driver.advance()
        driver.wait(0.01)
        assert away.mends == 1
    assert isinstance(results[0], Aborted)
