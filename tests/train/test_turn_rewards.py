"""Rewards of an environment's turns count wherever a reward is read: metrics, evaluation, report, pairs, pass rates."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

import pytest

from plaudit.records import Batch, Item, Prompt, Sample, Score
from plaudit.report.diagnosis import diagnose
from plaudit.report.history import read_history
from plaudit.rl.loop import RlTraining
from plaudit.train.rollouts.batch_metrics import batch_metrics, filtered
from plaudit.train.rollouts.dump import Dump
from plaudit.train.rollouts.measured import pass_rates
from plaudit.train.rollouts.pairs import pairs_of
from plaudit.train.rollouts.scorer import LARGEST, Scorer
from plaudit.train.run.run import Run
from tests.train.rl_world import Silent, made_up, recipe

ENVIRONMENT = """
from plaudit.records import Turn

class Digits:
    def __init__(self, **options):
        pass

    def reset(self, prompt):
        pass

    def step(self, response):
        return Turn(reward=sum(map(str.isdigit, response)) / 10, done=True)
"""


def episode(text: str, turns: tuple[float, ...], end: str = "done", reward: float | None = 0.0) -> Sample:
    count = len(turns)
    return Sample(
        (1,), (2,) * count, text, (-1.0,) * count, (-1.0,) * count, (0,) * count, (1,) * count,
        "length" if end == "turns" else "stop", reward=reward, token_rewards=turns,
        extra={"prompt": "q", "truth": None, "right": None, "turns": count, "end": end},
    )  # fmt: skip


GROUP = [episode("a", (0.25, 0.5), reward=1.0), episode("b", (0.0, 0.25)), episode("c", (0.0, 0.0), "turns")]


def test_metrics_count_turns_and_show_both_parts() -> None:
    metrics = batch_metrics(GROUP)
    assert metrics["reward/mean"] == pytest.approx(2.0 / 3)
    assert metrics["reward/max"] == 1.75
    assert metrics["turns/reward"] == pytest.approx(1.0 / 3)
    assert metrics["reward/rule"] == pytest.approx(1.0 / 3)
    assert filtered([GROUP], [])["reward/mean"] == pytest.approx(2.0 / 3)
    assert "reward/rule" not in batch_metrics(made_up()), "without an environment there is one reward"


def test_an_episode_that_used_its_turns_is_not_cut_at_the_token_limit() -> None:
    metrics = batch_metrics(GROUP)
    assert metrics["length/truncated"] == 0
    assert metrics["turns/out_of_turns"] == pytest.approx(1 / 3)


def test_pairs_and_pass_rates_count_turns(tmp_path: Path) -> None:
    (pair,) = pairs_of(GROUP, 4)
    assert (pair["chosen"], pair["rejected"], pair["margin"]) == ("a", "c", 1.75)
    Dump(tmp_path).write(1, Batch(tuple(GROUP)), 1)
    assert pass_rates(tmp_path) == {(1,): pytest.approx(2.0 / 3)}


def test_run_with_rewards_of_turns_alone_is_evaluated_and_reported_by_them(tmp_path: Path) -> None:
    (tmp_path / "digits.py").write_text(ENVIRONMENT)
    tree = recipe(
        environment={"name": f"{tmp_path / 'digits.py'}:Digits"}, reward={"rule": "exact", "right": 0.0},
        train={"steps": 2, "eval_every": 1},
    )  # fmt: skip
    viewer = Silent()
    with Run(tmp_path / "run", tree) as run:
        summary = RlTraining(tree, run, viewer).fit()
    assert summary["reward_before"] > 0
    for seen in viewer.seen:
        assert seen["reward/mean"] == pytest.approx(seen["turns/reward"])
    history = read_history(tmp_path / "run")
    held_out = history.held_out()
    assert held_out["reward"].values == pytest.approx(held_out["turns/reward"].values)
    assert set(held_out["reward/rule"].values) == {0.0}
    assert "nothing learned" not in {finding.rule for finding in diagnose(history)}


class Constant:
    def __init__(self, value: float) -> None:
        self.value = value

    def score(self, items: Sequence[Item]) -> list[Score]:
        return [Score(self.value) for _ in items]

    def close(self) -> None: ...


@pytest.mark.parametrize(("value", "accepted"), [(1e300, False), (-1e300, False), (2 * LARGEST, False), (1e6, True)])
def test_a_reward_beyond_float32_is_an_error_that_names_it(value: float, accepted: bool) -> None:
    scorer = Scorer(recipe().reward, Constant(value))
    sample = replace(made_up()[0], reward=None, finish_reason="stop")
    (scored,) = scorer.request_scores([Prompt("q", (1,))], [sample])
    if accepted:
        assert scored.reward == value
    else:
        assert scored.reward is None
        assert scored.error is not None
        assert f"the reward is {value:g}" in scored.error.message
        assert "scale rewards to at most 1e+18" in scored.error.message
