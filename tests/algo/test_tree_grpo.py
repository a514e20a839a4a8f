"""Branch advantages and expert iteration by hand."""

import torch
from torch import tensor

from plaudit.algo.method import RewardBatch, Scale
from plaudit.algo.methods import METHODS
from plaudit.algo.methods.expert_iteration import best_alone
from plaudit.algo.methods.tree_grpo import branch_relative
from plaudit.algo.rewards import at_last_token

# Two steps from the root, nodes 0 and 1; two ends behind each. Node 0 has 2 tokens, node 1 has 1.
BRANCHES = [[[0, 2], [2, 3]], [[0, 2], [3, 4]], [[1, 1], [4, 3]], [[1, 1], [5, 2]]]
LENGTHS = [3, 4, 3, 2]


def rewarded(rewards: list[float], scale: Scale = "none", **more: object) -> RewardBatch:
    mask = torch.ones(sum(LENGTHS), dtype=torch.bool)
    per_token = at_last_token(tensor(rewards), mask, LENGTHS)
    return RewardBatch(per_token, mask, LENGTHS, [7] * 4, 1.0, 1.0, scale, branches=BRANCHES)._replace(**more)  # type: ignore[arg-type]


def test_a_part_is_worth_what_it_changes() -> None:
    """Rewards 1, 0, 1, 1: the group has 0.75, node 0 has 0.5, node 1 has 1."""
    found = METHODS["tree-grpo"].advantage.compute(rewarded([1.0, 0.0, 1.0, 1.0])).advantages
    assert found.tolist() == [-0.25, -0.25, 0.5, -0.25, -0.25, -0.5, -0.5, 0.25, 0.0, 0.0, 0.25, 0.0]


def test_on_every_path_the_parts_sum_to_grpos_advantage() -> None:
    batch = rewarded([0.3, -1.2, 2.5, 0.9], "group")
    tree = METHODS["tree-grpo"].advantage.compute(batch).advantages
    grpo = METHODS["grpo"].advantage.compute(batch).advantages
    begin = 0
    for length, parts in zip(LENGTHS, BRANCHES, strict=True):
        steps = [tree[begin + end - 1] for _, end in parts]
        assert torch.allclose(sum(steps), grpo[begin], atol=1e-6)
        begin += length


def test_a_tree_of_one_level_is_a_group_to_the_bit() -> None:
    flat = [[[i, length]] for i, length in enumerate(LENGTHS)]
    for scale in ("group", "batch", "none"):
        batch = rewarded([0.1, 0.7, -0.2, 0.4], scale, branches=flat)
        one, other = (METHODS[name].advantage.compute(batch).advantages for name in ("tree-grpo", "grpo"))
        assert torch.equal(one, other)


def test_equal_rewards_teach_nothing_and_a_tools_tokens_have_no_part() -> None:
    assert not METHODS["tree-grpo"].advantage.compute(rewarded([0.1] * 4, "group")).advantages.any()
    mask = torch.ones(sum(LENGTHS), dtype=torch.bool)
    mask[0] = False
    found = METHODS["tree-grpo"].advantage.compute(rewarded([1.0, 0.0, 1.0, 1.0], mask=mask)).advantages
    assert found[:3].tolist() == [0.0, -0.25, 0.5]


def test_a_response_without_a_reward_leaves_the_others_their_mean() -> None:
    """Of node 0 the response with reward 0 is missing: its value is 1, the group's too."""
    relative = tensor([1.0, 1.0, 1.0]) - 1
    kept = [BRANCHES[0], BRANCHES[2], BRANCHES[3]]
    assert branch_relative(relative, [7] * 3, kept).tolist() == [0.0] * 8


def test_expert_iteration_learns_the_best_of_each_group() -> None:
    rewards = tensor([0.0, 1.0, 1.0, 0.0, 0.5, 0.5])
    assert best_alone(rewards, [0, 0, 0, 0, 1, 1]).tolist() == [0, 4, 0, 0, 0, 0]
    found = METHODS["expert-iteration"].advantage.compute(rewarded([0.0, 1.0, 0.0, 0.0])).advantages
    assert found.tolist() == [0, 0, 0, 4, 4, 4, 4, 0, 0, 0, 0, 0]
