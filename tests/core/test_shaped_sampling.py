"""Transformations of logits before sampling, against plain transformers, alone, batched and preempted."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import pytest
import torch
from transformers import (
    NoBadWordsLogitsProcessor,
    RepetitionPenaltyLogitsProcessor,
    SequenceBiasLogitsProcessor,
    SuppressTokensLogitsProcessor,
)

from plaudit.core import Engine, SamplingParams
from plaudit.errors import RequestError
from plaudit.records import Likely, Sample
from tests.core import tiny
from tests.core.test_engine import letters

# Float64, so that rounding, which differs between batch shapes, cannot change a sampled token.
MODULE = tiny.model("llama", dtype=torch.float64)
TOKENIZER = letters()
LARGE = Engine(MODULE, TOKENIZER, max_running=64)
PROMPTS = tiny.sequences(3, 6, 4, 40)


def logits_of(sample: Sample) -> torch.Tensor:
    """(tokens, V): the logits of plain transformers for each token of the response."""
    return tiny.plain(MODULE, [*sample.prompt_ids, *sample.token_ids])[len(sample.prompt_ids) - 1 : -1]


def picked(logprobs: torch.Tensor, sample: Sample) -> torch.Tensor:
    return logprobs.gather(1, torch.tensor(sample.token_ids)[:, None])[:, 0]


def close(actual: Sequence[float], expected: torch.Tensor) -> None:
    torch.testing.assert_close(torch.tensor(actual, dtype=torch.float64), expected.double(), rtol=0, atol=1e-4)


def check_and_generate(options: Sequence[SamplingParams]) -> list[Sample]:
    """Samples of one batch, after checking that they are equal alone, cached and preempted after every third token."""
    prompts = PROMPTS[: len(options)]
    batched = LARGE.generate(prompts, options)
    alone = [s for prompt, option in zip(prompts, options, strict=True) for s in LARGE.generate([prompt], option)]
    assert list(map(comparable, alone)) == list(map(comparable, batched))
    assert list(map(comparable, preempted(prompts, options))) == list(map(comparable, batched))
    return batched


def preempted(prompts: list[list[int]], options: Sequence[SamplingParams]) -> list[Sample]:
    engine, finished = Engine(MODULE, TOKENIZER, look_every=3, max_running=64), dict[tuple[int, int], Sample]()
    engine.submit_all(prompts, options)
    while engine.busy:
        finished |= {(u.request, u.index): u.sample for u in engine.step() if u.sample is not None}
        engine.sleep()  # frees all KV; running sequences are recomputed from their tokens
        engine.wake()
    assert engine.stats().preemptions
    engine.check()
    return [finished[key] for key in sorted(finished)]


def comparable(sample: Sample) -> tuple[object, ...]:
    """The sample without the last bits of its log-probs."""
    tempered = sample.tempered_logprobs
    rounded = [None if row is None else [round(x, 5) for x in row] for row in (sample.logprobs, tempered)]
    tops = [[token for token, _ in top] for top in sample.top_logprobs or ()]
    return (sample.index, sample.token_ids, sample.finish_reason, rounded, tops)


def test_truncated_samples_have_two_logprobs() -> None:
    options = [
        SamplingParams(n=2, temperature=0.7, top_k=5, max_tokens=12, seed=1, ignore_eos=True),
        SamplingParams(top_p=0.6, max_tokens=14, seed=2, ignore_eos=True),
        SamplingParams(temperature=1.3, min_p=0.2, max_tokens=14, seed=3, ignore_eos=True),
        SamplingParams(temperature=1.3, max_tokens=14, seed=4, ignore_eos=True),
        SamplingParams(min_tokens=10, max_tokens=14, seed=5),
    ]
    samples = check_and_generate(options)
    for sample in samples:
        option = options[sample.group]
        full = torch.log_softmax(logits_of(sample) / option.temperature, dim=1)
        close(sample.behaviour, picked(full, sample))
        if sample.group == 3:
            assert sample.tempered_logprobs is None
            continue
        assert sample.tempered_logprobs is not None
        log_kept_mass = torch.tensor(sample.tempered_logprobs) - torch.tensor(sample.logprobs)
        assert log_kept_mass.max() < 1e-6
        assert option.min_tokens or log_kept_mass.min() < -0.01
        if option.top_k:  # the truncated distribution by hand
            log_top_k_mass = full.topk(option.top_k, dim=1).values.logsumexp(1)
            close(sample.logprobs, picked(full, sample) - log_top_k_mass)


def test_continued_sample_keeps_both_logprobs() -> None:
    option = SamplingParams(top_k=4, max_tokens=20, seed=9, ignore_eos=True)
    (expected,) = LARGE.generate(PROMPTS[:1], option)
    (partial,) = LARGE.generate(PROMPTS[:1], replace(option, max_tokens=8))
    (continued,) = LARGE.generate(PROMPTS[:1], option, [[partial]])
    assert comparable(continued) == comparable(expected)


def likeliest(row: torch.Tensor, count: int) -> list[tuple[int, float]]:
    values, tokens = row.topk(count)
    return list(zip(tokens.tolist(), values.tolist(), strict=True))


def same(actual: Likely, expected: list[tuple[int, float]]) -> None:
    assert [token for token, _ in actual] == [token for token, _ in expected]
    close([logprob for _, logprob in actual], torch.tensor([logprob for _, logprob in expected]))


def test_top_logprobs_match_transformers() -> None:
    """For sampled and prompt tokens, with any sampling options; each request gets the number it requested."""
    shared = {"max_tokens": 8, "ignore_eos": True}
    options = [
        SamplingParams(n=2, temperature=0.7, top_k=5, seed=1, top_logprobs=3, prompt_logprobs=2, **shared),
        SamplingParams(temperature=0, top_logprobs=1, prompt_logprobs=0, **shared),
        SamplingParams(seed=3, **shared),
    ]
    LARGE.new_version()  # nothing of these prompts is cached
    before = LARGE.stats()
    samples = LARGE.generate(PROMPTS[:3], options)
    computed = LARGE.stats().tokens_computed - before.tokens_computed
    # The second sample shares all but one token of its prompt.
    assert computed == sum(map(len, PROMPTS[:3])) + 1 + 4 * 7
    for sample in samples:
        option = options[sample.group]
        if not option.top_logprobs:
            assert sample.top_logprobs is sample.prompt_logprobs is sample.prompt_top_logprobs is None
            continue
        full = torch.log_softmax(tiny.plain(MODULE, [*sample.prompt_ids, *sample.token_ids]), dim=1)
        last = len(sample.prompt_ids) - 1
        assert sample.top_logprobs is not None
        for row, top in zip(full[last:], sample.top_logprobs, strict=False):
            same(top, likeliest(row, option.top_logprobs))
        prompt_logprobs = full[torch.arange(last), torch.tensor(sample.prompt_ids[1:])]
        close(sample.prompt_logprobs or (), prompt_logprobs)
        if option.prompt_logprobs:
            assert sample.prompt_top_logprobs is not None
            for row, top in zip(full[:last], sample.prompt_top_logprobs, strict=False):
                same(top, likeliest(row, option.prompt_logprobs))
        else:
            assert sample.prompt_top_logprobs is None
    # cached, in chunks, preempted
    small = Engine(MODULE, TOKENIZER, budget=16, max_running=4)
    for repeated in (
        LARGE.generate(PROMPTS[:3], options),
        preempted(PROMPTS[:3], options),
        small.generate(PROMPTS[:3], options),
    ):
        for sample_again, original in zip(repeated, samples, strict=True):
            assert comparable(sample_again) == comparable(original)
            close(sample_again.prompt_logprobs or (), torch.tensor(original.prompt_logprobs or ()))
    (single,) = LARGE.generate([[5]], SamplingParams(max_tokens=1, prompt_logprobs=1))
    assert single.prompt_logprobs == single.prompt_top_logprobs == ()


def reference(option: SamplingParams, sample: Sample) -> torch.Tensor:
    """The logits that each token was sampled from, with transformers' processors where they exist."""
    rows = []
    history = torch.tensor([[*sample.prompt_ids, *sample.token_ids]])
    for i, row in enumerate(logits_of(sample)):
        length = len(sample.prompt_ids) + i
        scores = row.clone()[None]
        if option.logit_bias:
            bias = {(token,): value for token, value in option.logit_bias.items()}
            scores = SequenceBiasLogitsProcessor(bias)(history[:, :length], scores)
        if option.bad_words_ids:
            scores = NoBadWordsLogitsProcessor([[token] for token in option.bad_words_ids])(history[:, :length], scores)
        if option.allowed_token_ids is not None:
            suppressed = [token for token in range(tiny.VOCAB) if token not in option.allowed_token_ids]
            scores = SuppressTokensLogitsProcessor(suppressed)(history[:, :length], scores)
        scores = RepetitionPenaltyLogitsProcessor(option.repetition_penalty)(history[:, :length], scores)
        for token in sample.token_ids[:i]:
            scores[0, token] -= option.frequency_penalty
        for token in {*sample.token_ids[:i]}:
            scores[0, token] -= option.presence_penalty
        rows.append(scores[0])
    return torch.stack(rows)


