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

# Float64, so that rounding (which differs between batches of different shapes) cannot tip a draw.
MODULE = tiny.model("llama", dtype=torch.float64)
TOKENIZER = letters()
LARGE = Engine(MODULE, TOKENIZER, max_running=64)
PROMPTS = tiny.sequences(3, 6, 4, 40)


def logits_of(sample: Sample) -> torch.Tensor:
    """By transformers alone, (tokens, V): what each token of the response was drawn from."""
    return tiny.plain(MODULE, [*sample.prompt_ids, *sample.token_ids])[len(sample.prompt_ids) - 1 : -1]


def picked(logprobs: torch.Tensor, sample: Sample) -> torch.Tensor:
    return logprobs.gather(1, torch.tensor(sample.token_ids)[:, None])[:, 0]


def close(found: Sequence[float], expected: torch.Tensor) -> None:
    torch.testing.assert_close(torch.tensor(found, dtype=torch.float64), expected.double(), rtol=0, atol=1e-4)


def everywhere(options: Sequence[SamplingParams]) -> list[Sample]:
    """In one batch; and the same alone, from the cache, and where every third token is followed by a preemption."""
    prompts = PROMPTS[: len(options)]
    together = LARGE.generate(prompts, options)
    alone = [s for prompt, option in zip(prompts, options, strict=True) for s in LARGE.generate([prompt], option)]
    assert list(map(known, alone)) == list(map(known, together))
    assert list(map(known, preempted(prompts, options))) == list(map(known, together))
    return together


def preempted(prompts: list[list[int]], options: Sequence[SamplingParams]) -> list[Sample]:
    engine, ended = Engine(MODULE, TOKENIZER, look_every=3, max_running=64), dict[tuple[int, int], Sample]()
    engine.submit_all(prompts, options)
    while engine.busy:
        ended |= {(u.request, u.index): u.sample for u in engine.step() if u.sample is not None}
        engine.sleep()  # frees all KV; what runs is read again from its tokens
        engine.wake()
    assert engine.stats().preemptions
    engine.check()
    return [ended[key] for key in sorted(ended)]


def known(sample: Sample) -> tuple[object, ...]:
    """But for the last bits of its log-probs."""
    tempered = sample.tempered_logprobs
    rounded = [None if row is None else [round(x, 5) for x in row] for row in (sample.logprobs, tempered)]
    tops = [[token for token, _ in top] for top in sample.top_logprobs or ()]
    return (sample.index, sample.token_ids, sample.finish_reason, rounded, tops)


def test_a_truncated_sample_has_two_log_probs() -> None:
    options = [
        SamplingParams(n=2, temperature=0.7, top_k=5, max_tokens=12, seed=1, ignore_eos=True),
        SamplingParams(top_p=0.6, max_tokens=14, seed=2, ignore_eos=True),
        SamplingParams(temperature=1.3, min_p=0.2, max_tokens=14, seed=3, ignore_eos=True),
        SamplingParams(temperature=1.3, max_tokens=14, seed=4, ignore_eos=True),
        SamplingParams(min_tokens=10, max_tokens=14, seed=5),
    ]
    samples = everywhere(options)
    for sample in samples:
        option = options[sample.group]
        whole = torch.log_softmax(logits_of(sample) / option.temperature, dim=1)
        close(sample.behaviour, picked(whole, sample))
        if sample.group == 3:
            assert sample.tempered_logprobs is None
            continue
        assert sample.tempered_logprobs is not None
        left = torch.tensor(sample.tempered_logprobs) - torch.tensor(sample.logprobs)
        assert left.max() < 1e-6
        assert option.min_tokens or left.min() < -0.01
        if option.top_k:  # the truncated distribution by hand
            best = whole.topk(option.top_k, dim=1).values.logsumexp(1)
            close(sample.logprobs, picked(whole, sample) - best)


def test_a_sample_that_goes_on_elsewhere_keeps_both() -> None:
    option = SamplingParams(top_k=4, max_tokens=20, seed=9, ignore_eos=True)
    (whole,) = LARGE.generate(PROMPTS[:1], option)
    (begun,) = LARGE.generate(PROMPTS[:1], replace(option, max_tokens=8))
    (ended,) = LARGE.generate(PROMPTS[:1], option, [[begun]])
    assert known(ended) == known(whole)


def likeliest(row: torch.Tensor, count: int) -> list[tuple[int, float]]:
    values, tokens = row.topk(count)
    return list(zip(tokens.tolist(), values.tolist(), strict=True))


def same(found: Likely, expected: list[tuple[int, float]]) -> None:
    assert [token for token, _ in found] == [token for token, _ in expected]
    close([logprob for _, logprob in found], torch.tensor([logprob for _, logprob in expected]))


