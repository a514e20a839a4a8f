"""PPO, GSPO, CISPO, REINFORCE and the value loss: values and gradients by hand."""

import math

import pytest
import torch
from torch import Tensor

from plaudit.algo.kl import kl_estimate
from plaudit.algo.method import PolicyTerms
from plaudit.algo.methods.cispo import cispo
from plaudit.algo.methods.gspo import gspo, gspo_token
from plaudit.algo.methods.ppo import clipped, explained_variance, value_clipped, value_loss
from plaudit.algo.methods.reinforce import plain

OLD = torch.tensor([-1.0, -2.0, -0.5, -3.0, -1.0, -1.0])
RATIO = torch.tensor([0.5, 0.5, 1.5, 1.5, 1.0, 1.0])
ADVANTAGES = torch.tensor([2.0, -2.0, 2.0, -2.0, 2.0, -2.0])


def at_ratio(ratio: Tensor = RATIO) -> Tensor:
    return (OLD[: len(ratio)] + ratio.log()).requires_grad_()


def gradient(terms: PolicyTerms, logp: Tensor) -> list[float]:
    (result,) = torch.autograd.grad(terms.loss.sum(), logp)
    return result.tolist()


def test_ppo_by_hand_with_two_bounds() -> None:
    logp = at_ratio()
    terms = clipped(logp, OLD, ADVANTAGES, low=0.2, high=0.28)
    assert terms.loss.tolist() == pytest.approx([-1, 1.6, -2.56, 3, -2, 2])
    assert terms.ratio.tolist() == pytest.approx(RATIO.tolist())
    assert terms.clipped_low.tolist() == [False, True, False, False, False, False]
    assert terms.clipped_high.tolist() == [False, False, True, False, False, False]
    assert not terms.clipped_dual.any()
    # d(-A · ratio)/dlogp = -A · ratio, and 0 where the ratio is clipped
    assert gradient(terms, logp) == pytest.approx([-1, 0, 0, 3, -2, 2])


def test_dual_clip_applies_to_negative_advantages_only() -> None:
    logp = at_ratio(torch.tensor([5.0, 5.0, 2.0]))
    terms = clipped(logp, OLD[:3], torch.tensor([1.0, -1.0, -1.0]), low=0.2, high=0.2, dual=3.0)
    assert terms.loss.tolist() == pytest.approx([-1.2, 3, 2])
    assert terms.clipped_dual.tolist() == [False, True, False]
    assert terms.clipped_high.tolist() == [True, False, False]
    assert gradient(terms, logp) == pytest.approx([0, 0, 2])


def losses(logp: Tensor, advantages: Tensor) -> dict[str, PolicyTerms]:
    old, mask, lengths = logp.detach(), torch.ones(len(logp), dtype=torch.bool), (len(logp),)
    return {
        "clipped": clipped(logp, old, advantages, 0.2, 0.2, 3.0),
        "plain": plain(logp, old, advantages),
        "gspo": gspo(logp, old, advantages, mask, lengths, 3e-4, 4e-4),
        "gspo-token": gspo_token(logp, old, advantages, mask, lengths, 3e-4, 4e-4),
        "cispo": cispo(logp, old, advantages, 0.2, 0.2),
    }


def test_before_the_first_update_the_ratio_is_exactly_one() -> None:
    logp = (-3 * torch.rand(50, generator=torch.Generator().manual_seed(0))).requires_grad_()
    advantages = torch.randn(50, generator=torch.Generator().manual_seed(1))
    for name, terms in losses(logp, advantages).items():
        assert torch.equal(terms.ratio, torch.ones(50)), name
        assert not (terms.clipped_low | terms.clipped_high | terms.clipped_dual).any(), name
    assert kl_estimate(logp.detach(), logp, "k3").abs().max() < 1e-8


def test_on_policy_gradient_of_each_token_loss_is_that_of_reinforce() -> None:
    logp, advantages = at_ratio(), ADVANTAGES * torch.arange(1, 7)
    for name, terms in losses(logp, advantages).items():
        if name != "gspo":  # its gradient is shared by the tokens of a sample
            assert gradient(terms, logp) == pytest.approx((-advantages).tolist()), name


def test_extreme_log_ratio_gives_a_finite_ratio_and_zero_gradient() -> None:
    logp = torch.tensor([-500.0, 0.0], requires_grad=True)
    terms = clipped(logp, torch.tensor([0.0, -500.0]), torch.tensor([1.0, -1.0]), 0.2, 0.2)
    assert terms.ratio.tolist() == pytest.approx([math.exp(-20), math.exp(20)])
    assert gradient(terms, logp) == [0, 0]


LENGTHS = (3, 2)
MASK = torch.tensor([1, 0, 1, 1, 1], dtype=torch.bool)
DRIFT = torch.tensor([0.4, 99.0, -0.2, 0.3, 0.5])  # means 0.1 and 0.4 over policy tokens


