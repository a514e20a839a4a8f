"""Paths extended level by level give the same results as without branches, for any cache size."""

import random
from collections.abc import Sequence
from typing import Any

import numpy as np
import pytest

from plaudit.core import Engine, SamplingParams
from plaudit.core.branches import Branches, Continuation
from plaudit.core.kv.prefix import Place
from plaudit.errors import RequestError

PROMPTS = ["7+8+4+9+2+6+3+5=", "9+1+7+7+2+8+6+4=", "3+4+2="]


@pytest.fixture(scope="module")
def reference() -> Engine:
    return Engine.load("sums-policy", device="cpu")


def stop(engine: Engine) -> int:
    return int(engine.tokenizer.encode(";", add_special_tokens=False)[0])


def ids(engine: Engine) -> list[list[int]]:
    return [engine.tokenizer.encode(prompt) for prompt in PROMPTS]


def generated(
    engine: Engine, paths: Sequence[Sequence[int]], params: Sequence[SamplingParams], seeds: Sequence[int]
) -> list[list[tuple[tuple[int, ...], str, float]]]:  # fmt: skip
    """The samples of `generate`, with every prompt recomputed."""
    engine.new_version()
    results: list[list[tuple[tuple[int, ...], str, float]]] = [[] for _ in paths]
    for s in engine.generate(list(paths), list(params), seeds=seeds, text=False):
        results[s.group].append((s.token_ids, s.finish_reason, sum(s.raw_logprobs) / len(s.token_ids)))
    return results


def results_of(branched: list[list[Continuation]]) -> list[list[tuple[tuple[int, ...], str, float]]]:
    assert all(continuation.error is None for group in branched for continuation in group)
    return [
        [(continuation.tokens, continuation.finish, continuation.logprob) for continuation in group]
        for group in branched
    ]


def check_random_search(
    engine: Engine, reference: Engine, levels: int = 4, width: int = 6, keep: int = 3, stops: tuple[str, ...] = (),
    **options: Any,
) -> None:  # fmt: skip
    """A random search: the samples of every level are compared bit for bit, and some paths are dropped."""
    rng, branches = random.Random(3), engine.branches()
    open_paths: list[tuple[list[int], Place | None]] = [(path, None) for path in ids(engine)]
    for level in range(levels):
        paths, places = [path for path, _ in open_paths], [place for _, place in open_paths]
        ids_of_stops = () if stops else (stop(engine),)
        params = [
            SamplingParams(n=rng.randint(1, width), max_tokens=9, stop=stops, stop_token_ids=ids_of_stops, **options)
            for _ in paths
        ]
        seeds = [rng.randrange(2**60) for _ in paths]
        branched = branches.sample(paths, places, params, seeds)
        engine.check()
        assert results_of(branched) == generated(reference, paths, params, seeds), level
        children = [
            ([*path, *continuation.tokens], continuation.place)
            for path, group in zip(paths, branched, strict=True)
            for continuation in group
        ]
        rng.shuffle(children)
        open_paths, dropped = children[: keep * len(PROMPTS)], children[keep * len(PROMPTS) :]
        branches.free_paths([place for place in (*places, *(place for _, place in dropped)) if place is not None])
        engine.check()
    branches.free_paths([place for _, place in open_paths if place is not None])
    # Without evictions, freed paths leave nothing resident.
    assert engine.stats().evictions or engine.stats().tokens_resident == 0


def test_branch_samples_are_bit_identical_to_generate(reference: Engine) -> None:
    engine = Engine.load("sums-policy", device="cpu")
    check_random_search(engine, reference)
    assert engine.stats().tokens_shared > 0


@pytest.mark.parametrize("stops", [("=1",), ("+", "9;"), (";",)])
def test_stop_strings_end_branches_where_generate_ends_samples(reference: Engine, stops: tuple[str, ...]) -> None:
    engine = Engine.load("sums-policy", device="cpu")
    check_random_search(engine, reference, stops=stops)
    assert engine.stats().tokens_shared > 0


@pytest.mark.parametrize(
    "options",
    [
        {"repetition_penalty": 1.5},
        {"frequency_penalty": 1.0, "stops": ("+", "9;")},
        {"presence_penalty": 0.7, "bad_words_ids": (7,), "temperature": 0.8, "top_p": 0.9},
    ],
)
def test_penalties_and_filters_apply_to_branches_as_in_generate(reference: Engine, options: dict[str, Any]) -> None:
    check_random_search(Engine.load("sums-policy", device="cpu", look_every=2), reference, **options)


@pytest.mark.parametrize(
    ("options", "reason"),
    [
        ({"stop": ("=1",), "min_tokens": 2}, "min_tokens = 2 together with stop strings"),
        ({"regex": "[0-9]+"}, "do not constrain samples by json_schema or regex"),
        ({"json_schema": {"type": "integer"}}, "do not constrain samples by json_schema or regex"),
    ],
)
def test_options_that_must_be_checked_per_token_are_rejected(
    reference: Engine, options: dict[str, Any], reason: str
) -> None:
    with pytest.raises(RequestError, match=reason):
        reference.branches().sample(ids(reference)[:1], [None], [SamplingParams(max_tokens=5, **options)], [1])


