"""The expected gradient of each estimator, enumerated over all outcomes, against the gradient of the expected reward.

The policy is a softmax over three tokens. First token 0 ends the sample; after 1 or 2 a second token follows. That
gives seven responses of one or two tokens. An outcome is a group of independently sampled responses; its loss is
weighted by its probability and the sum is differentiated.
"""

import itertools
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import pytest
import torch
from torch import Tensor

from plaudit.algo.aggregate import Aggregation, token_weights
from plaudit.algo.gae import gae
from plaudit.algo.methods.cispo import cispo
from plaudit.algo.methods.grpo import group_relative
from plaudit.algo.methods.gspo import gspo, gspo_token
from plaudit.algo.methods.ppo import clipped
from plaudit.algo.methods.reinforce import plain, returns_to_go
from plaudit.algo.methods.rloo import leave_one_out
from plaudit.algo.rewards import at_last_token
from plaudit.algo.tokens.ragged import spread

# Logits of the first token, then of the second token after first token 1 and after first token 2.
THETA = torch.tensor([[0.2, -0.4, 0.7], [0.5, 0.0, -0.6], [-0.3, 0.9, 0.1]], dtype=torch.float64)


@dataclass(frozen=True)
class World:
    """Responses, as (context, token) per token, and their rewards."""

    responses: tuple[tuple[tuple[int, int], ...], ...]
    rewards: tuple[float, ...]


ONE_TOKEN = World(tuple(((0, a),) for a in range(3)), (0.0, 1.0, 3.0))
RAGGED = World(
    (((0, 0),), *(((0, a), (a, b)) for a in (1, 2) for b in range(3))), (0.5, 0.0, 2.0, 1.0, -1.0, 3.0, 0.25)
)
WORLDS = pytest.mark.parametrize("world", [ONE_TOKEN, RAGGED], ids=["one token", "ragged"])

Advantage = Callable[[Tensor, Tensor, Sequence[int]], Tensor]  # rewards (N,), mask (T,), lengths
Loss = Callable[[Tensor, Tensor, Tensor, Sequence[int]], Tensor]  # logp, advantages, mask (T,), lengths


def log_probability(theta: Tensor, response: tuple[tuple[int, int], ...]) -> Tensor:
    """The log-probability of each token."""
    table = theta.log_softmax(-1)
    return torch.stack([table[context, token] for context, token in response])


def exact(world: World, factors: Sequence[float] | None = None) -> Tensor:
    """The gradient of Σ p(y) · reward(y) · factor(y), computed from the probabilities."""
    theta = THETA.clone().requires_grad_()
    value = torch.zeros((), dtype=torch.float64)
    for i, (response, reward) in enumerate(zip(world.responses, world.rewards, strict=True)):
        value = value + log_probability(theta, response).sum().exp() * reward * (factors[i] if factors else 1.0)
    (gradient,) = torch.autograd.grad(value, theta)
    return gradient


def expected(
    world: World, size: int, advantage: Advantage, loss: Loss, how: Aggregation, constant: float | None = None
) -> Tensor:
    """The expected descent direction over all ordered groups of `size` responses."""
    theta = THETA.clone().requires_grad_()
    logps = [log_probability(theta, response) for response in world.responses]
    total = torch.zeros((), dtype=torch.float64)
    for indices in itertools.product(range(len(logps)), repeat=size):
        logp = torch.cat([logps[i] for i in indices])
        lengths = [len(logps[i]) for i in indices]
        mask = torch.ones(len(logp), dtype=torch.bool)
        advantages = advantage(torch.tensor([world.rewards[i] for i in indices]), mask, lengths)
        weights = token_weights(mask, lengths, how, constant)
        total = total + logp.detach().sum().exp() * (weights * loss(logp, advantages, mask, lengths)).sum()
    (gradient,) = torch.autograd.grad(total, theta)
    return -gradient


def returns_to_go_advantage(totals: Tensor, mask: Tensor, lengths: Sequence[int]) -> Tensor:
    return returns_to_go(at_last_token(totals, mask, lengths), mask, lengths, 1.0)


def critic_advantage(totals: Tensor, mask: Tensor, lengths: Sequence[int]) -> Tensor:
    """A wrong critic, whose values ignore the current token: GAE with λ = 1 is unbiased with any such critic."""
    values = torch.full((len(mask),), 0.7)
    return gae(at_last_token(totals, mask, lengths), values, mask, lengths, torch.zeros(len(lengths)), 1.0, 1.0)[0]


def leave_one_out_advantage(totals: Tensor, mask: Tensor, lengths: Sequence[int]) -> Tensor:
    return spread(leave_one_out(totals, [0] * len(totals)), mask, lengths)


def centred_advantage(totals: Tensor, mask: Tensor, lengths: Sequence[int]) -> Tensor:
    return spread(group_relative(totals, [0] * len(totals), "none"), mask, lengths)


def scaled_advantage(totals: Tensor, mask: Tensor, lengths: Sequence[int]) -> Tensor:
    return spread(group_relative(totals, [0] * len(totals), "group"), mask, lengths)


TOKEN_LOSSES: dict[str, Loss] = {
    "plain": lambda logp, advantages, mask, lengths: plain(logp, logp.detach(), advantages).loss,
    "ppo": lambda logp, advantages, mask, lengths: clipped(logp, logp.detach(), advantages, 0.2, 0.28, 3.0).loss,
    "cispo": lambda logp, advantages, mask, lengths: cispo(logp, logp.detach(), advantages, 1.0, 4.0).loss,
    "gspo-token": lambda logp, advantages, mask, lengths: (
        gspo_token(logp, logp.detach(), advantages, mask, lengths, 3e-4, 4e-4).loss
    ),
}


