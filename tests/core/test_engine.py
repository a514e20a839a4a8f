"""Guarantees of the engine to its callers."""

from __future__ import annotations

import gc
import time
from collections.abc import Callable, Iterator
from dataclasses import replace
from typing import Any

import pytest
import torch
from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast

from plaudit.core import Engine, SamplingParams, Update
from plaudit.core.device.backend import DecodeBatch, Decoded
from plaudit.core.device.cpu import CpuBackend
from plaudit.core.sequence import Sequence
from plaudit.errors import PlauditError, RequestError
from plaudit.records import Sample
from tests.core import tiny

MODULE = tiny.model("llama")


def letters() -> PreTrainedTokenizerFast:
    """Token 3 + i is the i-th of these pieces; some are parts of others, so that stop strings cross token borders."""
    pieces = [
        "<pad>",
        "<s>",
        "</s>",
        *"abcdefghijklmnopqrstuvwxyz ABCDEFGHIJKLMNOPQRSTUVWXYZ0123456789.,;:!?",
        "ab",
        "cd",
    ]
    pieces += [f"w{i}" for i in range(tiny.VOCAB - len(pieces))]
    tokenizer = Tokenizer(models.WordLevel({p: i for i, p in enumerate(pieces)}, unk_token="<pad>"))
    tokenizer.pre_tokenizer = pre_tokenizers.Split("", "isolated")
    tokenizer.decoder = decoders.Fuse()
    return PreTrainedTokenizerFast(tokenizer_object=tokenizer, eos_token="</s>", pad_token="<pad>", bos_token="<s>")


@pytest.fixture(scope="module")
def engine() -> Engine:
    return Engine(MODULE, letters())


PROMPTS = tiny.sequences(1, 5, 3, 30)


def test_samples_are_ordered_by_group_and_index(engine: Engine) -> None:
    samples = engine.generate(PROMPTS, SamplingParams(n=3, max_tokens=5, ignore_eos=True))
    assert [(s.group, s.index) for s in samples] == [(g, i) for g in range(5) for i in range(3)]
    assert all(len(s.token_ids) == 5 and s.finish_reason == "length" and s.mask == (1,) * 5 for s in samples)
    assert [s.prompt_ids for s in samples[::3]] == [tuple(p) for p in PROMPTS]
    assert len({s.token_ids for s in samples[:3]}) == 3


def test_prompt_of_n_samples_is_computed_once() -> None:
    fresh = Engine(MODULE)
    prompt = tiny.sequences(3, 1, 50, 50)[0]
    fresh.generate([prompt], SamplingParams(n=8, max_tokens=1))
    assert fresh.stats().tokens_computed == 50 + 7  # each further sample recomputes the last token for its own row
    assert fresh.stats().tokens_shared == 7 * 49


def test_same_seed_gives_the_same_sample_in_any_batch(engine: Engine) -> None:
    params = SamplingParams(max_tokens=20, seed=11, n=2)
    alone = engine.generate([PROMPTS[0]], params)
    batched = engine.generate([PROMPTS[0], *PROMPTS], [params, *[SamplingParams(max_tokens=9)] * 5])
    assert [s.token_ids for s in batched[:2]] == [s.token_ids for s in alone]
    small = Engine(MODULE, kv_bytes=engine.decoder.token_bytes() * 80, budget=16, max_running=3)
    assert [s.token_ids for s in small.generate([PROMPTS[0]], params)] == [s.token_ids for s in alone]


def test_two_engines_with_the_same_seed_are_bit_identical() -> None:
    params = SamplingParams(n=2, max_tokens=10)
    first, second = (Engine(MODULE, seed=5).generate(PROMPTS, params) for _ in range(2))
    assert first == second
    assert Engine(MODULE, seed=6).generate(PROMPTS, params) != first


def test_stop_tokens_and_min_tokens(engine: Engine) -> None:
    full = engine.generate([PROMPTS[0]], SamplingParams(temperature=0, max_tokens=20, ignore_eos=True))[0]
    stop = full.token_ids[4]
    first = full.token_ids.index(stop)
    stopped = engine.generate(
        [PROMPTS[0]], SamplingParams(temperature=0, max_tokens=20, ignore_eos=True, stop_token_ids=(stop,))
    )[0]
    assert stopped.token_ids == full.token_ids[: first + 1]
    assert stopped.finish_reason == "stop"
    with_minimum = SamplingParams(temperature=0, max_tokens=20, stop_token_ids=(stop,), min_tokens=15)
    assert len(engine.generate([PROMPTS[0]], with_minimum)[0].token_ids) > 15 - 1