def test_penalties_biases_and_token_lists_match_transformers_and_vllm() -> None:
    shared = {"max_tokens": 14, "ignore_eos": True}
    few = tuple(range(10, 16))
    options = [
        SamplingParams(n=2, repetition_penalty=1.8, temperature=0.8, seed=1, **shared),
        SamplingParams(presence_penalty=1.5, frequency_penalty=0.7, allowed_token_ids=few, seed=2, **shared),
        SamplingParams(temperature=0, frequency_penalty=2.0, repetition_penalty=1.3, **shared),
        SamplingParams(logit_bias={7: 9.0, 8: -3.0}, bad_words_ids=(9, [10]), repetition_penalty=0.7, seed=4, **shared),
        SamplingParams(seed=5, **shared),
        SamplingParams(top_k=3, frequency_penalty=-1.0, allowed_token_ids=few, seed=6, **shared),
    ]
    samples = check_and_generate(options)
    for sample in samples:
        option = options[sample.group]
        logits = reference(option, sample)
        if option.temperature == 0:
            assert logits.argmax(1).tolist() == list(sample.token_ids)
            continue
        logits = logits / option.temperature
        close(sample.behaviour, picked(torch.log_softmax(logits_of(sample) / option.temperature, dim=1), sample))
        if option.top_k:
            logits = logits.masked_fill(logits < logits.topk(option.top_k, dim=1).values[:, -1:], float("-inf"))
        close(sample.logprobs, picked(torch.log_softmax(logits, dim=1), sample))
    assert {token for s in samples for token in s.token_ids if s.group in (1, 5)} <= {*few}
    assert not {9, 10} & {token for s in samples for token in s.token_ids if s.group == 3}


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"repetition_penalty": 0.0}, "repetition_penalty is 0.0, and must be above 0"),
        ({"presence_penalty": 3.0}, "presence_penalty is 3.0, and must be from -2 to 2"),
        ({"bad_words_ids": [[4, 5]]}, r"bad_words_ids has \[4, 5\]: only single tokens"),
        ({"allowed_token_ids": ()}, "allowed_token_ids leaves no token"),
        ({"allowed_token_ids": (2,), "min_tokens": 1}, "allowed_token_ids leaves no token"),
        ({"allowed_token_ids": (tiny.VOCAB,)}, "allowed_token_ids has token id 89, outside"),
        ({"top_logprobs": 90}, "top_logprobs 90 is more than the vocabulary"),
        ({"prompt_logprobs": -1}, "prompt_logprobs is -1"),
    ],
)
def test_invalid_sampling_options_are_rejected(options: dict[str, Any], message: str) -> None:
    with pytest.raises(RequestError, match=message):
        LARGE.generate(PROMPTS[:1], SamplingParams(**options))
