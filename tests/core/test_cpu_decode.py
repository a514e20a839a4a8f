"""Greedy tokens equal those of transformers for any layout, split and resumption of a decode window."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch

from plaudit.core import Engine, SamplingParams
from plaudit.core.device import cpu_decode
from plaudit.core.device.backend import DecodeBatch, Decoded
from plaudit.core.device.cpu import CpuBackend
from tests.core import tiny
from tests.rotation import mostly_slow

# Lengths 1 (nothing before the window), 17 (a full block and the last token) and some that form several groups.
PROMPTS = [tiny.sequences(20 + n, 1, n, n)[0] for n in (1, 17, 9, 33, 120, 5)]
TOKENS = 80
WIDTH = 2 * 2 * 8 * 8  # bytes of one token in one layer: keys and values, 2 heads of 8, float64


@pytest.mark.parametrize("look_every", [1, 8, 100, None])
@pytest.mark.parametrize(("window", "workspace"), mostly_slow([(64, 2**26), (8, 2**26), (16, 0), (16, WIDTH * 700)]))
@pytest.mark.parametrize("family", ["llama", "mistral"])
def test_greedy_tokens_match_transformers_for_any_window_layout(
    monkeypatch: pytest.MonkeyPatch, family: str, window: int, workspace: int, look_every: int | None
) -> None:
    monkeypatch.setattr(cpu_decode, "STEPS", window)
    monkeypatch.setattr(cpu_decode, "WORKSPACE", workspace)
    module = tiny.model(family, dtype=torch.float64)
    engine = Engine(module, look_every=look_every)
    options = [SamplingParams(temperature=0, max_tokens=TOKENS - 9 * i) for i in range(len(PROMPTS))]
    samples = engine.generate(PROMPTS, options)
    for prompt, option, sample in zip(PROMPTS, options, samples, strict=True):
        assert option.max_tokens is not None
        assert list(sample.token_ids) == tiny.plain_greedy(module, prompt, option.max_tokens)
    # A later call reuses the KV that the window stored.
    sequences = [[*p, *s.token_ids] for p, s in zip(PROMPTS, samples, strict=True)]
    for ids, logprobs in zip(sequences, engine.logprobs(sequences, cache=True), strict=True):
        assert abs(logprobs - tiny.plain_logprobs(module, ids)).max() < 1e-5
    engine.check()


def test_decode_window_is_reused_until_something_else_is_computed(monkeypatch: pytest.MonkeyPatch) -> None:
    module = tiny.model("llama", dtype=torch.float64)
    engine = Engine(module, look_every=4)
    made = 0
    build = cpu_decode.DecodeWindow.__init__

    def counting_init(*args: object) -> None:
        nonlocal made
        made += 1
        build(*args)  # type: ignore[arg-type]

    monkeypatch.setattr(cpu_decode.DecodeWindow, "__init__", counting_init)
    free = SamplingParams(max_tokens=40, ignore_eos=True, seed=1)
    expected = engine.generate(PROMPTS[:2], free)
    assert made == 1
    first = engine.submit(PROMPTS[0], free)
    for _ in range(4):
        engine.step()
    assert made == 2
    second = engine.submit(PROMPTS[1], free)  # its prompt is prefilled, so the rows change
    engine.step()
    engine.new_version(keep="continue")
    tokens = {u.request: u.sample.token_ids for _ in range(20) for u in engine.step() if u.sample is not None}
    assert made == 4
    assert [tokens[first], tokens[second]] == [s.token_ids for s in expected]


def test_host_reads_tokens_where_a_row_ends_and_otherwise_rarely(monkeypatch: pytest.MonkeyPatch) -> None:
    steps_per_read: list[int] = []
    decode = CpuBackend.decode

    def recording_decode(self: CpuBackend, batch: DecodeBatch, steps: int) -> Iterator[Decoded]:
        for decoded in decode(self, batch, steps):
            steps_per_read.append(len(decoded.tokens))
            yield decoded

    monkeypatch.setattr(CpuBackend, "decode", recording_decode)
    engine = Engine(tiny.model("llama", dtype=torch.float64))
    lengths = [SamplingParams(max_tokens=n, ignore_eos=True) for n in (13, 100)]  # the first token comes from prefill
    engine.generate(PROMPTS[:2], lengths)
    assert steps_per_read == [16, 64, 19]
