"""Samples follow the distribution, filters work as documented, and the noise is the documented function."""

from __future__ import annotations

import math

import numpy as np
import pytest
import torch

from plaudit.core.sampling.noise import MASK64, gumbel, mix64, row_key, token_hashes
from plaudit.core.sampling.sampler import Sampler
from plaudit.core.sampling.sampling_params import SamplingParams

CPU = torch.device("cpu")


def documented_noise(seed: int, index: int, position: int, token: int) -> float:
    """The function in the module's docstring, with Python integers."""
    step = mix64((mix64(mix64(seed) + index) + (position + 1) * 0x9E3779B97F4A7C15) & MASK64)
    low, high, mask = step & 0xFFFFFFFF, step >> 32, 0xFFFFFFFF
    x = low ^ (token * 0x9E3779B1 & mask)
    x = (x ^ x >> 16) * 0x85EBCA6B & mask
    x ^= high
    x = (x ^ x >> 13) * 0xC2B2AE35 & mask
    x ^= x >> 16
    u = min(((x & 0x7FFFFFFF) + 0.5) / 2**31, 1 - 2**-24)
    return -math.log(-math.log1p(-u))


def sampler(params: list[SamplingParams], vocab: int, seeds: list[int] | None = None) -> Sampler:
    keys = [row_key(seed, 0) for seed in (seeds or range(len(params)))]
    return Sampler(params, keys, [frozenset({0})] * len(params), token_hashes(vocab, CPU))


def test_noise_matches_the_documented_function() -> None:
    seeds, positions = [0, 1, 2**63 - 1, 77], [0, 3, 10_000, 1]
    keys = torch.tensor([row_key(s, i) for i, s in enumerate(seeds)])
    noise = gumbel(keys, torch.tensor(positions), token_hashes(300, CPU)).numpy()
    expected = [
        [documented_noise(s, i, p, t) for t in range(300)]
        for i, (s, p) in enumerate(zip(seeds, positions, strict=True))
    ]
    np.testing.assert_allclose(noise, expected, rtol=2e-5, atol=2e-6)


def test_samples_follow_the_distribution() -> None:
    logits = torch.tensor([0.0, 1.0, 2.0, -1.0, 0.5])
    rows = 40_000
    draw = sampler([SamplingParams()] * rows, 5).draw(logits.expand(rows, 5), torch.zeros(rows, dtype=torch.long))
    frequencies = torch.bincount(draw.tokens, minlength=5) / rows
    expected = torch.softmax(logits, 0)
    assert float((frequencies - expected).abs().max()) < 4 * math.sqrt(0.25 / rows)
    torch.testing.assert_close(draw.logprobs, expected.log()[draw.tokens])


def test_row_does_not_depend_on_the_other_rows() -> None:
    torch.manual_seed(0)
    logits = torch.randn(8, 50)
    params = [
        SamplingParams(temperature=t, top_k=k, top_p=p)
        for t, k, p in zip([0.5, 1, 2, 1] * 2, [0, 5, 0, 9] * 2, [1.0, 0.9, 0.7, 1] * 2, strict=True)
    ]
    batched = sampler(params, 50).draw(logits, torch.arange(8))
    for i in range(8):
        alone = sampler([params[i]], 50, [i]).draw(logits[i : i + 1], torch.tensor([i]))
        assert alone.tokens[0] == batched.tokens[i]
        torch.testing.assert_close(alone.logprobs[0], batched.logprobs[i])
        torch.testing.assert_close(alone.raw_logprobs[0], batched.raw_logprobs[i])


