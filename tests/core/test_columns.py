"""Decode steps of a narrow model on transposed copies of its weights: the same bits, and never outdated weights."""

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


def drawn(samples: list[Sample]) -> list[tuple[tuple[int, ...], tuple[float, ...]]]:
    return [(sample.token_ids, sample.logprobs) for sample in samples]


def trunk(module: nn.Module) -> LeanTrunk:
    lean = inspect(module).lean
    assert lean is not None
    return lean


@pytest.fixture
def counted(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """How many layers each copy had."""
    made: list[int] = []

    def noted(lean: LeanTrunk, rows: int, steps: int) -> list[Columns] | None:
        found = columns_of(lean, rows, steps)
        made.append(len(found or ()))
        return found

    monkeypatch.setattr(columns, "MEASURED", True)
    monkeypatch.setattr(columns, "_same_bits", lambda _: True)  # the tests' own comparison says whether they are
    monkeypatch.setattr(cpu, "columns_of", noted)
    return made


def test_tokens_and_logprobs_are_those_of_the_modules_own_products(
    monkeypatch: pytest.MonkeyPatch, counted: list[int]
) -> None:
    module = tiny.model("llama")
    engine = Engine(module)
    counted.clear()
    found = engine.generate(PROMPTS, FREE)
    assert counted
    assert all(count == len(module.model.layers) for count in counted)  # type: ignore[union-attr, arg-type]
    monkeypatch.setattr(columns, "MEASURED", False)
    expected = Engine(module).generate(PROMPTS, FREE)
    assert [s.token_ids for s in found] == [s.token_ids for s in expected]
    for mine, other in zip(found, expected, strict=True):
        assert mine.logprobs == pytest.approx(other.logprobs, abs=1e-5)


def test_weights_that_an_optimizer_has_changed_are_used_at_once(
    monkeypatch: pytest.MonkeyPatch, counted: list[int]
) -> None:
    module = tiny.model("llama")
    engine = Engine(module)
    counted.clear()
    before = drawn(engine.generate(PROMPTS, FREE))
    adam = torch.optim.AdamW(module.parameters(), lr=0.05, fused=True)  # counts no change of a tensor
    for parameter in module.parameters():
        parameter.grad = torch.randn(parameter.shape, generator=torch.Generator().manual_seed(1))
    adam.step()
    engine.new_version()
    after = engine.generate(PROMPTS, FREE)
    assert drawn(after) != before
    assert len(counted) > 1
    assert all(counted)
    monkeypatch.setattr(columns, "MEASURED", False)
    expected = Engine(module).generate(PROMPTS, FREE)
    assert [s.token_ids for s in after] == [s.token_ids for s in expected]


def test_few_rows_and_few_steps_take_the_modules_own(counted: list[int]) -> None:
    engine = Engine(tiny.model("llama"))
    engine.generate(PROMPTS[: FEWEST - 1], FREE)
    engine.generate(PROMPTS, SamplingParams(max_tokens=3, ignore_eos=True))
    assert counted
    assert not any(counted)


def test_the_trial_finds_products_that_differ(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(columns, "MEASURED", True)
    own = columns._joined
    module = tiny.model("llama")
    columns._same_bits.cache_clear()
    monkeypatch.setattr(columns, "_joined", lambda weights: own(weights) * (1 + 2**-20))
    try:
        assert columns_of(trunk(module), 30, 8) is None
    finally:
        columns._same_bits.cache_clear()


def test_a_bias_an_adapter_or_a_wide_model_takes_its_own_products(
    monkeypatch: pytest.MonkeyPatch, counted: list[int]
) -> None:
    module = tiny.model("llama")
    assert columns_of(trunk(module), 30, 8) is not None
    assert columns_of(trunk(tiny.model("qwen2")), 30, 8) is None  # biases
    assert columns_of(trunk(tiny.model("qwen3")), 30, 8) is None  # norms of heads
    assert columns_of(trunk(tiny.model("llama", dtype=torch.float64)), 30, 8) is None
    lean = trunk(module)
    attention = module.model.layers[1].self_attn  # type: ignore[union-attr, index]
    own, attention.q_proj = attention.q_proj, nn.Sequential(attention.q_proj)  # type: ignore[union-attr, arg-type]
    assert columns_of(lean, 30, 8) is None
    attention.q_proj = own  # type: ignore[union-attr]
    assert columns_of(lean, 30, 8) is not None
    monkeypatch.setattr(columns, "SMALL", 1000)
    assert columns_of(lean, 30, 8) is None
