"""Online DPO by hand: which responses form a pair, the loss of a pair and its gradient in float64."""

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


def test_best_and_worst_of_a_group_form_a_pair_unless_rewards_are_equal() -> None:
    rewards = tensor([0.5, 2.0, -1.0, 2.0, 0.1, 0.1, 0.1, 7.0])
    assert best_and_worst(rewards, [0, 0, 0, 0, 1, 1, 1, 2]).tolist() == [0, 1, -1, 0, 0, 0, 0, 0]
    assert best_and_worst(rewards[:3], [3, 1, 3]).tolist() == [1, 0, -1], "groups need not be side by side"


def test_tool_tokens_have_zero_advantages() -> None:
    lengths, mask = [2, 3], tensor([True, True, True, False, True])
    rewards = tensor([0.0, 1.0, 0.0, 0.0, 3.0])
    result = METHOD.advantage.compute(RewardBatch(rewards, mask, lengths, [0, 0], 1.0, 1.0, "none"))
    assert result.advantages.tolist() == [-1, -1, 1, 0, 1]


def loss_batch(logp: Tensor) -> LossBatch:
    """Two pairs: lengths 2 and 1, with the worse response first; and lengths 1 and 3, with a tool token."""
    advantages = tensor([-1.0, -1.0, 1.0, 1.0, -1.0, 0.0, -1.0])
    reference = tensor([-1.0, -2.0, -1.5, -0.5, -0.2, 0.0, -3.0])
    return LossBatch(logp, logp.detach(), advantages, advantages != 0, (2, 1, 1, 3), reference, BETA)


def test_online_dpo_loss_and_gradient_by_hand() -> None:
    logp = tensor([-1.5, -2.0, -1.0, -0.1, -0.4, 0.0, -2.0], dtype=torch.float64, requires_grad=True)
    terms = METHOD.loss.compute(loss_batch(logp), ClipTable())
    # Log-ratios -0.5 and 0.5, 0.4 and 0.8: leads 0.5 + 0.5 and 0.4 - 0.8
    first, second = log(1 + exp(-BETA * 1.0)), log(1 + exp(BETA * 0.4))
    assert terms.loss.tolist() == pytest.approx([first] * 3 + [second] * 4, abs=1e-7)
    (terms.loss[0] + terms.loss[3]).backward()
    assert logp.grad is not None
    one, other = (-BETA / (1 + exp(BETA * lead)) for lead in (1.0, -0.4))  # -β σ(-β lead)
    assert logp.grad.tolist() == pytest.approx([-one, -one, one, other, -other, 0, -other], abs=1e-7)


def test_loss_equals_dpo_loss_on_the_same_pairs() -> None:
    logp = torch.randn(7, dtype=torch.float64, generator=torch.Generator().manual_seed(1))
    batch = loss_batch(logp)
    assert batch.reference is not None
    policy_tokens, reference = torch.where(batch.mask, logp, 0.0), batch.reference
    better = Responses(
        torch.stack([policy_tokens[2], policy_tokens[3]]), tensor([1, 1]), torch.stack([reference[2], reference[3]])
    )
    worse = Responses(
        torch.stack([policy_tokens[:2].sum(), policy_tokens[4:].sum()]),
        tensor([2, 2]),
        torch.stack([reference[:2].sum(), reference[4:].sum()]),
    )
    expected = dpo_loss(PreferenceBatch(better, worse), PreferenceAlgorithm(name="dpo", beta=BETA))
    assert METHOD.loss.compute(batch, ClipTable()).loss[[0, 3]].tolist() == pytest.approx(expected.tolist(), abs=1e-7)