@pytest.mark.parametrize(
    ("params", "allowed"),
    [
        (SamplingParams(top_k=2), {1, 2}),
        (SamplingParams(top_p=0.6), {2}),  # the most likely token alone has 0.62
        (SamplingParams(top_p=0.7), {1, 2}),
        (SamplingParams(min_p=0.3), {1, 2}),
        (SamplingParams(top_p=0.7, min_p=0.3), {2}),  # of the two that min_p keeps it has 0.73, as in vLLM
        (SamplingParams(top_p=0.74, min_p=0.3), {1, 2}),
        (SamplingParams(top_k=5), {0, 1, 2, 3}),
        (SamplingParams(top_k=2**40), {0, 1, 2, 3}),
        (SamplingParams(temperature=0.1, top_p=0.99), {2}),
        (SamplingParams(logit_bias={3: 50.0}), {3}),
        (SamplingParams(temperature=0), {2}),
        (SamplingParams(temperature=0, logit_bias={2: -100.0}), {1}),
    ],
)
def test_filters_keep_the_right_tokens(params: SamplingParams, allowed: set[int]) -> None:
    logits = torch.tensor([-1.0, 1.0, 2.0, 0.0]).expand(400, 4)
    draw = sampler([params] * 400, 4).draw(logits, torch.zeros(400, dtype=torch.long))
    assert set(draw.tokens.tolist()) == allowed
    mask = torch.full((4,), -math.inf)
    mask[list(allowed)] = 0
    if params.temperature == 1 and not params.logit_bias:
        torch.testing.assert_close(draw.logprobs, torch.log_softmax(logits[0] + mask, 0)[draw.tokens])
    torch.testing.assert_close(draw.raw_logprobs, torch.log_softmax(logits[0], 0)[draw.tokens])


def test_end_tokens_are_masked_until_min_tokens() -> None:
    logits = torch.tensor([[9.0, 0.0, 0.0]]).expand(2, 3)
    batch_sampler = sampler([SamplingParams(temperature=0, min_tokens=3)] * 2, 3)
    tokens = batch_sampler.draw(logits, torch.tensor([2, 3])).tokens.tolist()
    assert tokens[0] != 0
    assert tokens[1] == 0


def test_truncated_sample_also_has_the_logprob_of_the_full_softmax() -> None:
    """By hand: p = (0.5, 0.3, 0.2). At temperature 0.5 they are squared: (0.25, 0.09, 0.04) / 0.38."""
    logits = torch.tensor([0.5, 0.3, 0.2]).log().expand(300, 3)
    params = [SamplingParams(top_k=2), SamplingParams(temperature=0.5, top_k=2), SamplingParams(temperature=0.5)] * 100
    draw = sampler(params, 3).draw(logits, torch.zeros(300, dtype=torch.long))
    assert draw.tempered is not None
    truncated = [
        [0.5 / 0.8, 0.3 / 0.8, 0.0],
        [0.25 / 0.34, 0.09 / 0.34, 0.0],
        [0.25 / 0.38, 0.09 / 0.38, 0.04 / 0.38],
    ] * 100
    full = [[0.5, 0.3, 0.2], [0.25 / 0.38, 0.09 / 0.38, 0.04 / 0.38], [0.25 / 0.38, 0.09 / 0.38, 0.04 / 0.38]] * 100
    for actual, expected in ((draw.logprobs, truncated), (draw.tempered, full)):
        chosen = torch.tensor(expected).gather(1, draw.tokens[:, None])[:, 0]
        torch.testing.assert_close(actual.exp(), chosen, rtol=1e-5, atol=1e-6)
    assert {*draw.tokens[::3].tolist()} == {*draw.tokens[1::3].tolist()} == {0, 1}
    # the ratio of the two is the probability mass kept
    kept_mass = (draw.tempered - draw.logprobs).exp()
    torch.testing.assert_close(kept_mass[:3], torch.tensor([0.8, 0.34 / 0.38, 1.0]), rtol=1e-5, atol=1e-6)
    # without truncation there is only one log-prob
    assert (
        sampler([SamplingParams(temperature=0.5)], 3).draw(logits[:1], torch.zeros(1, dtype=torch.long)).tempered
        is None
    )