def test_gspo_by_hand() -> None:
    logp = (OLD[:5] + DRIFT).requires_grad_()
    advantages = torch.tensor([1.0, 1.0, 1.0, 2.0, 2.0])
    terms = gspo(logp, OLD[:5], advantages, MASK, LENGTHS, low=0.2, high=0.2)
    first, second = math.exp(0.1), math.exp(0.4)
    assert terms.ratio.tolist() == pytest.approx([first] * 3 + [second] * 2)
    assert terms.loss.tolist() == pytest.approx([-first] * 3 + [-2.4] * 2)
    assert terms.clipped_high.tolist() == [False] * 3 + [True] * 2
    (actual,) = torch.autograd.grad((terms.loss * MASK).sum(), logp)
    # the sample's two policy tokens share 2 · -ratio in equal parts; the second sample is clipped
    assert actual.tolist() == pytest.approx([-first, 0, -first, 0, 0])


def test_gspo_token_equals_gspo_only_for_equal_advantages_within_a_sample() -> None:
    def gradients(advantages: Tensor) -> list[list[float]]:
        results = []
        for loss in (gspo, gspo_token):
            logp = (OLD[:5] + DRIFT).requires_grad_()
            terms = loss(logp, OLD[:5], advantages, MASK, LENGTHS, 0.2, 1.0)
            (gradient_of_form,) = torch.autograd.grad((terms.loss * MASK).sum(), logp)
            results.append(gradient_of_form.tolist())
        return results

    sequence, token = gradients(torch.tensor([1.0, 1.0, 1.0, -2.0, -2.0]))
    assert token == pytest.approx(sequence)
    sequence, token = gradients(torch.tensor([1.0, 0.0, 3.0, 0.0, 5.0]))
    first, second = math.exp(0.1), math.exp(0.4)
    assert token == pytest.approx([-first, 0, -3 * first, 0, -5 * second])
    assert sequence == pytest.approx([-2 * first, 0, -2 * first, -2.5 * second, -2.5 * second])


def test_cispo_clips_the_weight_and_keeps_the_gradient_of_each_token() -> None:
    logp = at_ratio()
    terms = cispo(logp, OLD, ADVANTAGES, low=0.2, high=0.28)
    weight = [0.8, 0.8, 1.28, 1.28, 1, 1]
    assert gradient(terms, logp) == pytest.approx([-w * a for w, a in zip(weight, ADVANTAGES.tolist(), strict=True)])
    assert terms.clipped_low.tolist() == [True, True, False, False, False, False]
    assert terms.clipped_high.tolist() == [False, False, True, True, False, False]
    unclipped = cispo(logp, OLD, ADVANTAGES, low=1.0, high=4.0)
    assert gradient(unclipped, logp) == pytest.approx((-RATIO * ADVANTAGES).tolist())


def test_plain_loss_applies_the_importance_ratio_and_never_clips() -> None:
    logp = at_ratio()
    terms = plain(logp, OLD, ADVANTAGES)
    assert terms.loss.tolist() == pytest.approx((-RATIO * ADVANTAGES).tolist())
    assert gradient(terms, logp) == pytest.approx((-RATIO * ADVANTAGES).tolist())
    assert not terms.clipped_high.any()


def test_old_policy_and_advantages_get_no_gradient() -> None:
    logp, old = at_ratio(), OLD.clone().requires_grad_()
    advantages, mask = ADVANTAGES.clone().requires_grad_(), torch.ones(6, dtype=torch.bool)
    for terms in (
        clipped(logp, old, advantages, 0.2, 0.2, 3.0),
        plain(logp, old, advantages),
        gspo(logp, old, advantages, mask, (6,), 0.2, 0.2),
        gspo_token(logp, old, advantages, mask, (6,), 0.2, 0.2),
        cispo(logp, old, advantages, 0.2, 0.2),
    ):
        terms.loss.sum().backward()
        assert not terms.ratio.requires_grad
    assert old.grad is None
    assert advantages.grad is None


def test_value_loss_by_hand() -> None:
    values = torch.tensor([1.0, 1.0, 3.0], requires_grad=True)
    old, returns = torch.tensor([0.5, 0.0, 0.0]), torch.tensor([2.0, 2.0, 0.0])
    assert value_loss(values, old, returns).tolist() == [0.5, 0.5, 4.5]
    # clipped to within 0.2 of the old values: 0.7, 0.2, 0.2; the larger loss of the two is used
    loss = value_loss(values, old, returns, clip=0.2)
    assert loss.tolist() == pytest.approx([0.5 * 1.3**2, 0.5 * 1.8**2, 4.5])
    (slopes,) = torch.autograd.grad(loss.sum(), values)
    assert slopes.tolist() == [0, 0, 3]
    assert value_clipped(values, old, returns, 0.2).tolist() == [True, True, False]
    assert torch.equal(value_loss(values, old, returns, clip=10.0), value_loss(values, old, returns))


def test_explained_variance_by_hand() -> None:
    returns, mask = torch.tensor([1.0, 2.0, 3.0, 50.0]), torch.tensor([1, 1, 1, 0], dtype=torch.bool)
    assert explained_variance(returns, returns, mask) == 1
    assert explained_variance(torch.full((4,), 9.0), returns, mask) == pytest.approx(0)
    # errors 0, 1, 0: variance 1/3; the returns have variance 1
    assert explained_variance(torch.tensor([1.0, 1.0, 3.0, 0.0]), returns, mask) == pytest.approx(2 / 3)
    assert explained_variance(-returns, returns, mask) == pytest.approx(-3)
    assert explained_variance(returns, torch.ones(4), mask) == 0
    assert explained_variance(returns, returns, torch.zeros(4, dtype=torch.bool)) == 0