@pytest.mark.parametrize("look_every", [1, 8])
def test_stop_strings_across_token_borders(look_every: int) -> None:
    engine = Engine(MODULE, letters(), look_every=look_every)
    full = engine.generate([PROMPTS[1]], SamplingParams(temperature=0, max_tokens=24, ignore_eos=True))[0]
    stop = full.text[7:10]
    start = full.text.index(stop)
    params = SamplingParams(temperature=0, max_tokens=24, ignore_eos=True, stop=(stop,))
    stopped = engine.generate([PROMPTS[1]], params)[0]
    assert stopped.text == full.text[:start]
    assert stopped.finish_reason == "stop"
    assert stopped.token_ids == full.token_ids[: len(stopped.token_ids)]
    streamed = list(engine.stream(PROMPTS[1], params))
    assert "".join(u.text for u in streamed) == stopped.text
    assert streamed[-1].sample is not None
    assert streamed[-1].sample.text == stopped.text
    assert sum((u.token_ids for u in streamed), ()) == stopped.token_ids


def test_streaming_matches_generate(engine: Engine) -> None:
    params = SamplingParams(max_tokens=12, seed=3, n=2)
    expected = engine.generate(["abc d"], params)
    callback_updates: list[Update] = []
    request = engine.submit("abc d", params, on_update=callback_updates.append)
    updates: list[Update] = []
    while engine.busy:
        updates += engine.step()
    assert updates == callback_updates
    assert all(u.request == request for u in updates)
    for i in range(2):
        own_updates = [u for u in updates if u.index == i]
        assert own_updates[-1].sample is not None
        assert own_updates[-1].sample.token_ids == expected[i].token_ids
        assert "".join(u.text for u in own_updates) == expected[i].text
    assert engine.step() == []


def test_failing_callback_or_stop_test_ends_only_its_own_request(engine: Engine) -> None:
    def fail(*_: object) -> Any:
        raise ValueError("no such thing")

    params = SamplingParams(max_tokens=12, seed=3)
    good = engine.submit(PROMPTS[0], params)
    callback = engine.submit(PROMPTS[1], params, on_update=fail)
    test = engine.submit(PROMPTS[2], params, stop_when=fail)
    samples: dict[int, Any] = {}
    while engine.busy:
        samples |= {u.request: u.sample for u in engine.step() if u.sample is not None}
    assert samples[good].finish_reason in ("length", "stop")
    for request, source in ((callback, "callback"), (test, "stop test")):
        assert samples[request].finish_reason == "error"
        assert samples[request].error.type == "ValueError"
        assert f"the {source} failed: no such thing" in samples[request].error.message
    engine.check()


def test_a_stop_test_ends_a_sample(engine: Engine) -> None:
    request = engine.submit(
        PROMPTS[0], SamplingParams(max_tokens=40, ignore_eos=True), stop_when=lambda tokens, _: len(tokens) == 5
    )
    updates = []
    while engine.busy:
        updates += engine.step()
    sample = updates[-1].sample
    assert sample is not None
    assert (updates[-1].request, len(sample.token_ids), sample.finish_reason) == (request, 5, "stop")


def test_engine_works_after_a_step_raised() -> None:
    engine = Engine(MODULE, look_every=2)
    expected = engine.generate([PROMPTS[0]], SamplingParams(max_tokens=6, seed=1))
    forward = engine.backend.forward
    engine.backend.forward = lambda *_: (_ for _ in ()).throw(MemoryError("full"))  # type: ignore[method-assign, assignment]
    with pytest.raises(MemoryError, match="full"):
        engine.generate([PROMPTS[1]])
    engine.backend.forward = forward  # type: ignore[method-assign]
    engine.check()
    assert engine.stats().blocks_in_use == 0
    assert engine.generate([PROMPTS[0]], SamplingParams(max_tokens=6, seed=1)) == expected