@pytest.mark.parametrize("limits", [{"max_running": 4}, {"budget": 12, "max_running": 5}, {"look_every": 2}])
def test_branch_samples_do_not_depend_on_batch_limits(reference: Engine, limits: dict[str, int]) -> None:
    check_random_search(Engine.load("sums-policy", device="cpu", **limits), reference)  # type: ignore[arg-type]


@pytest.mark.parametrize("blocks", [4, 5, 6, 9])
def test_branch_samples_do_not_depend_on_kv_cache_size(reference: Engine, blocks: int) -> None:
    """The pool holds little more than one path: nodes are evicted for others, and rows give their blocks back."""
    size = reference.backend.block_size * reference.decoder.token_bytes()
    engine = Engine.load("sums-policy", device="cpu", kv_bytes=blocks * size)
    check_random_search(engine, reference)
    assert engine.stats().evictions > 0


def test_path_larger_than_the_kv_pool_is_rejected_and_leaves_nothing_resident(reference: Engine) -> None:
    size = reference.backend.block_size * reference.decoder.token_bytes()
    engine = Engine.load("sums-policy", device="cpu", kv_bytes=2 * size)
    params = SamplingParams(max_tokens=30, stop_token_ids=(stop(engine),))
    with pytest.raises(RequestError, match="the pool holds 32"):
        engine.branches().sample(ids(engine)[:1], [None], [params], [1])
    engine.check()
    assert engine.stats().tokens_resident == 0


def test_place_of_an_older_weight_version_is_recomputed(reference: Engine) -> None:
    engine = Engine.load("sums-policy", device="cpu")
    branches, params = engine.branches(), [SamplingParams(max_tokens=6, stop_token_ids=(stop(engine),))]
    (path,) = ids(engine)[:1]
    ((first,),) = branches.sample([path], [None], params, [1])
    longer = [*path, *first.tokens]
    engine.new_version()
    computed = engine.stats().tokens_computed
    ((second,),) = branches.sample([longer], [first.place], params, [2])
    assert engine.stats().tokens_computed - computed == len(longer) - 1 + len(second.tokens)
    assert results_of([[second]]) == generated(reference, [longer], params, [2])
    assert first.place is not None
    assert branches.free_paths([first.place]) == 0
    engine.check()


def test_path_and_its_extensions_are_sampled_in_one_batch(reference: Engine) -> None:
    engine = Engine.load("sums-policy", device="cpu")
    branches, params = engine.branches(), SamplingParams(n=3, max_tokens=7, stop_token_ids=(stop(engine),))
    (path,) = ids(engine)[:1]
    (first,) = branches.sample([path], [None], [params], [1])
    paths = [path, *([*path, *continuation.tokens] for continuation in first), path]
    places = [None, *(continuation.place for continuation in first), None]
    seeds = list(range(len(paths)))
    branched = branches.sample(paths, places, [params] * len(paths), seeds)
    engine.check()
    assert results_of(branched) == generated(reference, paths, [params] * len(paths), seeds)


def scores(
    branches: Branches, texts: list[str], places: Sequence[Place | None], hidden: bool = False
) -> tuple[np.ndarray, list[Place | None]]:
    sequences = [branches._intake.tokens(text) for text in texts]
    return branches.read(sequences, places, [len(s) - 1 for s in sequences], None, hidden)


@pytest.mark.parametrize("limits", [{}, {"budget": 8, "max_running": 4}])
def test_read_equals_score_and_computes_only_new_tokens(limits: dict[str, int]) -> None:
    engine = Engine.load("sums-steps", device="cpu", **limits)  # type: ignore[arg-type]
    branches, step = engine.branches(), "7+8=15;"
    texts = [f"{prompt}{step}" for prompt in PROMPTS]
    values, places = scores(branches, texts, [None] * 3)
    engine.check()
    assert values == pytest.approx(np.stack(engine.score(texts)), abs=1e-5)
    longer = [f"{text}15+4=19;" for text in texts for _ in range(2)]
    computed = engine.stats().tokens_computed
    values, ends = scores(branches, longer, [place for place in places for _ in range(2)], hidden=True)
    computed = engine.stats().tokens_computed - computed
    assert values == pytest.approx(np.stack(engine.score(longer, hidden=True)), abs=1e-5)
    new = len(branches._intake.tokens(longer[0])) - len(branches._intake.tokens(texts[0]))
    # Tokens that occur twice are computed once, except for the last token.
    assert computed <= 3 * (new + 1) + (0 if not limits else 3 * new)
    branches.free_paths([place for place in (*places, *ends) if place is not None])
    engine.check()
    assert engine.stats().tokens_resident == 0


def test_invalid_branch_requests_are_rejected(reference: Engine) -> None:
    branches = reference.branches()
    with pytest.raises(RequestError, match="outside the vocabulary"):
        branches.sample([[1, 10**6]], [None], [SamplingParams()], [1])
    scorer = Engine.load("sums-steps", device="cpu")
    with pytest.raises(RequestError, match="no vocabulary head"):
        scorer.branches().sample([[1, 5]], [None], [SamplingParams()], [1])
    scorer.pause()
    with pytest.raises(RequestError, match="paused"):
        scorer.branches().read([[1, 5]], [None], [1], None, False)
