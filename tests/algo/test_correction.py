"""Off-policy correction of samples from an engine whose log-probs differ from the learner's."""

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
    values, kept = importance_weights(OLD, BEHAVIOUR, MASK, LENGTHS, mode, level, cap, floor)
    return values.tolist(), kept.tolist()


POLICY_TOKENS = MASK.tolist()


def test_importance_weights_by_hand() -> None:
    root = math.sqrt(2)
    for level, expected in (
        ("token", [4, 0, 0.5, 1, 0.25]),
        ("sequence", [2, 0, 2, 0.25, 0.25]),
        ("geometric", [root, 0, root, 0.5, 0.5]),
    ):
        assert weights("truncate", level, 100) == (pytest.approx(expected), POLICY_TOKENS)


def test_truncate_mode_clamps_weights_and_mask_mode_zeroes_them() -> None:
    assert weights("truncate", "token", 2.0) == (pytest.approx([2, 0, 0.5, 1, 0.25]), POLICY_TOKENS)
    assert weights("truncate", "token", 2.0, 0.5) == (pytest.approx([2, 0, 0.5, 1, 0.5]), POLICY_TOKENS)
    assert weights("mask", "token", 2.0) == (pytest.approx([0, 0, 0.5, 1, 0.25]), [False, False, True, True, True])
    assert weights("mask", "token", 2.0, 0.4) == (pytest.approx([0, 0, 0.5, 1, 0]), [False, False, True, True, False])
    assert weights("mask", "sequence", 1.5) == (pytest.approx([0, 0, 0, 0.25, 0.25]), [False] * 3 + [True] * 2)
    assert weights("mask", "geometric", 1.5, 0.6) == (
        pytest.approx([math.sqrt(2), 0, math.sqrt(2), 0, 0]),
        [True, False, True, False, False],
    )


@pytest.mark.parametrize("level", ["token", "sequence", "geometric"])
@pytest.mark.parametrize("mode", ["truncate", "mask"])
def test_weight_is_exactly_one_where_policies_agree(mode: Mode, level: Level) -> None:
    values, kept = importance_weights(OLD, OLD, MASK, LENGTHS, mode, level, 2.0, 0.5)
    assert values.tolist() == MASK.float().tolist()
    assert torch.equal(kept, MASK)


def test_decoupled_objective_without_clipping_is_plain_importance_sampling() -> None:
    """(π / π_old) · (π_old / behaviour) = π / behaviour where nothing is clipped or truncated."""
    old, behaviour = OLD[2:], BEHAVIOUR[2:]
    logp, advantages = (old + torch.tensor([0.1, -0.1, 0.05])).requires_grad_(), torch.tensor([1.0, -1.0, 2.0])
    correction, _ = importance_weights(old, behaviour, MASK[2:], (1, 2), "truncate", "token", 100.0)
    decoupled = correction * clipped(logp, old, advantages, 0.2, 0.2).loss
    torch.testing.assert_close(decoupled, -advantages * ratio_of(logp, behaviour))


def test_weights_have_no_gradient_and_stay_finite_for_extreme_log_ratios() -> None:
    old = torch.tensor([0.0, -400.0], requires_grad=True)
    behaviour, mask = torch.tensor([-400.0, 0.0]), torch.ones(2, dtype=torch.bool)
    values, _ = importance_weights(old, behaviour, mask, (1, 1), "truncate", "token", 5.0)
    assert not values.requires_grad
    assert values.tolist() == pytest.approx([5, math.exp(-20)])


def test_samples_without_policy_tokens_get_zero_weights() -> None:
    no_policy_tokens = torch.zeros(5, dtype=torch.bool)
    values, kept = importance_weights(OLD, BEHAVIOUR, no_policy_tokens, LENGTHS, "mask", "geometric", 2.0, 0.5)
    assert values.tolist() == [0] * 5
    assert not kept.any()
    assert mismatch(OLD, BEHAVIOUR, no_policy_tokens)["ess"] == 1


def test_mismatch_by_hand() -> None:
    metrics = mismatch(OLD, BEHAVIOUR, MASK)
    log2 = math.log(2)
    # |log ratio|: 2, 1, 0, 2 times log 2; log ratio: 2, -1, 0, -2 times log 2; weights 4, 0.5, 1, 0.25
    assert metrics["abs_mean"] == pytest.approx(1.25 * log2, rel=1e-6)
    assert metrics["abs_max"] == pytest.approx(2 * log2, rel=1e-6)
    assert metrics["abs_std"] == pytest.approx(math.sqrt(9 / 4 - 25 / 16) * log2, rel=1e-6)
    assert metrics["k1"] == pytest.approx(0.25 * log2, rel=1e-6)
    assert metrics["k3"] == pytest.approx(5.75 / 4 - 1 + 0.25 * log2, rel=1e-6)
    assert metrics["ess"] == pytest.approx(5.75**2 / (4 * (16 + 0.25 + 1 + 0.0625)), rel=1e-6)
    identical = mismatch(OLD, OLD, MASK)
    assert identical == {
        "abs_mean": 0,
        "abs_max": 0,
        "abs_std": 0,
        "k1": 0,
        "k3": 0,
        "ess": 1,
        "correlation": pytest.approx(1),
    }


def test_correlation_by_hand() -> None:
    mask = torch.ones(3, dtype=torch.bool)
    learner = torch.tensor([0.1, 0.2, 0.3]).log()
    # correlation of 0.1, 0.2, 0.3 with 0.2, 0.6, 0.4: 0.02 / sqrt(0.02 · 0.08)
    behaviour = torch.tensor([0.2, 0.6, 0.4]).log()
    assert mismatch(learner, behaviour, mask)["correlation"] == pytest.approx(0.5, rel=1e-5)
    constant = torch.full((3,), -1.0)
    assert mismatch(constant, constant, mask)["correlation"] == 1
    assert mismatch(constant, learner, mask)["correlation"] == 0