def test_generate_uses_long_decode_windows_unless_tokens_are_needed_early(monkeypatch: pytest.MonkeyPatch) -> None:
    free = SamplingParams(max_tokens=33, ignore_eos=True, seed=1)

    def steps(engine: Engine, work: Callable[[], object]) -> int:
        before = engine.stats().steps
        work()
        return engine.stats().steps - before

    def stepped(engine: Engine) -> None:
        engine.submit_all(PROMPTS[:2], free)
        while engine.busy:
            engine.step()

    expected = Engine(MODULE).generate(PROMPTS[:2], free)
    monkeypatch.setattr(CpuBackend, "window", 32)  # as on a GPU, whose windows are longer
    engine = Engine(MODULE, letters())
    samples: list[Sample] = []
    assert steps(engine, lambda: samples.extend(engine.generate(PROMPTS[:2], free))) == 2  # prefill and one window
    assert [s.token_ids for s in samples] == [s.token_ids for s in expected]
    assert steps(engine, lambda: stepped(engine)) == 5
    for option in (replace(free, deadline=100.0), replace(free, stop=("never",))):
        assert steps(engine, lambda option=option: engine.generate(PROMPTS[:2], option)) == 5  # type: ignore[misc]
    assert steps(narrow := Engine(MODULE, max_running=1), lambda: narrow.generate(PROMPTS[:2], free)) == 5 + 2
    explicit = Engine(MODULE, look_every=8)
    assert steps(explicit, lambda: explicit.generate(PROMPTS[:2], free)) == 5


def test_decode_window_returned_in_parts_gives_the_same_samples(monkeypatch: pytest.MonkeyPatch) -> None:
    params = [
        SamplingParams(n=2, max_tokens=40, seed=3, ignore_eos=True),
        SamplingParams(n=2, max_tokens=33, seed=4, stop_token_ids=tuple(range(5, 9))),
        SamplingParams(n=2, max_tokens=40, seed=5, ignore_eos=True, stop=("a",)),
    ]
    expected = Engine(MODULE, letters(), look_every=16).generate(PROMPTS[:3], params)
    assert {s.finish_reason for s in expected} == {"length", "stop"}
    decode = CpuBackend.decode

    def in_parts(self: CpuBackend, batch: DecodeBatch, steps: int) -> Iterator[Decoded]:
        for decoded in decode(self, batch, steps):
            for start in range(0, len(decoded.tokens), 3):
                columns = (decoded.tokens, decoded.logprobs, decoded.raw_logprobs, decoded.alive)
                yield Decoded(*(column[start : start + 3] for column in columns))

    monkeypatch.setattr(CpuBackend, "decode", in_parts)
    engine = Engine(MODULE, letters(), look_every=16)
    assert engine.generate(PROMPTS[:3], params) == expected
    engine.check()
    before = engine.stats().tokens_computed
    engine.generate([[*PROMPTS[0], *expected[0].token_ids]], SamplingParams(max_tokens=1))
    assert engine.stats().tokens_computed - before <= 2  # the prefix cache has the KV that the parts stored


def test_generate_leaves_no_reference_cycles() -> None:
    engine = Engine(MODULE)
    gc.collect()
    gc.disable()
    try:
        engine.generate(PROMPTS[:3], SamplingParams(n=2, max_tokens=20, ignore_eos=True))
        assert not [obj for obj in gc.get_objects() if type(obj) is Sequence]
    finally:
        gc.enable()


def test_abort_and_deadline(engine: Engine) -> None:
    aborted = engine.submit(PROMPTS[0], SamplingParams(max_tokens=100, ignore_eos=True, n=2))
    expired = engine.submit(PROMPTS[1], SamplingParams(max_tokens=100, ignore_eos=True, deadline=0.001))
    updates = engine.step()  # on a slow machine the deadline may have passed already
    engine.abort(aborted)
    time.sleep(0.002)
    updates += engine.step()
    finished: dict[tuple[int, int], Any] = {(u.request, u.index): u.sample for u in updates if u.sample is not None}
    assert [finished[key].finish_reason for key in ((aborted, 0), (aborted, 1), (expired, 0))] == ["abort"] * 3
    assert "deadline of 0.001 s" in finished[expired, 0].error.message
    assert not engine.busy
    engine.abort(aborted)  # already finished: no effect
    assert engine.step() == []


def test_short_requests_overtake_a_long_prompt_which_still_finishes() -> None:
    engine = Engine(MODULE, budget=16, max_running=16, look_every=1)
    long = engine.submit(tiny.sequences(5, 1, 200, 200)[0], SamplingParams(max_tokens=1))
    order = []
    for round_ in range(40):
        if round_ < 12:
            engine.submit(tiny.sequences(60 + round_, 1, 8, 8)[0], SamplingParams(max_tokens=1))
        order += [u.request for u in engine.step() if u.sample is not None]
    assert not engine.busy
    assert order.index(long) > 3
    assert len(order) == 13


def test_higher_priority_runs_first() -> None:
    engine = Engine(MODULE, budget=16, max_running=1, look_every=1)
    low = engine.submit(PROMPTS[0][:5], SamplingParams(max_tokens=2, ignore_eos=True))
    high = engine.submit(PROMPTS[1][:5], SamplingParams(max_tokens=2, ignore_eos=True, priority=1))
    order = []
    while engine.busy:
        order += [u.request for u in engine.step() if u.sample is not None]
    assert order == [high, low]


