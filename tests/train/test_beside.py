"""A critic that learns in a thread of its own beside the policy: the same bits as one after the other."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from plaudit.core.model import operations
from plaudit.core.model.fusion import Fusion
from plaudit.core.model.packing import trunk
from plaudit.events import read_events
from plaudit.rl.loop import RlTraining
from plaudit.train.optim.lanes import lanes
from plaudit.train.policy.critic import LocalCritic
from plaudit.train.run.run import Run
from tests.train.rl_world import Silent, recipe, tiny, weights

PPO = {"name": "ppo", "kl": {"coef": 0.05}}


def trained(
    directory: Path, threads: int, **train: Any
) -> tuple[list[dict[str, float]], dict[str, torch.Tensor], bool]:
    """Metrics that are not times, the policy, and whether the critic had a thread."""
    tree = recipe(
        algorithm=PPO, critic={"warmup": 1}, train={"threads": threads, "minibatches": 2, "steps": 3, **train}
    )
    before = torch.get_num_threads()
    try:
        with Run(directory, tree) as run:
            training = RlTraining(tree, run, Silent())
            critic = training.trainee.critic
            assert isinstance(critic, LocalCritic)
            training.fit()
            assert torch.get_num_threads() == 1
    finally:
        torch.set_num_threads(before)
    found = [e["values"] for e in read_events(directory) if e["kind"] == "metric" and "value/loss" in e["values"]]
    kept = [{k: v for k, v in values.items() if not k.startswith(("time/", "perf/"))} for values in found]
    return kept, weights(directory), critic.beside


def test_it_changes_no_bit(tmp_path: Path) -> None:
    metrics, policy, beside = trained(tmp_path / "one", threads=1)
    metrics_in_two, policy_in_two, beside_in_two = trained(tmp_path / "two", threads=2)
    assert (beside, beside_in_two) == (False, True)
    assert len(metrics) == 3
    assert metrics == metrics_in_two
    assert policy.keys() == policy_in_two.keys()
    assert all(torch.equal(policy[name], policy_in_two[name]) for name in policy)


def test_two_models_of_a_family_at_once_leave_its_functions_as_they_were() -> None:
    first, second = (Fusion(trunk(tiny(seed=seed)), operations) for seed in (1, 2))
    home, name, _ = first.functions[0]
    original = getattr(home, name)
    with first.applied(steady=False):
        replaced = getattr(home, name)
        passing = second.applied(steady=False)
        passing.__enter__()
        assert replaced is not original
    assert getattr(home, name) is replaced  # the second one's pass is still under way
    passing.__exit__(None, None, None)
    assert getattr(home, name) is original


@pytest.mark.parametrize(("width", "expected"), [(32, 2), (192, 1)])
def test_only_narrow_models_on_a_cpu_in_float32_are_split(width: int, expected: int) -> None:
    module = tiny()
    module.config.hidden_size = width  # type: ignore[union-attr]
    assert lanes(2, module) == expected
    assert lanes(2, module, tiny()) == expected
    assert lanes(None, module) == 1
    assert lanes(2, module.to(torch.bfloat16)) == 1
