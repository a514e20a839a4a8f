"""Paths extended level by level give the same results as without branches, for any cache size."""

import random
from collections.abc import Sequence

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
    """What `generate` draws, with everything read anew."""
    engine.new_version()
    found: list[list[tuple[tuple[int, ...], str, float]]] = [[] for _ in paths]
    for s in engine.generate(list(paths), list(params), seeds=seeds, text=False):
        found[s.group].append((s.token_ids, s.finish_reason, sum(s.raw_logprobs) / len(s.token_ids)))
    return found


def told(grown: list[list[Continuation]]) -> list[list[tuple[tuple[int, ...], str, float]]]:
    assert all(each.error is None for own in grown for each in own)
    return [[(each.tokens, each.finish, each.logprob) for each in own] for own in grown]


def searched(
    engine: Engine, reference: Engine, levels: int = 4, width: int = 6, keep: int = 3, stops: tuple[str, ...] = ()
) -> None:
    """A random search: at every level the draws are compared to the bit, and some paths are given up."""
    rng, branches = random.Random(3), engine.branches()
    open_paths: list[tuple[list[int], Place | None]] = [(path, None) for path in ids(engine)]
    for level in range(levels):
        paths, places = [path for path, _ in open_paths], [place for _, place in open_paths]
        ids_of_stops = () if stops else (stop(engine),)
        params = [
            SamplingParams(n=rng.randint(1, width), max_tokens=9, stop=stops, stop_token_ids=ids_of_stops)
            for _ in paths
        ]
        seeds = [rng.randrange(2**60) for _ in paths]
        grown = branches.sample(paths, places, params, seeds)
        engine.check()
        assert told(grown) == generated(reference, paths, params, seeds), level
        below = [([*path, *each.tokens], each.place) for path, own in zip(paths, grown, strict=True) for each in own]
        rng.shuffle(below)
        open_paths, gone = below[: keep * len(PROMPTS)], below[keep * len(PROMPTS) :]
        branches.free_paths([place for place in (*places, *(place for _, place in gone)) if place is not None])
        engine.check()
    branches.free_paths([place for _, place in open_paths if place is not None])
    assert engine.stats().evictions or engine.stats().tokens_resident == 0  # what went is computed for nobody's place


def test_draws_are_those_of_generate_to_the_bit(reference: Engine) -> None:
    engine = Engine.load("sums-policy", device="cpu")
    searched(engine, reference)
    assert engine.stats().tokens_shared > 0


@pytest.mark.parametrize("stops", [("=1",), ("+", "9;"), (";",)])
def test_stop_strings_end_samples_where_generate_ends_them(reference: Engine, stops: tuple[str, ...]) -> None:
    engine = Engine.load("sums-policy", device="cpu")
    searched(engine, reference, stops=stops)
    assert engine.stats().tokens_shared > 0


def test_stop_strings_that_need_a_test_of_every_token_are_refused(reference: Engine) -> None:
    params = SamplingParams(max_tokens=5, stop=("=1",), min_tokens=2)
    with pytest.raises(RequestError, match="no list of token ids"):
        reference.branches().sample(ids(reference)[:1], [None], [params], [1])


@pytest.mark.parametrize("limits", [{"max_running": 4}, {"budget": 12, "max_running": 5}, {"look_every": 2}])
def test_so_it_is_with_few_rows_and_short_steps(reference: Engine, limits: dict[str, int]) -> None:
    searched(Engine.load("sums-policy", device="cpu", **limits), reference)  # type: ignore[arg-type]


@pytest.mark.parametrize("blocks", [4, 5, 6, 9])
def test_where_room_is_short_paths_wait_or_are_computed_again(reference: Engine, blocks: int) -> None:
    """A pool with hardly more than one path: nodes go for others, and rows give their blocks back."""
    size = reference.backend.block_size * reference.decoder.token_bytes()
    engine = Engine.load("sums-policy", device="cpu", kv_bytes=blocks * size)
    searched(engine, reference)
    assert engine.stats().evictions > 0


def test_a_path_that_does_not_fit_is_refused_and_nothing_stays(reference: Engine) -> None:
    size = reference.backend.block_size * reference.decoder.token_bytes()
    engine = Engine.load("sums-policy", device="cpu", kv_bytes=2 * size)
    params = SamplingParams(max_tokens=30, stop_token_ids=(stop(engine),))
    with pytest.raises(RequestError, match="the pool holds 32"):
        engine.branches().sample(ids(engine)[:1], [None], [params], [1])
    engine.check()
    assert engine.stats().tokens_resident == 0


def test_a_place_of_other_weights_is_none(reference: Engine) -> None:
    engine = Engine.load("sums-policy", device="cpu")
    branches, params = engine.branches(), [SamplingParams(max_tokens=6, stop_token_ids=(stop(engine),))]
    (path,) = ids(engine)[:1]
    ((first,),) = branches.sample([path], [None], params, [1])
    longer = [*path, *first.tokens]
    engine.new_version()
    computed = engine.stats().tokens_computed
    ((second,),) = branches.sample([longer], [first.place], params, [2])
    assert engine.stats().tokens_computed - computed == len(longer) - 1 + len(second.tokens)
    assert told([[second]]) == generated(reference, [longer], params, [2])
    assert first.place is not None
    assert branches.free_paths([first.place]) == 0
    engine.check()


def test_a_path_and_what_it_begins_go_on_together(reference: Engine) -> None:
    engine = Engine.load("sums-policy", device="cpu")
    branches, params = engine.branches(), SamplingParams(n=3, max_tokens=7, stop_token_ids=(stop(engine),))
    (path,) = ids(engine)[:1]
    (first,) = branches.sample([path], [None], [params], [1])
    paths = [path, *([*path, *each.tokens] for each in first), path]
    places = [None, *(each.place for each in first), None]
    seeds = list(range(len(paths)))
    both = branches.sample(paths, places, [params] * len(paths), seeds)
    engine.check()
    assert told(both) == generated(reference, paths, [params] * len(paths), seeds)


def scores(
    branches: Branches, texts: list[str], places: Sequence[Place | None], hidden: bool = False
) -> tuple[np.ndarray, list[Place | None]]:
    sequences = [branches._intake.tokens(text) for text in texts]
    return branches.read(sequences, places, [len(s) - 1 for s in sequences], None, hidden)


@pytest.mark.parametrize("limits", [{}, {"budget": 8, "max_running": 4}])
def test_reading_is_scoring_and_computes_what_is_new(limits: dict[str, int]) -> None:
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
    # What is there twice is computed once but for its last token.
    assert computed <= 3 * (new + 1) + (0 if not limits else 3 * new)
    branches.free_paths([place for place in (*places, *ends) if place is not None])
    engine.check()
    assert engine.stats().tokens_resident == 0


def test_what_cannot_be_is_refused_before_anything_is_computed(reference: Engine) -> None:
    branches = reference.branches()
    with pytest.raises(RequestError, match="outside the vocabulary"):
        branches.sample([[1, 10**6]], [None], [SamplingParams()], [1])
    scorer = Engine.load("sums-steps", device="cpu")
    with pytest.raises(RequestError, match="no vocabulary head"):
        scorer.branches().sample([[1, 5]], [None], [SamplingParams()], [1])
    scorer.pause()
    with pytest.raises(RequestError, match="paused"):
        scorer.branches().read([[1, 5]], [None], [1], None, False)
