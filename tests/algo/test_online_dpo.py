"""Online DPO by hand: which responses form a pair, the loss of a pair, and its gradient in float64."""

from math import exp, log

import pytest
import torch
from torch import Tensor, tensor

from plaudit.algo.method import LossBatch, RewardBatch
from plaudit.algo.methods.online_dpo import METHOD, best_and_worst
from plaudit.algo.preference.dpo import dpo_loss
from plaudit.algo.preference.method import PreferenceBatch, Responses
from plaudit.config.algorithm import ClipTable
from plaudit.config.supervised import PreferenceAlgorithm

BETA = 0.3


def test_the_best_and_the_worst_of_a_group_are_a_pair_and_equals_are_none() -> None:
    rewards = tensor([0.5, 2.0, -1.0, 2.0, 0.1, 0.1, 0.1, 7.0])
    assert best_and_worst(rewards, [0, 0, 0, 0, 1, 1, 1, 2]).tolist() == [0, 1, -1, 0, 0, 0, 0, 0]
    assert best_and_worst(rewards[:3], [3, 1, 3]).tolist() == [1, 0, -1], "groups need not be side by side"


def test_a_tools_tokens_have_no_part() -> None:
    lengths, mask = [2, 3], tensor([True, True, True, False, True])
    rewards = tensor([0.0, 1.0, 0.0, 0.0, 3.0])
    found = METHOD.advantage.compute(RewardBatch(rewards, mask, lengths, [0, 0], 1.0, 1.0, "none"))
    assert found.advantages.tolist() == [-1, -1, 1, 0, 1]


def drawn(logp: Tensor) -> LossBatch:
    """Two pairs: of lengths 2 and 1, the worse first, and of lengths 1 and 3 with a tool's token."""
    advantages = tensor([-1.0, -1.0, 1.0, 1.0, -1.0, 0.0, -1.0])
    reference = tensor([-1.0, -2.0, -1.5, -0.5, -0.2, 0.0, -3.0])
    return LossBatch(logp, logp.detach(), advantages, advantages != 0, (2, 1, 1, 3), reference, BETA)


def test_the_loss_and_its_gradient_by_hand() -> None:
    logp = tensor([-1.5, -2.0, -1.0, -0.1, -0.4, 0.0, -2.0], dtype=torch.float64, requires_grad=True)
    terms = METHOD.loss.compute(drawn(logp), ClipTable())
    # Log-ratios -0.5 and 0.5, 0.4 and 0.8: leads 0.5 + 0.5 and 0.4 - 0.8
    first, second = log(1 + exp(-BETA * 1.0)), log(1 + exp(BETA * 0.4))
    assert terms.loss.tolist() == pytest.approx([first] * 3 + [second] * 4, abs=1e-7)
    (terms.loss[0] + terms.loss[3]).backward()
    assert logp.grad is not None
    one, other = (-BETA / (1 + exp(BETA * lead)) for lead in (1.0, -0.4))  # -β σ(-β lead)
    assert logp.grad.tolist() == pytest.approx([-one, -one, one, other, -other, 0, -other], abs=1e-7)


def test_it_is_the_loss_of_dpo_on_the_same_pairs() -> None:
    logp = torch.randn(7, dtype=torch.float64, generator=torch.Generator().manual_seed(1))
    given = drawn(logp)
    assert given.reference is not None
    mine, reference = torch.where(given.mask, logp, 0.0), given.reference
    better = Responses(torch.stack([mine[2], mine[3]]), tensor([1, 1]), torch.stack([reference[2], reference[3]]))
    worse = Responses(
        torch.stack([mine[:2].sum(), mine[4:].sum()]),
        tensor([2, 2]),
        torch.stack([reference[:2].sum(), reference[4:].sum()]),
    )
    expected = dpo_loss(PreferenceBatch(better, worse), PreferenceAlgorithm(name="dpo", beta=BETA))
    assert METHOD.loss.compute(given, ClipTable()).loss[[0, 3]].tolist() == pytest.approx(expected.tolist(), abs=1e-7)