def gspo_loss(logp: Tensor, advantages: Tensor, mask: Tensor, lengths: Sequence[int]) -> Tensor:
    return gspo(logp, logp.detach(), advantages, mask, lengths, 3e-4, 4e-4).loss


def same(actual: Tensor, expected_gradient: Tensor) -> None:
    torch.testing.assert_close(actual, expected_gradient, rtol=1e-5, atol=1e-6)


def cosine(a: Tensor, b: Tensor) -> float:
    return float(torch.nn.functional.cosine_similarity(a.flatten(), b.flatten(), dim=0))


def test_exact_gradient_by_hand() -> None:
    p = THETA[0].softmax(0)
    rewards = torch.tensor(ONE_TOKEN.rewards, dtype=torch.float64)
    torch.testing.assert_close(exact(ONE_TOKEN)[0], p * (rewards - (p * rewards).sum()))


@WORLDS
@pytest.mark.parametrize("loss", list(TOKEN_LOSSES))
def test_reinforce_gradient_is_unbiased(world: World, loss: str) -> None:
    same(expected(world, 1, returns_to_go_advantage, TOKEN_LOSSES[loss], "constant", 1.0), exact(world))


@WORLDS
def test_gae_with_lambda_one_is_unbiased(world: World) -> None:
    same(expected(world, 1, critic_advantage, TOKEN_LOSSES["ppo"], "constant", 1.0), exact(world))


@WORLDS
@pytest.mark.parametrize("size", [2, 3])
def test_rloo_gradient_is_unbiased(world: World, size: int) -> None:
    same(expected(world, size, leave_one_out_advantage, TOKEN_LOSSES["plain"], "constant", 1.0), exact(world))


@WORLDS
@pytest.mark.parametrize("size", [2, 3])
@pytest.mark.parametrize("loss", ["ppo", "cispo"])
def test_dr_grpo_gradient_is_a_multiple_of_the_policy_gradient(world: World, size: int, loss: str) -> None:
    """The group mean includes the sample itself, hence the factor (n - 1) / n. The constant only sets the scale."""
    factor = (size - 1) / size
    same(expected(world, size, centred_advantage, TOKEN_LOSSES[loss], "constant", 1.0), factor * exact(world))
    same(expected(world, size, centred_advantage, TOKEN_LOSSES[loss], "constant", 8.0), factor / 8 * exact(world))


@pytest.mark.parametrize("size", [2, 3])
def test_gspo_gradient_weighs_responses_by_inverse_length(size: int) -> None:
    same(expected(ONE_TOKEN, size, leave_one_out_advantage, gspo_loss, "sequence"), exact(ONE_TOKEN))
    # By design a response is weighted by 1 / its length, as always with the aggregation "sequence".
    per_token = exact(RAGGED, [1 / len(response) for response in RAGGED.responses])
    reward = sum(
        float(log_probability(THETA, response).sum().exp()) * r
        for response, r in zip(RAGGED.responses, RAGGED.rewards, strict=True)
    )
    constant_reward = World(RAGGED.responses, (reward,) * 7)
    baseline = exact(constant_reward, [1 / len(response) for response in RAGGED.responses])
    same(expected(RAGGED, size, leave_one_out_advantage, gspo_loss, "sequence"), per_token - baseline)
    same(expected(RAGGED, size, leave_one_out_advantage, TOKEN_LOSSES["plain"], "sequence"), per_token - baseline)
    assert cosine(per_token - baseline, exact(RAGGED)) < 0.99


def test_grpo_with_std_scaling_is_biased_by_design() -> None:
    """Rewards a hundred times larger give the same gradient; more than two reward values change its direction."""
    large = World(ONE_TOKEN.responses, tuple(100 * r for r in ONE_TOKEN.rewards))
    small = expected(ONE_TOKEN, 3, scaled_advantage, TOKEN_LOSSES["ppo"], "sequence")
    torch.testing.assert_close(
        expected(large, 3, scaled_advantage, TOKEN_LOSSES["ppo"], "sequence"), small, rtol=1e-3, atol=1e-4
    )
    uneven = World(ONE_TOKEN.responses, (0.0, 1.0, 30.0))
    assert cosine(expected(uneven, 3, scaled_advantage, TOKEN_LOSSES["ppo"], "sequence"), exact(uneven)) < 0.999
    assert cosine(expected(uneven, 3, centred_advantage, TOKEN_LOSSES["ppo"], "sequence"), exact(uneven)) > 1 - 1e-9
    two_values = World(ONE_TOKEN.responses, (0.0, 1.0, 1.0))
    assert (
        cosine(expected(two_values, 2, scaled_advantage, TOKEN_LOSSES["ppo"], "sequence"), exact(two_values)) > 1 - 1e-9
    )


def test_token_mean_is_biased_by_design_where_lengths_differ() -> None:
    """A response weighs less in a group of long ones; with Dr. GRPO's constant its weight is the same in any group."""
    mean = expected(RAGGED, 2, centred_advantage, TOKEN_LOSSES["ppo"], "token")
    assert cosine(mean, exact(RAGGED)) < 0.999
    assert (
        cosine(expected(RAGGED, 2, centred_advantage, TOKEN_LOSSES["ppo"], "constant", 4.0), exact(RAGGED)) > 1 - 1e-9
    )
    same(expected(ONE_TOKEN, 2, centred_advantage, TOKEN_LOSSES["ppo"], "token"), 0.5 * exact(ONE_TOKEN))