def test_top_log_probs_are_those_of_transformers() -> None:
    """Of sampled and of prompt tokens, whatever is applied before the draw; each row has as many as it asked for."""
    shared = {"max_tokens": 8, "ignore_eos": True}
    options = [
        SamplingParams(n=2, temperature=0.7, top_k=5, seed=1, top_logprobs=3, prompt_logprobs=2, **shared),
        SamplingParams(temperature=0, top_logprobs=1, prompt_logprobs=0, **shared),
        SamplingParams(seed=3, **shared),
    ]
    LARGE.new_version()  # nothing of these prompts is cached
    before = LARGE.stats()
    samples = LARGE.generate(PROMPTS[:3], options)
    spent = LARGE.stats().tokens_computed - before.tokens_computed
    assert spent == sum(map(len, PROMPTS[:3])) + 1 + 4 * 7  # the second sample shares all but a token of its prompt
    for sample in samples:
        option = options[sample.group]
        if not option.top_logprobs:
            assert sample.top_logprobs is sample.prompt_logprobs is sample.prompt_top_logprobs is None
            continue
        whole = torch.log_softmax(tiny.plain(MODULE, [*sample.prompt_ids, *sample.token_ids]), dim=1)
        at = len(sample.prompt_ids) - 1
        assert sample.top_logprobs is not None
        for row, top in zip(whole[at:], sample.top_logprobs, strict=False):
            same(top, likeliest(row, option.top_logprobs))
        own = whole[torch.arange(at), torch.tensor(sample.prompt_ids[1:])]
        close(sample.prompt_logprobs or (), own)
        if option.prompt_logprobs:
            assert sample.prompt_top_logprobs is not None
            for row, top in zip(whole[:at], sample.prompt_top_logprobs, strict=False):
                same(top, likeliest(row, option.prompt_logprobs))
        else:
            assert sample.prompt_top_logprobs is None
    # cached, in chunks, preempted
    small = Engine(MODULE, TOKENIZER, budget=16, max_running=4)
    for again in (
        LARGE.generate(PROMPTS[:3], options),
        preempted(PROMPTS[:3], options),
        small.generate(PROMPTS[:3], options),
    ):
        for one, other in zip(again, samples, strict=True):
            assert known(one) == known(other)
            close(one.prompt_logprobs or (), torch.tensor(other.prompt_logprobs or ()))
    (lone,) = LARGE.generate([[5]], SamplingParams(max_tokens=1, prompt_logprobs=1))
    assert lone.prompt_logprobs == lone.prompt_top_logprobs == ()


def reference(option: SamplingParams, sample: Sample) -> torch.Tensor:
    """The logits that each token was drawn from, by transformers' own processors where it has them."""
    rows = []
    history = torch.tensor([[*sample.prompt_ids, *sample.token_ids]])
    for i, row in enumerate(logits_of(sample)):
        at = len(sample.prompt_ids) + i
        scores = row.clone()[None]
        if option.logit_bias:
            bias = {(token,): value for token, value in option.logit_bias.items()}
            scores = SequenceBiasLogitsProcessor(bias)(history[:, :at], scores)
        if option.bad_words_ids:
            scores = NoBadWordsLogitsProcessor([[token] for token in option.bad_words_ids])(history[:, :at], scores)
        if option.allowed_token_ids is not None:
            barred = [token for token in range(tiny.VOCAB) if token not in option.allowed_token_ids]
            scores = SuppressTokensLogitsProcessor(barred)(history[:, :at], scores)
        scores = RepetitionPenaltyLogitsProcessor(option.repetition_penalty)(history[:, :at], scores)
        for token in sample.token_ids[:i]:
            scores[0, token] -= option.frequency_penalty
        for token in {*sample.token_ids[:i]}:
            scores[0, token] -= option.presence_penalty
        rows.append(scores[0])
    return torch.stack(rows)


def test_penalties_biases_and_token_lists_are_those_of_transformers_and_vllm() -> None:
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
    samples = everywhere(options)
    for sample in samples:
        option = options[sample.group]
        moved = reference(option, sample)
        if option.temperature == 0:
            assert moved.argmax(1).tolist() == list(sample.token_ids)
            continue
        moved = moved / option.temperature
        close(sample.behaviour, picked(torch.log_softmax(logits_of(sample) / option.temperature, dim=1), sample))
        if option.top_k:
            moved = moved.masked_fill(moved < moved.topk(option.top_k, dim=1).values[:, -1:], float("-inf"))
        close(sample.logprobs, picked(torch.log_softmax(moved, dim=1), sample))
    assert {token for s in samples for token in s.token_ids if s.group in (1, 5)} <= {*few}
    assert not {9, 10} & {token for s in samples for token in s.token_ids if s.group == 3}


@pytest.mark.parametrize(
    ("options", "words"),
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
def test_what_cannot_be_applied_is_refused(options: dict[str, Any], words: str) -> None:
    with pytest.raises(RequestError, match=words):
        LARGE.generate(PROMPTS[:1], SamplingParams(**options))
