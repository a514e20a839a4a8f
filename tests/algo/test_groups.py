"""Advantages relative to a group of samples of one prompt."""

import math

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from plaudit.algo.method import Scale
from plaudit.algo.methods.dapo import informative, overlong_penalty
from plaudit.algo.methods.grpo import group_relative
from plaudit.algo.methods.rloo import leave_one_out

# Interleaved rewards of two prompts: prompt 9 has 1, 2, 6 and prompt 4 has 0, 10.
TOTALS, GROUPS = torch.tensor([1.0, 0.0, 2.0, 10.0, 6.0]), (9, 4, 9, 4, 9)


def test_grpo_by_hand() -> None:
    # 9: mean 3, unbiased variance (4 + 1 + 9) / 2 = 7; 4: mean 5, variance 50
    nine, four = math.sqrt(7) + 1e-4, math.sqrt(50) + 1e-4
    expected = [-2 / nine, -5 / four, -1 / nine, 5 / four, 3 / nine]
    assert group_relative(TOTALS, GROUPS, "group").tolist() == pytest.approx(expected)
    # the batch: mean 3.8, squares 7.84 + 14.44 + 3.24 + 38.44 + 4.84 = 68.8, over 4
    batch = math.sqrt(17.2) + 1e-4
    assert group_relative(TOTALS, GROUPS, "batch").tolist() == pytest.approx([x / batch for x in (-2, -5, -1, 5, 3)])
    assert group_relative(TOTALS, GROUPS, "none").tolist() == [-2, -5, -1, 5, 3]


def test_rloo_by_hand() -> None:
    # 1 - (2 + 6) / 2, 0 - 10, 2 - (1 + 6) / 2, 10 - 0, 6 - (1 + 2) / 2
    assert leave_one_out(TOTALS, GROUPS).tolist() == pytest.approx([-3, -10, -1.5, 10, 4.5])


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float64])
@pytest.mark.parametrize("scale", ["group", "batch", "none"])
@pytest.mark.parametrize("value", [0.1, 1 / 3, -7e5, 1e-12])
def test_equal_rewards_give_exactly_zero_advantages(value: float, scale: Scale, dtype: torch.dtype) -> None:
    totals = torch.tensor([value] * 7 + [0.0, 1.0], dtype=dtype)
    groups = [1] * 7 + [2] * 2
    assert group_relative(totals, groups, scale)[:7].tolist() == [0.0] * 7
    assert leave_one_out(totals, groups)[:7].tolist() == [0.0] * 7
    assert group_relative(totals[:7], groups[:7], scale).tolist() == [0.0] * 7


def test_nearly_equal_rewards_are_not_amplified() -> None:
    close = torch.tensor([0.5, 0.5 + 2**-24])
    assert group_relative(close, (0, 0), "group").abs().max() < 1e-3


def test_group_of_one_sample_has_zero_advantage() -> None:
    totals = torch.tensor([5.0, 1.0, 3.0])
    for scale in ("group", "batch", "none"):
        advantages = group_relative(totals, (0, 1, 1), scale).tolist()
        assert advantages[0] == 0
        assert advantages[1] == -advantages[2] != 0
    assert leave_one_out(totals, (0, 1, 1)).tolist() == [0, -2, 2]
    assert group_relative(totals[:1], (0,), "batch").tolist() == [0]


@given(st.lists(st.tuples(st.integers(0, 3), st.integers(-8, 8)), min_size=1, max_size=20), st.randoms())
def test_advantages_match_the_definition_and_do_not_depend_on_sample_order(
    rows: list[tuple[int, int]], random: object
) -> None:
    groups, totals = [g for g, _ in rows], torch.tensor([float(r) for _, r in rows])
    others = [[r for j, (h, r) in enumerate(rows) if h == g and j != i] for i, (g, _) in enumerate(rows)]
    expected = [r - sum(o) / len(o) if o else 0.0 for (_, r), o in zip(rows, others, strict=True)]
    actual = leave_one_out(totals, groups)
    assert actual.tolist() == pytest.approx(expected, abs=1e-5)
    sizes = torch.tensor([float(groups.count(g)) for g in groups])
    torch.testing.assert_close(actual * (sizes - 1), group_relative(totals, groups, "none") * sizes)
    order = list(range(len(rows)))
    random.shuffle(order)  # type: ignore[attr-defined]
    shuffled = group_relative(totals[order], [groups[i] for i in order], "group")
    torch.testing.assert_close(shuffled, group_relative(totals, groups, "group")[order])


def test_dynamic_sampling_keeps_groups_whose_rewards_differ() -> None:
    totals = torch.tensor([1.0, 0.5, 1.0, 0.0, 1.0, 0.5, 7.0])
    assert informative(totals, (3, 8, 3, 5, 5, 8, 6)) == {5}
    assert informative(torch.zeros(0), ()) == set()


@given(st.lists(st.tuples(st.integers(0, 4), st.sampled_from([0.0, 0.1, 1.0])), max_size=20))
def test_groups_dropped_by_dynamic_sampling_have_zero_advantages(rows: list[tuple[int, float]]) -> None:
    groups, totals = [g for g, _ in rows], torch.tensor([r for _, r in rows])
    kept = informative(totals, groups)
    nonzero = {g for g, a in zip(groups, group_relative(totals, groups, "group").tolist(), strict=True) if a != 0}
    assert kept == nonzero


def test_overlong_penalty_by_hand() -> None:
    penalty = overlong_penalty((0, 80, 81, 90, 100, 101, 500), limit=100, buffer=20, factor=2.0)
    assert penalty.tolist() == pytest.approx([0, 0, -0.1, -1, -2, -2, -2])
    with pytest.raises(ValueError, match="expected 1 to the length limit, 100"):
        overlong_penalty((1,), limit=100, buffer=101)
