"""Decode steps of a narrow model on transposed weight copies: the same bits, and never stale weights."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from plaudit.core import Engine, SamplingParams
from plaudit.core.device import columns, cpu
from plaudit.core.device.columns import FEWEST, columns_of
from plaudit.core.model.lean import Columns, LeanTrunk
from plaudit.core.proof.support import inspect
from plaudit.records import Sample
from tests.core import tiny

PROMPTS = tiny.sequences(5, FEWEST + 6, 3, 20)
FREE = SamplingParams(max_tokens=24, ignore_eos=True, seed=2)


def tokens_and_logprobs(samples: list[Sample]) -> list[tuple[tuple[int, ...], tuple[float, ...]]]:
    return [(sample.token_ids, sample.logprobs) for sample in samples]


def trunk(module: nn.Module) -> LeanTrunk:
    lean = inspect(module).lean
    assert lean is not None
    return lean


@pytest.fixture
def counted(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """The number of layers of each copy."""
    counts: list[int] = []

    def counting(lean: LeanTrunk, rows: int, steps: int) -> list[Columns] | None:
        copies = columns_of(lean, rows, steps)
        counts.append(len(copies or ()))
        return copies

    monkeypatch.setattr(columns, "MEASURED", True)
    monkeypatch.setattr(columns, "_same_bits", lambda _: True)  # the tests compare the results themselves
    monkeypatch.setattr(cpu, "columns_of", counting)
    return counts


def test_tokens_and_logprobs_match_the_modules_own_matmuls(monkeypatch: pytest.MonkeyPatch, counted: list[int]) -> None:
    module = tiny.model("llama")
    engine = Engine(module)
    counted.clear()
    actual = engine.generate(PROMPTS, FREE)
    assert counted
    assert all(count == len(module.model.layers) for count in counted)  # type: ignore[union-attr, arg-type]
    monkeypatch.setattr(columns, "MEASURED", False)
    expected = Engine(module).generate(PROMPTS, FREE)
    assert [s.token_ids for s in actual] == [s.token_ids for s in expected]
    for sample, other in zip(actual, expected, strict=True):
        assert sample.logprobs == pytest.approx(other.logprobs, abs=1e-5)


def test_weights_changed_by_an_optimizer_are_used_immediately(
    monkeypatch: pytest.MonkeyPatch, counted: list[int]
) -> None:
    module = tiny.model("llama")
    engine = Engine(module)
    counted.clear()
    before = tokens_and_logprobs(engine.generate(PROMPTS, FREE))
    adam = torch.optim.AdamW(module.parameters(), lr=0.05, fused=True)  # does not increase tensor versions
    for parameter in module.parameters():
        parameter.grad = torch.randn(parameter.shape, generator=torch.Generator().manual_seed(1))
    adam.step()
    engine.new_version()
    after = engine.generate(PROMPTS, FREE)
    assert tokens_and_logprobs(after) != before
    assert len(counted) > 1
    assert all(counted)
    monkeypatch.setattr(columns, "MEASURED", False)
    expected = Engine(module).generate(PROMPTS, FREE)
    assert [s.token_ids for s in after] == [s.token_ids for s in expected]


def test_few_rows_or_few_steps_use_the_modules_own_matmuls(counted: list[int]) -> None:
    engine = Engine(tiny.model("llama"))
    engine.generate(PROMPTS[: FEWEST - 1], FREE)
    engine.generate(PROMPTS, SamplingParams(max_tokens=3, ignore_eos=True))
    assert counted
    assert not any(counted)


def test_self_check_detects_differing_matmul_results(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(columns, "MEASURED", True)
    original = columns._joined
    module = tiny.model("llama")
    columns._same_bits.cache_clear()
    monkeypatch.setattr(columns, "_joined", lambda weights: original(weights) * (1 + 2**-20))
    try:
        assert columns_of(trunk(module), 30, 8) is None
    finally:
        columns._same_bits.cache_clear()


def test_models_with_biases_adapters_or_large_width_use_their_own_matmuls(
    monkeypatch: pytest.MonkeyPatch, counted: list[int]
) -> None:
    module = tiny.model("llama")
    assert columns_of(trunk(module), 30, 8) is not None
    assert columns_of(trunk(tiny.model("qwen2")), 30, 8) is None  # biases
    assert columns_of(trunk(tiny.model("qwen3")), 30, 8) is None  # per-head norms
    assert columns_of(trunk(tiny.model("llama", dtype=torch.float64)), 30, 8) is None
    lean = trunk(module)
    attention = module.model.layers[1].self_attn  # type: ignore[union-attr, index]
    original, attention.q_proj = attention.q_proj, nn.Sequential(attention.q_proj)  # type: ignore[union-attr, arg-type]
    assert columns_of(lean, 30, 8) is None
    attention.q_proj = original  # type: ignore[union-attr]
    assert columns_of(lean, 30, 8) is not None
    monkeypatch.setattr(columns, "SMALL", 1000)
    assert columns_of(lean, 30, 8) is None
