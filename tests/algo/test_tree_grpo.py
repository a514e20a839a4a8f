"""Branch advantages and expert iteration by hand."""

import torch
from torch import tensor

from plaudit.algo.method import RewardBatch, Scale
from plaudit.algo.methods import METHODS
from plaudit.algo.methods.expert_iteration import best_alone
from plaudit.algo.methods.tree_grpo import branch_relative
from plaudit.algo.rewards import at_last_token

# Two steps from the root, nodes 0 and 1, each followed by two leaves. Node 0 has 2 tokens, node 1 has 1.
BRANCHES = [[[0, 2], [2, 3]], [[0, 2], [3, 4]], [[1, 1], [4, 3]], [[1, 1], [5, 2]]]
LENGTHS = [3, 4, 3, 2]


def reward_batch(rewards: list[float], scale: Scale = "none", **more: object) -> RewardBatch:
    mask = torch.ones(sum(LENGTHS), dtype=torch.bool)
    per_token = at_last_token(tensor(rewards), mask, LENGTHS)
    return RewardBatch(per_token, mask, LENGTHS, [7] * 4, 1.0, 1.0, scale, branches=BRANCHES)._replace(**more)  # type: ignore[arg-type]


def test_step_advantage_is_the_change_in_mean_reward() -> None:
    """Rewards 1, 0, 1, 1: the group mean is 0.75, the mean of node 0 is 0.5, that of node 1 is 1."""
    advantages = METHODS["tree-grpo"].advantage.compute(reward_batch([1.0, 0.0, 1.0, 1.0])).advantages
    assert advantages.tolist() == [-0.25, -0.25, 0.5, -0.25, -0.25, -0.5, -0.5, 0.25, 0.0, 0.0, 0.25, 0.0]


def test_step_advantages_of_a_path_sum_to_the_grpo_advantage() -> None:
    batch = reward_batch([0.3, -1.2, 2.5, 0.9], "group")
    tree = METHODS["tree-grpo"].advantage.compute(batch).advantages
    grpo = METHODS["grpo"].advantage.compute(batch).advantages
    begin = 0
    for length, branches in zip(LENGTHS, BRANCHES, strict=True):
        steps = [tree[begin + end - 1] for _, end in branches]
        assert torch.allclose(sum(steps), grpo[begin], atol=1e-6)
        begin += length


def test_one_level_tree_is_bit_identical_to_grpo() -> None:
    flat = [[[i, length]] for i, length in enumerate(LENGTHS)]
    for scale in ("group", "batch", "none"):
        batch = reward_batch([0.1, 0.7, -0.2, 0.4], scale, branches=flat)
        tree, grpo = (METHODS[name].advantage.compute(batch).advantages for name in ("tree-grpo", "grpo"))
        assert torch.equal(tree, grpo)


def test_equal_rewards_and_tool_tokens_give_zero_advantages() -> None:
    assert not METHODS["tree-grpo"].advantage.compute(reward_batch([0.1] * 4, "group")).advantages.any()
    mask = torch.ones(sum(LENGTHS), dtype=torch.bool)
    mask[0] = False
    advantages = METHODS["tree-grpo"].advantage.compute(reward_batch([1.0, 0.0, 1.0, 1.0], mask=mask)).advantages
    assert advantages[:3].tolist() == [0.0, -0.25, 0.5]


def test_responses_without_a_reward_are_left_out_of_the_mean() -> None:
    """The response of node 0 with reward 0 is missing: the mean of node 0 is 1, and so is the group's."""
    relative = tensor([1.0, 1.0, 1.0]) - 1
    kept = [BRANCHES[0], BRANCHES[2], BRANCHES[3]]
    assert branch_relative(relative, [7] * 3, kept).tolist() == [0.0] * 8


def test_expert_iteration_trains_on_the_best_of_each_group() -> None:
    rewards = tensor([0.0, 1.0, 1.0, 0.0, 0.5, 0.5])
    assert best_alone(rewards, [0, 0, 0, 0, 1, 1]).tolist() == [0, 4, 0, 0, 0, 0]
    advantages = METHODS["expert-iteration"].advantage.compute(reward_batch([0.0, 1.0, 0.0, 0.0])).advantages
    assert advantages.tolist() == [0, 0, 0, 4, 4, 4, 4, 0, 0, 0, 0, 0]
