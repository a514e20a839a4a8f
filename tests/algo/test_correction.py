"""Off-policy correction for samples of an engine whose log-probs differ from the learner's."""

import math

import pytest
import torch

from plaudit.algo.correction import Level, Mode, importance_weights, mismatch
from plaudit.algo.methods.ppo import clipped, ratio_of

LENGTHS = (3, 2)
MASK = torch.tensor([1, 0, 1, 1, 1], dtype=torch.bool)
RATIOS = [4.0, math.nan, 0.5, 1.0, 0.25]  # the products are 2 and 0.25, the means sqrt 2 and 0.5
OLD = torch.tensor([-1.0, -1.0, -2.0, -0.5, -3.0])
BEHAVIOUR = OLD - torch.tensor(RATIOS).log()


def weights(mode: Mode, level: Level, cap: float, floor: float = 0.0) -> tuple[list[float], list[bool]]:
    found, kept = importance_weights(OLD, BEHAVIOUR, MASK, LENGTHS, mode, level, cap, floor)
    return found.tolist(), kept.tolist()


OWN = MASK.tolist()


def test_by_hand() -> None:
    root = math.sqrt(2)
    for level, expected in (
        ("token", [4, 0, 0.5, 1, 0.25]),
        ("sequence", [2, 0, 2, 0.25, 0.25]),
        ("geometric", [root, 0, root, 0.5, 0.5]),
    ):
        assert weights("truncate", level, 100) == (pytest.approx(expected), OWN)


def test_truncation_clamps_and_the_mask_drops() -> None:
    assert weights("truncate", "token", 2.0) == (pytest.approx([2, 0, 0.5, 1, 0.25]), OWN)
    assert weights("truncate", "token", 2.0, 0.5) == (pytest.approx([2, 0, 0.5, 1, 0.5]), OWN)
    assert weights("mask", "token", 2.0) == (pytest.approx([0, 0, 0.5, 1, 0.25]), [False, False, True, True, True])
    assert weights("mask", "token", 2.0, 0.4) == (pytest.approx([0, 0, 0.5, 1, 0]), [False, False, True, True, False])
    assert weights("mask", "sequence", 1.5) == (pytest.approx([0, 0, 0, 0.25, 0.25]), [False] * 3 + [True] * 2)
    assert weights("mask", "geometric", 1.5, 0.6) == (
        pytest.approx([math.sqrt(2), 0, math.sqrt(2), 0, 0]),
        [True, False, True, False, False],
    )


@pytest.mark.parametrize("level", ["token", "sequence", "geometric"])
@pytest.mark.parametrize("mode", ["truncate", "mask"])
def test_where_the_two_agree_the_weight_is_exactly_one(mode: Mode, level: Level) -> None:
    found, kept = importance_weights(OLD, OLD, MASK, LENGTHS, mode, level, 2.0, 0.5)
    assert found.tolist() == MASK.float().tolist()
    assert torch.equal(kept, MASK)


def test_the_decoupled_objective_is_plain_importance_sampling_in_the_middle_of_both_clips() -> None:
    """(π / π_old) · (π_old / behaviour) = π / behaviour where nothing is clipped or truncated."""
    old, behaviour = OLD[2:], BEHAVIOUR[2:]
    logp, advantages = (old + torch.tensor([0.1, -0.1, 0.05])).requires_grad_(), torch.tensor([1.0, -1.0, 2.0])
    found, _ = importance_weights(old, behaviour, MASK[2:], (1, 2), "truncate", "token", 100.0)
    decoupled = found * clipped(logp, old, advantages, 0.2, 0.2).loss
    torch.testing.assert_close(decoupled, -advantages * ratio_of(logp, behaviour))


def test_weights_have_no_gradient_and_survive_a_broken_token() -> None:
    old = torch.tensor([0.0, -400.0], requires_grad=True)
    behaviour, every = torch.tensor([-400.0, 0.0]), torch.ones(2, dtype=torch.bool)
    found, _ = importance_weights(old, behaviour, every, (1, 1), "truncate", "token", 5.0)
    assert not found.requires_grad
    assert found.tolist() == pytest.approx([5, math.exp(-20)])


def test_a_sample_without_a_policy_token() -> None:
    nothing = torch.zeros(5, dtype=torch.bool)
    found, kept = importance_weights(OLD, BEHAVIOUR, nothing, LENGTHS, "mask", "geometric", 2.0, 0.5)
    assert found.tolist() == [0] * 5
    assert not kept.any()
    assert mismatch(OLD, BEHAVIOUR, nothing)["ess"] == 1


def test_mismatch_by_hand() -> None:
    figures = mismatch(OLD, BEHAVIOUR, MASK)
    two = math.log(2)
    # |log ratio|: 2, 1, 0, 2 times log 2; log ratio: 2, -1, 0, -2 times; weights 4, 0.5, 1, 0.25
    assert figures["abs_mean"] == pytest.approx(1.25 * two, rel=1e-6)
    assert figures["abs_max"] == pytest.approx(2 * two, rel=1e-6)
    assert figures["abs_std"] == pytest.approx(math.sqrt(9 / 4 - 25 / 16) * two, rel=1e-6)
    assert figures["k1"] == pytest.approx(0.25 * two, rel=1e-6)
    assert figures["k3"] == pytest.approx(5.75 / 4 - 1 + 0.25 * two, rel=1e-6)
    assert figures["ess"] == pytest.approx(5.75**2 / (4 * (16 + 0.25 + 1 + 0.0625)), rel=1e-6)
    same = mismatch(OLD, OLD, MASK)
    assert same == {
        "abs_mean": 0,
        "abs_max": 0,
        "abs_std": 0,
        "k1": 0,
        "k3": 0,
        "ess": 1,
        "correlation": pytest.approx(1),
    }


def test_correlation_by_hand() -> None:
    every = torch.ones(3, dtype=torch.bool)
    ours = torch.tensor([0.1, 0.2, 0.3]).log()
    # of 0.1, 0.2, 0.3 and 0.2, 0.6, 0.4: 0.02 / sqrt(0.02 · 0.08)
    theirs = torch.tensor([0.2, 0.6, 0.4]).log()
    assert mismatch(ours, theirs, every)["correlation"] == pytest.approx(0.5, rel=1e-5)
    level = torch.full((3,), -1.0)
    assert mismatch(level, level, every)["correlation"] == 1
    assert mismatch(level, ours, every)["correlation"] == 0
