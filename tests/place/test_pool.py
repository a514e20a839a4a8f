"""A pool of engines: routing of prompts, and recovery when an engine fails or has stale weights."""

from __future__ import annotations

import threading
from collections import Counter

import pytest

from plaudit.core import Engine, SamplingParams
from plaudit.errors import EngineLost, RequestError
from plaudit.place.workers.pool import EnginePool
from plaudit.records import Sample
from tests.core import tiny


class CoreEngine:
    """A core engine as a member of a pool, which can be made to fail. `asked` records the prompts of every call."""

    def __init__(self, name: str, version: int | None = 0) -> None:
        self.name = name
        self.version = version
        self.engine = Engine(tiny.model("llama"))
        self.asked: list[list[list[int]]] = []
        self.dies = False
        self.closed = False
        self.gate: threading.Event | None = None
        self.begun = threading.Event()
        self._lock = threading.Lock()

    def generate(
        self, prompts: list[list[int]], params: list[SamplingParams], begun: list[list[Sample]] | None = None
    ) -> list[Sample]:
        with self._lock:
            self.asked.append(prompts)
            self.begun.set()
            samples = self.engine.generate(prompts, params)
            if self.gate is not None:
                assert self.gate.wait(20)
            if self.dies:
                raise EngineLost(f"{self.name} was killed")
            return samples

    def healthy(self) -> bool:
        return not self.dies

    def close(self) -> None:
        self.closed = True


def requests(count: int) -> tuple[list[list[int]], list[SamplingParams]]:
    prompts = [[1, 5 + i % 7, 3 + i % 11, 9, i % 13 + 2] for i in range(count)]
    return prompts, [SamplingParams(n=2, max_tokens=4, seed=i) for i in range(count)]


def tokens(samples: list[Sample]) -> list[tuple[int, int, tuple[int, ...]]]:
    return [(s.group, s.index, s.token_ids) for s in samples]


def test_many_engines_match_the_samples_and_order_of_one() -> None:
    prompts, params = requests(12)
    alone = Engine(tiny.model("llama")).generate(prompts, params)
    members = [CoreEngine("a"), CoreEngine("b"), CoreEngine("c")]
    actual = EnginePool(members).generate(prompts, params)
    assert tokens(actual) == tokens(alone)
    assert [len(m.asked[0]) for m in members] == [4, 4, 4]  # equal work for each


def test_prompts_go_to_the_engine_with_their_prefix_unless_its_load_is_much_higher() -> None:
    members = [CoreEngine("a"), CoreEngine("b")]
    pool = EnginePool(members)
    first, second = [*range(3, 83)], [*range(85, 5, -1)]
    one = [SamplingParams(max_tokens=2, seed=1)]
    pool.generate([first, second], one * 2)
    assert [m.asked for m in members] == [[[first]], [[second]]]
    for _ in range(2):
        pool.generate([[*second, 7]], one)
        pool.generate([[*first, 7]], one)
    assert [len(m.asked) for m in members] == [3, 3]
    assert all(prompt[:80] == second for call in members[1].asked for prompt in call)
    # Forty prompts with one prefix: computing it again on the other engine costs less than queueing all on one.
    members[0].asked.clear()
    members[1].asked.clear()
    pool.generate([[*first, i] for i in range(40)], one * 40)
    assert members[1].asked


def test_requests_of_a_dead_engine_move_to_the_others_without_duplicates() -> None:
    prompts, params = requests(12)
    alone = Engine(tiny.model("llama")).generate(prompts, params)
    members = [CoreEngine("a"), CoreEngine("b"), CoreEngine("c")]
    members[1].dies = True
    pool = EnginePool(members)
    actual = pool.generate(prompts, params)
    assert tokens(actual) == tokens(alone)
    assert max(Counter((s.group, s.index) for s in actual).values()) == 1
    pool.generate(prompts, params)
    assert len(members[1].asked) == 1  # it gets no further requests
    assert pool.look() == {"b": "b was killed"}


def test_when_no_engine_is_left_the_error_gives_the_reason_for_each() -> None:
    members = [CoreEngine("a"), CoreEngine("b", version=None)]
    members[0].dies = True
    pool = EnginePool(members)
    pool.new_version(0)
    with pytest.raises(EngineLost, match="a: a was killed; b: has weights of version None, expected 0"):
        pool.generate(*requests(3))


def test_a_restarted_engine_gets_no_requests_before_it_has_weights() -> None:
    members = [CoreEngine("a", 3), CoreEngine("b", 3)]
    pool = EnginePool(members)
    pool.new_version(3)
    members[1].dies = True
    pool.generate(*requests(4))
    members[1].dies, members[1].version = False, None
    members[1].asked.clear()
    assert pool.look() == {}  # it is healthy again, but its weights are stale
    pool.generate(*requests(4))
    assert not members[1].asked
    members[1].version = 3
    pool.generate(*requests(4))
    assert members[1].asked
    pool.new_version(4)
    members[0].version = 4
    members[1].asked.clear()
    pool.generate(*requests(4))
    assert not members[1].asked


def test_engines_can_be_added_and_removed_during_generation() -> None:
    prompts, params = requests(8)
    first, second = CoreEngine("a"), CoreEngine("b")
    first.gate = threading.Event()
    pool = EnginePool([first])
    samples: list[Sample] = []
    call = threading.Thread(target=lambda: samples.extend(pool.generate(prompts, params)))
    call.start()
    assert first.begun.wait(20)
    pool.add(second)
    pool.remove("a")
    assert not first.closed  # it has a request in flight
    second_samples = pool.generate(prompts, params)
    assert len(second.asked) == 1
    first.gate.set()
    call.join(20)
    assert first.closed
    assert tokens(samples) == tokens(second_samples)
    assert [m.engine.name for m in pool.members] == ["b"]


def test_the_recovery_callback_is_called_when_no_engine_is_left() -> None:
    engine = CoreEngine("a")
    engine.dies = True
    recoveries = []

    def recover() -> bool:
        recoveries.append(1)
        engine.dies = False
        pool.regain("a")
        return True

    pool = EnginePool([engine], recover)
    assert len(pool.generate(*requests(3))) == 6
    assert recoveries == [1]


def test_an_invalid_request_raises_request_error_and_marks_no_engine_as_failed() -> None:
    pool = EnginePool([CoreEngine("a"), CoreEngine("b")])
    with pytest.raises(RequestError, match="outside the vocabulary"):
        pool.generate([[99999]], [SamplingParams()])
    assert pool.look() == {}
