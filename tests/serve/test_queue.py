"""The queue: nothing is lost, a request's items stay in order, and keys and requests share capacity by tokens."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass

from hypothesis import given
from hypothesis import strategies as st

from plaudit.serve.workers.queue import MAX_DEAD, FairQueue


@dataclass(eq=False)
class Job:
    tenant: str
    request: int
    index: int
    cost: int
    dead: bool = False


Queue = FairQueue[Job]


def request(queue: Queue, tenant: str, number: int, costs: list[int], priority: int = 0) -> list[Job]:
    jobs = [Job(tenant, number, index, cost) for index, cost in enumerate(costs)]
    queue.add(tenant, jobs, priority)
    return jobs


def drain(queue: Queue) -> list[Job]:
    jobs = []
    while (job := queue.take()) is not None:
        jobs.append(job)
    return jobs


COSTS = st.lists(st.integers(1, 300), min_size=1, max_size=8)
ADD = st.tuples(st.just("add"), st.sampled_from("abc"), COSTS, st.integers(-1, 1))
ACTIONS = st.lists(
    st.one_of(ADD, st.tuples(st.just("take")), st.tuples(st.just("discard"), st.integers(0, 99))), max_size=60
)


@given(ACTIONS)
def test_every_item_is_taken_once_in_request_order_unless_discarded(actions: list[tuple]) -> None:  # type: ignore[type-arg]
    queue: Queue = FairQueue()
    waiting: list[Job] = []
    taken: list[Job] = []
    for number, action in enumerate(actions):
        match action:
            case ("add", tenant, costs, priority):
                waiting += request(queue, tenant, number, costs, priority)
            case ("take",):
                job = queue.take()
                assert (job is None) == (not waiting)
                if job is not None:
                    waiting.remove(job)
                    taken.append(job)
            case ("discard", which) if waiting:
                queue.discard(waiting.pop(which % len(waiting)))
        assert queue.items == len(waiting)
        assert queue.tokens == sum(job.cost for job in waiting)
    rest = drain(queue)
    assert sorted(map(id, rest)) == sorted(map(id, waiting))
    assert (queue.items, queue.tokens) == (0, 0)
    last: dict[int, int] = {}
    for job in taken + rest:
        assert not job.dead
        assert last.get(job.request, -1) < job.index
        last[job.request] = job.index


@given(st.lists(st.integers(1, 300), min_size=30, max_size=60), st.lists(st.integers(1, 300), min_size=30, max_size=60))
def test_two_waiting_keys_get_the_same_number_of_tokens(first: list[int], second: list[int]) -> None:
    queue: Queue = FairQueue()
    request(queue, "a", 0, first)
    request(queue, "b", 1, second)
    served: Counter[str] = Counter()
    left = {"a": len(first), "b": len(second)}
    while all(left.values()):
        job = queue.take()
        assert job is not None
        served[job.tenant] += job.cost
        left[job.tenant] -= 1
        assert abs(served["a"] - served["b"]) <= 300


def test_a_key_that_resubmits_after_each_result_gets_only_its_share() -> None:
    queue: Queue = FairQueue()
    request(queue, "many", 0, [10] * 5000)
    served: Counter[str] = Counter()
    request(queue, "one", 1, [1000])
    for number in range(1000):
        job = queue.take()
        assert job is not None
        served[job.tenant] += job.cost
        if job.tenant == "one":
            request(queue, "one", number + 2, [1000])
    assert abs(served["many"] - served["one"]) <= 1000


def test_an_idle_key_neither_gains_nor_loses_share() -> None:
    queue: Queue = FairQueue()
    request(queue, "a", 0, [100] * 50)
    for _ in range(40):
        queue.take()
    request(queue, "b", 1, [100] * 10)
    order = [job.tenant for job in drain(queue)]
    assert Counter(order[:10]) == {"a": 5, "b": 5}


def test_a_small_request_overtakes_a_large_one_of_the_same_key() -> None:
    queue: Queue = FairQueue()
    request(queue, "a", 0, [100] * 50)
    for _ in range(10):
        queue.take()
    request(queue, "a", 1, [100])
    assert 1 in [job.request for job in (queue.take(), queue.take()) if job is not None]


def test_a_higher_priority_goes_first_within_its_key_only() -> None:
    queue: Queue = FairQueue()
    request(queue, "a", 0, [1] * 4)
    request(queue, "a", 1, [1] * 4, priority=1)
    request(queue, "b", 2, [1] * 4)
    order = drain(queue)
    assert [job.request for job in order if job.tenant == "a"] == [1] * 4 + [0] * 4
    assert {job.tenant for job in order[:2]} == {"a", "b"}


def test_discarded_items_do_not_accumulate_while_nothing_is_taken() -> None:
    queue: Queue = FairQueue()
    request(queue, "a", 0, [1])
    for number in range(1, 20_000):
        for job in request(queue, "a", number, [7]):
            queue.discard(job)
    stored = sum(len(flow.jobs) for tenant in queue._tenants.values() for flow in tenant.flows)
    assert stored <= MAX_DEAD + 2
    assert [job.request for job in drain(queue)] == [0]
