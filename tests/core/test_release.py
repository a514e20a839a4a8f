"""Releasing KV: blocks that others need stay, and the token count is that of distinct prefixes."""

import random

import pytest
import torch

from plaudit.core import Engine, SamplingParams
from plaudit.core.branches import Continuation
from plaudit.core.device.cpu import CpuBackend
from plaudit.core.kv.prefix import Place
from plaudit.search.tree.tree import distinct_tokens


@pytest.fixture(scope="module")
def engine() -> Engine:
    return Engine.load("sums-policy", device="cpu")


def paths(rng: random.Random) -> list[list[int]]:
    """Sequences that leave each other at all kinds of places."""
    found = [[1, *(rng.randrange(4, 14) for _ in range(40))]]
    for _ in range(11):
        base = rng.choice(found)
        found.append([*base[: rng.randint(1, len(base))], *(rng.randrange(4, 14) for _ in range(rng.randint(1, 30)))])
    return found


def grown(engine: Engine, sequences: list[list[int]], count: int = 1) -> list[Continuation]:
    """A token more of each path, drawn greedily, so that all of the path is computed."""
    params = [SamplingParams(n=count, max_tokens=1, temperature=0 if count == 1 else 1)] * len(sequences)
    every = engine.branches().sample(sequences, [None] * len(sequences), params, list(range(len(sequences))))
    return [each for own in every for each in own]


def places(found: list[Continuation]) -> list[Place]:
    return [each.place for each in found if each.place is not None]


@pytest.mark.parametrize("seed", range(5))
def test_what_is_released_is_gone_and_the_rest_is_found(engine: Engine, seed: int) -> None:
    engine.new_version()
    sequences = paths(random.Random(seed))
    found = grown(engine, sequences)
    before = engine.stats()
    freed = engine.branches().free_paths(places(found[6:]))
    engine.check()
    after = engine.stats()
    assert before.blocks_in_use - after.blocks_in_use == freed
    computed = after.tokens_computed
    again = grown(engine, sequences[:6])
    # The last token of a path is always computed, for the row it gives, and a few where copying costs more.
    assert engine.stats().tokens_computed - computed <= 6 * 4
    engine.branches().free_paths(places([*found[:6], *again]))
    engine.check()
    assert engine.stats().tokens_resident == 0


def test_resident_tokens_are_the_distinct_beginnings(monkeypatch: pytest.MonkeyPatch) -> None:
    """With blocks of one token the tree holds exactly the trie of what was computed."""
    monkeypatch.setattr(CpuBackend, "block_size", 1)
    engine = Engine.load("sums-policy", device="cpu", kv_bytes=2**24)
    sequences = paths(random.Random(9))
    found = grown(engine, sequences)
    assert engine.stats().tokens_resident == distinct_tokens(sequences)
    engine.branches().free_paths(places(found[4:]))
    engine.check()
    assert engine.stats().tokens_resident == distinct_tokens(sequences[:4])


def test_hidden_rows_come_with_the_scores() -> None:
    engine = Engine.load("sums-steps", device="cpu")
    texts = ["7+8=7+8=15;", "3+4+2=3+4=7;"]
    plain, cached = (engine.score(texts, cache=cache) for cache in (False, True))
    for cache in (False, True):
        both = engine.score(texts, hidden=True, cache=cache)
        labels = len(plain[0])
        head = engine.decoder.module.score  # type: ignore[union-attr]
        for row, expected, again in zip(both, plain, cached, strict=True):
            assert row[:labels] == pytest.approx(expected, abs=1e-5)
            assert row[:labels] == pytest.approx(again, abs=1e-5)
            with torch.inference_mode():
                assert head(torch.from_numpy(row[labels:])).numpy() == pytest.approx(expected, abs=1e-5)
