"""Estimators of the KL: values by hand, expectations and gradients by enumeration."""

import math

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from plaudit.algo.kl import AdaptiveKl, Estimator, kl_estimate, kl_loss
from plaudit.algo.methods.ppo import ratio_of

ESTIMATORS: tuple[Estimator, ...] = ("k1", "k2", "k3")
THETA = torch.tensor([0.3, -0.5, 1.1, 0.0], dtype=torch.float64)
OLD = torch.tensor([0.9, 0.1, 0.2, -0.4], dtype=torch.float64).log_softmax(0)
REF = torch.tensor([-0.2, 0.4, 0.1, 0.8], dtype=torch.float64).log_softmax(0)


def test_kl_estimates_by_hand() -> None:
    # the policy's probability is 2, 0.5 and 1 times the reference's
    logp = torch.tensor([0.5, 0.25, 0.1]).log()
    ref = torch.tensor([0.25, 0.5, 0.1]).log()
    log2 = math.log(2)
    assert kl_estimate(logp, ref, "k1").tolist() == pytest.approx([log2, -log2, 0])
    assert kl_estimate(logp, ref, "k2").tolist() == pytest.approx([log2**2 / 2, log2**2 / 2, 0])
    assert kl_estimate(logp, ref, "k3").tolist() == pytest.approx([0.5 - 1 + log2, 2 - 1 - log2, 0])


def test_kl_estimates_stay_finite_for_extreme_log_ratios() -> None:
    logp, ref = torch.tensor([0.0, -300.0, -300.0]), torch.tensor([-300.0, 0.0, -300.0])
    assert kl_estimate(logp, ref, "k1").tolist() == [20, -20, 0]
    assert kl_estimate(logp, ref, "k2").tolist() == [200, 200, 0]
    assert kl_estimate(logp, ref, "k3").tolist() == pytest.approx([19, math.exp(20) - 21, 0])


@given(st.lists(st.tuples(st.floats(-30, 0, width=32), st.floats(-30, 0, width=32)), min_size=1, max_size=9))
def test_k2_and_k3_are_never_negative(pairs: list[tuple[float, float]]) -> None:
    logp, ref = torch.tensor(pairs).unbind(1)
    assert kl_estimate(logp, ref, "k2").min() >= 0
    assert kl_estimate(logp, ref, "k3").min() >= 0


def divergence(p: Tensor, q: Tensor) -> Tensor:
    """KL(p, q) of two distributions, as log-probabilities."""
    return (p.exp() * (p - q)).sum()


def test_k1_and_k3_are_unbiased_and_k2_is_not() -> None:
    logp = THETA.log_softmax(0)
    mean = {e: float((logp.exp() * kl_estimate(logp, REF, e)).sum()) for e in ESTIMATORS}
    exact = float(divergence(logp, REF))
    assert exact > 0.2
    assert mean["k1"] == pytest.approx(exact, rel=1e-12)
    assert mean["k3"] == pytest.approx(exact, rel=1e-12)
    assert abs(mean["k2"] - exact) > 0.01


def gradient_of(make: object) -> Tensor:
    theta = THETA.clone().requires_grad_()
    assert callable(make)
    (gradient,) = torch.autograd.grad(make(theta.log_softmax(0)), theta)
    return gradient


REVERSE = gradient_of(lambda logp: divergence(logp, REF))
FORWARD = gradient_of(lambda logp: divergence(REF, logp))


@pytest.mark.parametrize(("estimator", "is_gradient_of"), [("k1", 0 * REVERSE), ("k2", REVERSE), ("k3", FORWARD)])
def test_expected_on_policy_gradient_of_each_estimator(estimator: Estimator, is_gradient_of: Tensor) -> None:
    actual = gradient_of(lambda logp: (logp.exp().detach() * kl_loss(logp, REF, estimator)).sum())
    torch.testing.assert_close(actual, is_gradient_of, rtol=1e-10, atol=1e-12)


def test_forward_and_reverse_kl_gradients_differ_in_this_setup() -> None:
    assert (REVERSE - FORWARD).abs().max() > 0.05


@pytest.mark.parametrize("estimator", ESTIMATORS)
def test_straight_through_has_the_estimator_value_and_the_reverse_kl_gradient(estimator: Estimator) -> None:
    logp = THETA.log_softmax(0)
    torch.testing.assert_close(kl_loss(logp, REF, estimator, straight_through=True), kl_estimate(logp, REF, estimator))
    actual = gradient_of(lambda logp: (logp.exp().detach() * kl_loss(logp, REF, estimator, True)).sum())
    torch.testing.assert_close(actual, REVERSE, rtol=1e-10, atol=1e-12)


@pytest.mark.parametrize("straight_through", [False, True])
@pytest.mark.parametrize("estimator", ["k1", "k3"])
def test_importance_ratio_makes_off_policy_kl_unbiased(estimator: Estimator, straight_through: bool) -> None:
    def loss(logp: Tensor, with_ratio: bool = True) -> Tensor:
        ratio = ratio_of(logp, OLD) if with_ratio else None
        return (OLD.exp() * kl_loss(logp, REF, estimator, straight_through, ratio)).sum()

    assert float(loss(THETA.log_softmax(0))) == pytest.approx(float(divergence(THETA.log_softmax(0), REF)), rel=1e-12)
    torch.testing.assert_close(gradient_of(loss), REVERSE, rtol=1e-10, atol=1e-12)
    assert (gradient_of(lambda logp: loss(logp, with_ratio=False)) - REVERSE).abs().max() > 0.01


def test_reference_gets_no_gradient() -> None:
    ref = REF.clone().requires_grad_()
    logp = THETA.log_softmax(0).requires_grad_()
    kl_loss(logp, ref, "k3", straight_through=True).sum().backward()
    assert ref.grad is None


def test_adaptive_kl_controller_by_hand() -> None:
    kl = AdaptiveKl(0.1, target=6.0, horizon=1000)
    kl.update(6.6, 50)  # 10% above: 1 + 0.1 · 50 / 1000
    assert kl.coef == pytest.approx(0.1 * 1.005)
    kl.update(60.0, 50)  # clipped at 20%
    assert kl.coef == pytest.approx(0.1 * 1.005 * 1.01)
    kl.update(0.0, 50)
    assert kl.coef == pytest.approx(0.1 * 1.005 * 1.01 * 0.99)
    restored = AdaptiveKl(0.5, target=6.0, horizon=1000)
    restored.load(kl.state())
    assert restored == kl


def test_coefficient_is_constant_without_a_target() -> None:
    kl = AdaptiveKl(0.05)
    kl.update(1e9, 10_000)
    assert kl.coef == 0.05
