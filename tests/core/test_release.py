"""Freeing KV: blocks that other paths need stay, and the resident tokens are those of distinct prefixes."""

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
    """Sequences that diverge from each other at random positions."""
    result = [[1, *(rng.randrange(4, 14) for _ in range(40))]]
    for _ in range(11):
        base = rng.choice(result)
        result.append([*base[: rng.randint(1, len(base))], *(rng.randrange(4, 14) for _ in range(rng.randint(1, 30)))])
    return result


def extended(engine: Engine, sequences: list[list[int]], count: int = 1) -> list[Continuation]:
    """Samples one token for each path, greedily if `count` is 1, so that the full path is computed."""
    params = [SamplingParams(n=count, max_tokens=1, temperature=0 if count == 1 else 1)] * len(sequences)
    groups = engine.branches().sample(sequences, [None] * len(sequences), params, list(range(len(sequences))))
    return [continuation for group in groups for continuation in group]


def places(continuations: list[Continuation]) -> list[Place]:
    return [continuation.place for continuation in continuations if continuation.place is not None]


@pytest.mark.parametrize("seed", range(5))
def test_free_path_frees_blocks_and_keeps_other_paths_cached(engine: Engine, seed: int) -> None:
    engine.new_version()
    sequences = paths(random.Random(seed))
    continuations = extended(engine, sequences)
    before = engine.stats()
    freed = engine.branches().free_paths(places(continuations[6:]))
    engine.check()
    after = engine.stats()
    assert before.blocks_in_use - after.blocks_in_use == freed
    computed = after.tokens_computed
    again = extended(engine, sequences[:6])
    # The last token of a path is always computed for its row, and a few others where copying would cost more.
    assert engine.stats().tokens_computed - computed <= 6 * 4
    engine.branches().free_paths(places([*continuations[:6], *again]))
    engine.check()
    assert engine.stats().tokens_resident == 0


def test_resident_tokens_are_the_distinct_prefix_tokens(monkeypatch: pytest.MonkeyPatch) -> None:
    """With blocks of one token the prefix cache is exactly the trie of the computed tokens."""
    monkeypatch.setattr(CpuBackend, "block_size", 1)
    engine = Engine.load("sums-policy", device="cpu", kv_bytes=2**24)
    sequences = paths(random.Random(9))
    continuations = extended(engine, sequences)
    assert engine.stats().tokens_resident == distinct_tokens(sequences)
    engine.branches().free_paths(places(continuations[4:]))
    engine.check()
    assert engine.stats().tokens_resident == distinct_tokens(sequences[:4])


def test_score_returns_hidden_rows_on_request() -> None:
    engine = Engine.load("sums-steps", device="cpu")
    texts = ["7+8=7+8=15;", "3+4+2=3+4=7;"]
    plain, cached = (engine.score(texts, cache=cache) for cache in (False, True))
    for cache in (False, True):
        rows = engine.score(texts, hidden=True, cache=cache)
        labels = len(plain[0])
        head = engine.decoder.module.score  # type: ignore[union-attr]
        for row, expected, expected_cached in zip(rows, plain, cached, strict=True):
            assert row[:labels] == pytest.approx(expected, abs=1e-5)
            assert row[:labels] == pytest.approx(expected_cached, abs=1e-5)
            with torch.inference_mode():
                assert head(torch.from_numpy(row[labels:])).numpy() == pytest.approx(expected, abs=1e-5)
