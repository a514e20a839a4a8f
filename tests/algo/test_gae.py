"""GAE advantages and returns, by hand and against the definition."""

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from plaudit.algo.gae import gae
from plaudit.algo.methods.reinforce import returns_to_go
from plaudit.algo.tokens.ragged import spread

ALL_TOKENS = torch.ones(3, dtype=torch.bool)
REWARDS, VALUES = torch.tensor([0.0, 0.0, 1.0]), torch.tensor([0.5, 0.2, 0.4])


def test_gae_by_hand() -> None:
    # gamma 0.5, lam 0.5: deltas 0 + 0.1 - 0.5, 0 + 0.2 - 0.2, 1 + 0 - 0.4
    advantages, returns = gae(REWARDS, VALUES, ALL_TOKENS, (3,), torch.zeros(1), 0.5, 0.5)
    assert advantages.tolist() == pytest.approx([-0.4 + 0.25 * (0 + 0.25 * 0.6), 0.25 * 0.6, 0.6])
    assert returns.tolist() == pytest.approx([-0.4 + 0.0375 + 0.5, 0.15 + 0.2, 1.0])


def test_lambda_one_gives_return_minus_value_and_lambda_zero_gives_td_error() -> None:
    advantages, returns = gae(REWARDS, VALUES, ALL_TOKENS, (3,), torch.zeros(1), 1.0, 1.0)
    assert advantages.tolist() == pytest.approx([0.5, 0.8, 0.6])
    assert returns.tolist() == pytest.approx([1, 1, 1])
    advantages, returns = gae(REWARDS, VALUES, ALL_TOKENS, (3,), torch.zeros(1), 0.9, 0.0)
    assert advantages.tolist() == pytest.approx([0.9 * 0.2 - 0.5, 0.9 * 0.4 - 0.2, 1 - 0.4])
    assert returns.tolist() == pytest.approx([0.18, 0.36, 1.0])


def test_truncated_sample_bootstraps_from_the_critic_and_a_finished_one_does_not() -> None:
    values = torch.cat([VALUES, VALUES])
    advantages, _ = gae(torch.zeros(6), values, torch.ones(6, dtype=torch.bool), (3, 3), torch.tensor([0.0, 2.0]), 1, 1)
    assert advantages.tolist() == pytest.approx([-0.5, -0.2, -0.4, 1.5, 1.8, 1.6])


def test_tool_tokens_are_skipped() -> None:
    without_tools = gae(REWARDS, VALUES, ALL_TOKENS, (3,), torch.tensor([0.3]), 0.9, 0.8)
    mask = torch.tensor([0, 1, 0, 0, 1, 1, 0], dtype=torch.bool)
    rewards, values = torch.full((7,), 50.0), torch.full((7,), -30.0)
    rewards[mask], values[mask] = REWARDS, VALUES
    for actual, expected in zip(
        gae(rewards, values, mask, (7,), torch.tensor([0.3]), 0.9, 0.8), without_tools, strict=True
    ):
        torch.testing.assert_close(actual[mask], expected)
        assert actual[~mask].tolist() == [0] * 4


def test_samples_without_policy_tokens_get_zeros_and_do_not_affect_others() -> None:
    mask = torch.tensor([1, 1, 1, 0, 1], dtype=torch.bool)
    rewards, values = torch.tensor([0, 0, 1.0, 9, 2]), torch.tensor([0.5, 0.2, 0.4, 9, 1])
    advantages, returns = gae(rewards, values, mask, (3, 1, 0, 1), torch.tensor([0.0, 7.0, 7.0, 0.0]), 1, 1)
    assert advantages.tolist() == pytest.approx([0.5, 0.8, 0.6, 0, 1])
    assert returns.tolist() == pytest.approx([1, 1, 1, 0, 2])
    no_policy_tokens = torch.zeros(2, dtype=torch.bool)
    assert [x.tolist() for x in gae(rewards[:2], values[:2], no_policy_tokens, (2,), torch.ones(1), 1, 1)] == [
        [0, 0]
    ] * 2


STEP = st.tuples(st.floats(-5, 5, width=32), st.floats(-5, 5, width=32), st.booleans())


@given(
    st.lists(st.tuples(st.lists(STEP, max_size=6), st.floats(-3, 3, width=32)), min_size=1, max_size=5),
    st.floats(0, 1),
    st.floats(0, 1),
)
def test_gae_matches_its_definition(
    samples: list[tuple[list[tuple[float, float, bool]], float]], gamma: float, lam: float
) -> None:
    rewards, values, mask = (
        torch.tensor([step[i] for steps, _ in samples for step in steps], dtype=dtype)
        for i, dtype in enumerate((torch.float32, torch.float32, torch.bool))
    )
    lengths = [len(steps) for steps, _ in samples]
    advantages, returns = gae(rewards, values, mask, lengths, torch.tensor([b for _, b in samples]), gamma, lam)
    expected, sums = [], []
    for steps, bootstrap in samples:
        policy_steps = [(reward, value) for reward, value, policy in steps if policy]
        following = [value for _, value in policy_steps[1:]] + [bootstrap]
        deltas = [r + gamma * after - v for (r, v), after in zip(policy_steps, following, strict=False)]
        sums += [sum(gamma**k * r for k, (r, _) in enumerate(policy_steps[t:])) for t in range(len(policy_steps))]
        expected += [sum((gamma * lam) ** k * d for k, d in enumerate(deltas[t:])) for t in range(len(policy_steps))]
    assert advantages[mask].tolist() == pytest.approx(expected, rel=1e-4, abs=1e-4)
    torch.testing.assert_close(returns[mask], advantages[mask] + values[mask])
    assert returns_to_go(rewards, mask, lengths, gamma)[mask].tolist() == pytest.approx(sums, rel=1e-4, abs=1e-4)
    assert not advantages[~mask].any()
    assert not returns[~mask].any()


def test_returns_to_go_and_spread_by_hand() -> None:
    mask = torch.tensor([1, 0, 1, 1, 1], dtype=torch.bool)
    rewards = torch.tensor([1.0, 100.0, 2.0, 0.0, 8.0])
    assert returns_to_go(rewards, mask, (3, 2), 0.5).tolist() == [2, 0, 2, 4, 8]
    assert spread(torch.tensor([3.0, -1.0]), mask, (3, 2)).tolist() == [3, 0, 3, -1, -1]