def test_new_version_is_recomputed_and_recorded_in_samples() -> None:
    module = tiny.model("llama")
    engine = Engine(module)
    before = engine.generate([PROMPTS[0]], SamplingParams(temperature=0, max_tokens=8))[0]
    with torch.no_grad():
        for parameter in module.parameters():
            parameter.mul_(1.1)
    assert engine.new_version() == 1
    after = engine.generate([PROMPTS[0]], SamplingParams(temperature=0, max_tokens=8))[0]
    assert list(after.token_ids) == tiny.plain_greedy(module, PROMPTS[0], 8)
    assert (set(before.versions), set(after.versions)) == ({0}, {1})
    assert engine.new_version(7) == engine.version == 7


@pytest.mark.parametrize("keep", ["recompute", "continue"])
def test_new_version_during_generation(keep: str) -> None:
    module = tiny.model("llama")
    engine = Engine(module, look_every=4)
    engine.submit(PROMPTS[0], SamplingParams(temperature=0, max_tokens=12, ignore_eos=True))
    engine.step()
    engine.step()
    resident = engine.stats().tokens_resident
    with torch.no_grad():
        module.lm_head.weight.mul_(-1)  # type: ignore[union-attr, operator]
    engine.pause()
    assert engine.step() == []
    with pytest.raises(RequestError, match=r"paused: call resume\(\)"):
        engine.generate([PROMPTS[0]])
    engine.new_version(keep=keep)  # type: ignore[arg-type]
    engine.resume()
    assert engine.stats().tokens_resident == (0 if keep == "recompute" else resident)
    updates = []
    while engine.busy:
        updates += engine.step()
    sample = updates[-1].sample
    assert sample is not None
    assert sample.versions == (0,) * 5 + (1,) * 7
    assert len(sample.token_ids) == 12
    again = engine.generate([PROMPTS[0]], SamplingParams(temperature=0, max_tokens=3))[0]
    assert list(again.token_ids) == tiny.plain_greedy(module, PROMPTS[0], 3)


def test_sleep_and_wake(engine: Engine) -> None:
    params = SamplingParams(max_tokens=10, seed=2)
    before = engine.generate(PROMPTS, params)
    request = engine.submit(PROMPTS[0], SamplingParams(max_tokens=10, seed=2))
    engine.step()
    engine.sleep()
    assert engine.stats().blocks_in_use == 0
    assert engine.step() == []
    with pytest.raises(RequestError, match=r"asleep: call wake\(\)"):
        engine.score([[1]], columns=[1])
    engine.wake()
    updates: list[Update] = []
    while engine.busy:
        updates += engine.step()
    assert updates[-1].request == request
    assert updates[-1].sample is not None
    assert updates[-1].sample.token_ids == before[0].token_ids
    assert [s.token_ids for s in engine.generate(PROMPTS, params)] == [s.token_ids for s in before]


def test_training_mode_of_the_module_is_restored() -> None:
    module = tiny.model("llama").train()
    engine = Engine(module)
    engine.generate([PROMPTS[0]], SamplingParams(max_tokens=2))
    engine.logprobs([PROMPTS[0]])
    assert module.training


def test_queued_scores_match_direct_scores(engine: Engine) -> None:
    direct = engine.score([PROMPTS[0], PROMPTS[1]], columns=[4, 5])
    first = engine.submit_score(PROMPTS[0], columns=[4, 5])
    generation = engine.submit(PROMPTS[2], SamplingParams(max_tokens=3))
    second = engine.submit_score(PROMPTS[1], columns=[4, 5])
    updates: dict[int, Update] = {}
    while engine.busy:
        updates |= {u.request: u for u in engine.step()}
    for request, expected in ((first, direct[0]), (second, direct[1])):
        values = updates[request].values
        assert values is not None
        assert abs(values[0] - expected).max() < 1e-4
    assert updates[generation].sample is not None


def test_scores_computed_over_several_steps_match() -> None:
    module = tiny.model("llama", "token", labels=2)
    ids = tiny.sequences(9, 3, 60, 90)
    positions = [[len(s) - 1] for s in ids]
    direct = Engine(module).score(ids, positions=positions)
    in_parts = Engine(module, budget=16).score(ids, positions=positions, cache=True)  # most parts read out no scores
    for actual, expected in zip(in_parts, direct, strict=True):
        assert actual.shape == (1, 2)
        assert abs(actual - expected).max() < 1e-4


