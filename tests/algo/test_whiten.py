import math

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from plaudit.algo.methods.grpo import group_relative
from plaudit.algo.methods.reinforce import returns_to_go
from plaudit.algo.tokens.ragged import spread
from plaudit.algo.whiten import whiten

MASK = torch.tensor([1, 1, 0, 1], dtype=torch.bool)


def test_whiten_by_hand() -> None:
    # values 1, 3, 8: mean 4, unbiased variance (9 + 1 + 16) / 2 = 13
    values = torch.tensor([1.0, 3.0, 500.0, 8.0])
    root = math.sqrt(13)
    assert whiten(values, MASK).tolist() == pytest.approx([-3 / root, -1 / root, 0, 4 / root])


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("value", [0.1, 1 / 3, -1e6, 7e-9])
def test_equal_values_become_exactly_zero(value: float, dtype: torch.dtype) -> None:
    values = torch.full((7,), value, dtype=dtype)
    mask = torch.ones(7, dtype=torch.bool)
    assert whiten(values, mask).tolist() == [0.0] * 7


def test_zero_or_one_masked_value_gives_zeros() -> None:
    values = torch.tensor([5.0, 2.0])
    assert whiten(values, torch.tensor([False, False])).tolist() == [0, 0]
    assert whiten(values, torch.tensor([False, True])).tolist() == [0, 0]


def test_whitening_micro_batches_differs_from_whitening_the_batch() -> None:
    """Why whitening comes before the batch is split: per-part statistics would give other advantages."""
    values = torch.tensor([0.0, 1.0, 10.0, 11.0])
    mask = torch.ones(4, dtype=torch.bool)
    parts = torch.cat([whiten(values[:2], mask[:2]), whiten(values[2:], mask[2:])])
    assert parts.tolist() == pytest.approx([-math.sqrt(0.5), math.sqrt(0.5)] * 2)
    # mean 5.5, variance (5.5² + 4.5²) · 2 / 3
    assert whiten(values, mask).tolist() == pytest.approx([x / math.sqrt(101 / 3) for x in (-5.5, -4.5, 4.5, 5.5)])


@given(st.lists(st.tuples(st.integers(-100, 100), st.booleans()), min_size=2, max_size=30))
def test_whitened_values_have_zero_mean_and_unit_variance_for_any_scale_and_shift(rows: list[tuple[int, bool]]) -> None:
    values, mask = torch.tensor([float(v) for v, _ in rows]), torch.tensor([m for _, m in rows])
    if len(set(values[mask].tolist())) < 2:
        return
    whitened = whiten(values, mask)
    assert float(whitened[mask].mean()) == pytest.approx(0, abs=1e-5)
    assert float(whitened[mask].var()) == pytest.approx(1, abs=1e-4)
    torch.testing.assert_close(whiten(3 * values + 7, mask), whitened, rtol=1e-4, atol=1e-5)


def test_reinforce_plus_by_hand() -> None:
    # rewards on the last policy tokens; with gamma 0.5 the returns are 1, 2 | 4
    rewards, mask = torch.tensor([0.0, 9.0, 2.0, 4.0]), torch.tensor([1, 0, 1, 1], dtype=torch.bool)
    # mean 7/3, deviations -4/3, -1/3, 5/3, variance (16 + 1 + 25) / 9 / 2 = 7/3
    root = math.sqrt(7 / 3)
    expected = [-4 / 3 / root, 0, -1 / 3 / root, 5 / 3 / root]
    assert whiten(returns_to_go(rewards, mask, (3, 1), 0.5), mask).tolist() == pytest.approx(expected)


def test_reinforce_plus_baseline_by_hand() -> None:
    # group 7: 1, 3; group 2: 10, 10; minus group means: -1, 1, 0, 0, over 2, 1, 1, 1 tokens: -1, -1, 1, 0, 0
    totals, groups, lengths = torch.tensor([1.0, 10.0, 3.0, 10.0]), (7, 2, 7, 2), (2, 1, 1, 1)
    mask = torch.ones(5, dtype=torch.bool)
    # in order: -1, -1, 0, 1, 0: mean -0.2, squares 0.64, 0.64, 0.04, 1.44, 0.04 = 2.8, variance 0.7
    expected = [x / math.sqrt(0.7) for x in (-0.8, -0.8, 0.2, 1.2, 0.2)]
    advantages = spread(group_relative(totals, groups, "none"), mask, lengths)
    assert whiten(advantages, mask).tolist() == pytest.approx(expected)
