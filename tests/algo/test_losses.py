import math

import pytest
import torch

from plaudit.algo.supervised_losses import attribute_error, bradley_terry, step_cross_entropy


def test_bradley_terry_by_hand() -> None:
    chosen, rejected = torch.tensor([2.0, 0.0]), torch.tensor([1.0, 3.0])
    # -log sigmoid(1) - log sigmoid(-3)
    expected = math.log(1 + math.exp(-1)) + math.log(1 + math.exp(3))
    assert bradley_terry(chosen, rejected).item() == pytest.approx(expected, rel=1e-6)
    margin = torch.tensor([0.5, 0.0])
    expected = math.log(1 + math.exp(-0.5)) + math.log(1 + math.exp(3))
    assert bradley_terry(chosen, rejected, margin).item() == pytest.approx(expected, rel=1e-6)
    # the penalty is 0.1 * ((2 + 1)^2 + (0 + 3)^2) = 1.8
    plain = bradley_terry(chosen, rejected).item()
    assert bradley_terry(chosen, rejected, centring=0.1).item() == pytest.approx(plain + 1.8, rel=1e-6)


def test_only_the_centring_penalty_depends_on_a_constant_shift() -> None:
    chosen, rejected = torch.randn(5), torch.randn(5)
    torch.testing.assert_close(bradley_terry(chosen, rejected), bradley_terry(chosen + 9, rejected + 9))
    assert bradley_terry(chosen + 9, rejected + 9, centring=0.1) > bradley_terry(chosen, rejected, centring=0.1)


def test_missing_ratings_add_no_loss_and_no_gradient() -> None:
    scores = torch.tensor([[1.0, 2.0], [3.0, 4.0]], requires_grad=True)
    ratings = torch.tensor([[0.0, math.nan], [math.nan, 1.0]])
    loss = attribute_error(scores, ratings)
    assert loss.item() == 1.0 + 9.0
    (gradient,) = torch.autograd.grad(loss, scores)
    assert gradient.tolist() == [[2.0, 0.0], [0.0, 6.0]]


def test_step_cross_entropy_by_hand() -> None:
    logits = torch.tensor([[0.0, 1.0], [2.0, 0.0]])
    right = [1 / (1 + math.exp(-1)), 1 / (1 + math.exp(2))]
    hard = -math.log(right[0]) - math.log(1 - right[1])
    assert step_cross_entropy(logits, torch.tensor([1.0, 0.0])).item() == pytest.approx(hard, rel=1e-6)
    soft = -(0.25 * math.log(right[0]) + 0.75 * math.log(1 - right[0])) - math.log(right[1])
    assert step_cross_entropy(logits, torch.tensor([0.25, 1.0])).item() == pytest.approx(soft, rel=1e-6)
