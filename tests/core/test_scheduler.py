"""Admission: which requests fit, and when a waiting request can no longer be overtaken."""

from __future__ import annotations

from plaudit.core.kv.blocks import BlockPool
from plaudit.core.kv.prefix import PrefixTree
from plaudit.core.sampling.sampling_params import SamplingParams
from plaudit.core.scheduler import PATIENCE, Scheduler
from plaudit.core.sequence import Request, Sequence

BLOCK = 4


def scheduler(blocks: int, budget: int = 64) -> Scheduler:
    pool = BlockPool(blocks)
    return Scheduler(pool, PrefixTree(pool, BLOCK), budget=budget, max_running=64, look_every=1, window=1)


def sequence(number: int, prompt: int, most: int = 32) -> Sequence:
    """Prompts with different numbers share no prefix."""
    ids = tuple(1000 * number + i for i in range(prompt))
    request = Request(number, ids, SamplingParams(max_tokens=most), max_tokens=most)
    return Sequence(request, 0, list(ids))


def computed(sched: Scheduler) -> list[int]:
    """Plans a step, marks it computed with one sampled token per complete prompt, and returns its request numbers."""
    plan = sched.plan("key")
    for chunk in plan.chunks:
        chunk.sequence.computed += chunk.tokens
        if chunk.sequence.pending == 0:
            chunk.sequence.tokens.append(7)
    sched.done(plan)
    return [chunk.sequence.request.number for chunk in plan.chunks]


def test_admission_reserves_one_block_per_running_sequence() -> None:
    """Without the reserve, the new request would take the last blocks and be preempted in the next steps."""
    sched = scheduler(blocks=6)
    for number in (1, 2):
        sched.add(sequence(number, BLOCK))
        assert computed(sched)[-1] == number
    # Both are about to need their second block: 2 of 6 are used, 4 are free, and 2 of those are reserved.
    sched.add(sequence(3, 3 * BLOCK))
    for _ in range(3):
        assert computed(sched) == [1, 2]
    sched.add(sequence(4, 2))
    # Both have their second block by now: two are free and reserved.
    assert 4 not in computed(sched)
    assert sched.preemptions == 0


def test_long_sequence_is_overtaken_at_most_patience_times() -> None:
    """Short requests overtake a long one that does not fit, but not forever."""
    sched = scheduler(blocks=8)
    sched.add(sequence(1, 4 * BLOCK, most=64))
    assert computed(sched) == [1]
    long = sequence(2, 7 * BLOCK)
    sched.add(long)
    admitted = []
    for number in range(3, 3 + 2 * PATIENCE):
        short = sequence(number, 1, most=1)
        sched.add(short)
        if number in computed(sched):
            admitted.append(number)
            sched.release(short)
        else:
            sched.release(short)
        # The first request is kept at its size, so that only the patience of the long one matters.
        first = next(s for s in sched.running if s.request.number == 1)
        del first.tokens[4 * BLOCK + 1 :]
        first.computed = min(first.computed, 4 * BLOCK)
    assert len(admitted) == PATIENCE
    assert long in sched.waiting


def test_requests_of_similar_length_finish_in_submission_order() -> None:
    """Prompts whose lengths differ by less than a quarter of the budget run in submission order, so that requests of
    many sequences finish one after another and not all with their longest sequence."""
    sched = scheduler(blocks=256, budget=64)
    for number, length in enumerate((12, 15, 9, 3, 14, 11, 5, 13, 40, 2), start=1):
        sched.add(sequence(number, length, most=1))
    finished = []
    while len(finished) < 10:
        for number in computed(sched):
            running = next(s for s in sched.running if s.request.number == number)
            if running.pending == 1:
                finished.append(number)
                sched.end(running)
    # The prompt of 40 tokens is more than two quarters of the budget long, so the tenth runs before it.
    assert finished == [1, 2, 3, 4, 5, 6, 7, 8, 10, 9]
