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
    """Prompts of different numbers share nothing."""
    ids = tuple(1000 * number + i for i in range(prompt))
    request = Request(number, ids, SamplingParams(max_tokens=most), max_tokens=most)
    return Sequence(request, 0, list(ids))


def computed(one: Scheduler) -> list[int]:
    """Plan a step and enter it as computed, with a token drawn for each whole prompt; the numbers of who was in it."""
    plan = one.plan("key")
    for chunk in plan.chunks:
        chunk.sequence.computed += chunk.tokens
        if chunk.sequence.pending == 0:
            chunk.sequence.tokens.append(7)
    one.done(plan)
    return [chunk.sequence.request.number for chunk in plan.chunks]


def test_an_admission_leaves_a_block_for_each_sequence_that_runs() -> None:
    """Without the reserve, the newcomer would take the last blocks and be thrown out in the next steps."""
    one = scheduler(blocks=6)
    for number in (1, 2):
        one.add(sequence(number, BLOCK))
        assert computed(one)[-1] == number
    # Both are about to need their second block: 2 of 6 are taken, 4 are free, and 2 of those are spoken for.
    one.add(sequence(3, 3 * BLOCK))
    for _ in range(3):
        assert computed(one) == [1, 2]
    one.add(sequence(4, 2))
    # Both have taken their second block by now: two are free, and the reserve of two is not touched.
    assert 4 not in computed(one)
    assert one.preemptions == 0


def test_a_sequence_that_was_passed_by_for_long_is_waited_for() -> None:
    """Short ones go round a long one that finds no room, but not for ever."""
    one = scheduler(blocks=8)
    one.add(sequence(1, 4 * BLOCK, most=64))
    assert computed(one) == [1]
    long = sequence(2, 7 * BLOCK)
    one.add(long)
    admitted = []
    for number in range(3, 3 + 2 * PATIENCE):
        short = sequence(number, 1, most=1)
        one.add(short)
        if number in computed(one):
            admitted.append(number)
            one.release(short)
        else:
            one.release(short)
        # The first one is held at its size, so that only the long one's patience decides.
        first = next(s for s in one.running if s.request.number == 1)
        del first.tokens[4 * BLOCK + 1 :]
        first.computed = min(first.computed, 4 * BLOCK)
    assert len(admitted) == PATIENCE
    assert long in one.waiting


def test_the_first_requests_end_while_the_last_wait() -> None:
    """Of prompts that differ by less than a quarter of the budget none goes before one that was submitted earlier, so
    that of requests of many sequences one ends after the other, and not all with their longest."""
    one = scheduler(blocks=256, budget=64)
    for number, length in enumerate((12, 15, 9, 3, 14, 11, 5, 13, 40, 2), start=1):
        one.add(sequence(number, length, most=1))
    finished = []
    while len(finished) < 10:
        for number in computed(one):
            running = next(s for s in one.running if s.request.number == number)
            if running.pending == 1:
                finished.append(number)
                one.end(running)
    # The one of 40 tokens is two quarters of a budget long, so the tenth goes before it.
    assert finished == [1, 2, 3, 4, 5, 6, 7, 8, 10, 9]