def test_prefixes_with_different_salts_are_not_shared() -> None:
    engine = Engine(tiny.model("llama", "token", labels=2))
    path = tiny.sequences(9, 1, 37, 37)[0]

    def computed(salt: str) -> int:
        before = engine.stats().tokens_computed
        engine.submit_score(path, positions=[36], params=SamplingParams(salt=salt))
        while engine.busy:
            engine.step()
        return engine.stats().tokens_computed - before

    assert [computed(salt) for salt in ("", "", "ann", "ann", "bob")] == [37, 1, 37, 1, 37]


def test_a_search_computes_only_new_tokens() -> None:
    engine = Engine(tiny.model("llama", "token", labels=2))
    path = tiny.sequences(9, 1, 37, 37)[0]
    engine.score([path], positions=[[36]], cache=True)
    assert engine.stats().tokens_computed == 37
    children = [[*path, *step] for step in tiny.sequences(10, 4, 5, 5)]
    engine.score(children, positions=[[41]] * 4, cache=True)
    assert engine.stats().tokens_computed == 37 + 4 * 5


def test_logprobs_compute_logits_in_bounded_chunks(monkeypatch: pytest.MonkeyPatch) -> None:
    engine = Engine(MODULE)
    ids = tiny.sequences(11, 4, 20, 60)
    unchunked = engine.logprobs(ids)
    monkeypatch.setattr("plaudit.core.model.decoder.LOGIT_BYTES", tiny.VOCAB * 4 * 3)
    largest = 0
    logits = engine.decoder.logits

    def recording_logits(rows: torch.Tensor) -> torch.Tensor:
        nonlocal largest
        largest = max(largest, len(rows))
        return logits(rows)

    monkeypatch.setattr(engine.decoder, "logits", recording_logits)
    for a, b in zip(engine.logprobs(ids), unchunked, strict=True):
        assert abs(a - b).max() < 1e-5
    assert largest == 3


def test_non_finite_score_is_an_error() -> None:
    module = tiny.model("llama", "sequence")
    engine = Engine(module)
    with torch.no_grad():
        module.score.weight.fill_(float("nan"))  # type: ignore[union-attr, operator]
    for cache in (False, True):
        with pytest.raises(RequestError, match="not finite numbers"):
            engine.score([PROMPTS[0]], cache=cache)
    assert not engine.busy


def test_pause_during_streaming_raises_instead_of_hanging(engine: Engine) -> None:
    updates = engine.stream(PROMPTS[0], SamplingParams(max_tokens=40, ignore_eos=True))
    next(updates)
    engine.pause()
    with pytest.raises(RequestError, match="paused"):
        list(updates)
    engine.resume()
    engine.step()
    assert not engine.busy


def test_empty_inputs_give_empty_results(engine: Engine) -> None:
    assert engine.generate([]) == []
    assert engine.logprobs([]) == []
    assert [len(x) for x in engine.logprobs([[5]])] == [0]
    assert issubclass(RequestError, PlauditError)


def test_seeds_argument_equals_seeds_in_params_and_text_can_be_skipped() -> None:
    engine = Engine.load("sums-policy", device="cpu")
    prompts, seeds = ["7+8+4=", "3+4+2="], [5, 9]
    with_params = engine.generate(prompts, [SamplingParams(n=2, max_tokens=12, seed=seed) for seed in seeds])
    without_text = engine.generate(prompts, SamplingParams(n=2, max_tokens=12), seeds=seeds, text=False)
    assert [(s.token_ids, s.raw_logprobs, s.finish_reason) for s in without_text] == [
        (s.token_ids, s.raw_logprobs, s.finish_reason) for s in with_params
    ]
    assert {s.text for s in without_text} == {""}
    assert all(s.text for s in with_params)
    for invalid in ([5], [5, -1], [5, 2**63]):
        with pytest.raises(RequestError, match=r"2 prompts and \d seeds: give one seed per prompt, from 0"):
            engine.generate(prompts, SamplingParams(), seeds=invalid)


def test_busy_until_every_update_has_been_returned() -> None:
    """A request that finishes during another caller's `generate` still has updates to return."""
    engine = Engine(tiny.model("llama"))
    number = engine.submit([5, 6, 7], SamplingParams(max_tokens=2, seed=1, ignore_eos=True))
    engine.generate([[8, 9]], SamplingParams(max_tokens=20, seed=2, ignore_eos=True))
    samples = []
    while engine.busy:
        samples += [update.sample for update in engine.step() if update.request == number and update.sample]
    assert [len(sample.token_ids) for sample in samples] == [2]
    assert not engine.step()
