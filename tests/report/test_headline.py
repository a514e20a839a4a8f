"""The headline of a report page."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest

from plaudit.report.curve import Curve
from plaudit.report.headline import headline, kind
from plaudit.report.history import History, read_history
from tests.report.made_up import history, write_examples, write_run


def headline_text(run: History) -> str:
    return str(headline(run))


def test_headline_compares_before_and_after_training(tmp_path: Path) -> None:
    run = read_history(write_run(tmp_path / "run", steps=40, algorithm="ppo"))
    result = headline(run)
    assert result is not None
    assert str(result) == (
        "Before training 28 % of its answers to new problems were right; after 40 steps of PPO 73 % are."
    )
    assert result.words[1::2] == ("28 %", "73 %")
    assert result.metric == "heldout/accuracy"
    unfinished = read_history(write_run(tmp_path / "begun", steps=40, total=90))
    assert "after 40 of 90 steps of GRPO 73 % are." in headline_text(unfinished)


@pytest.mark.parametrize(
    ("task", "figure", "heading", "words"),
    [
        ("sft", "accuracy/sums/sampled", "Supervised fine-tuning",
         "After 60 steps of fine-tuning 90 % of its answers to new problems are right."),
        ("reward", "pair_accuracy", "Reward model",
         "After 60 steps of training 90 % of new pairs of responses are in the right order."),
        ("prm", "step_auc", "Process reward model",
         "After 60 steps of training 90 % of new pairs of a right and a wrong step are in the right order."),
        ("reward", "odd", "Reward model", "After 60 steps of training the loss on new examples is "),
    ],
)  # fmt: skip
def test_headlines_of_supervised_runs(tmp_path: Path, task: str, figure: str, heading: str, words: str) -> None:
    run = read_history(write_examples(tmp_path / task, task, 60, figure))
    assert kind(run) == heading
    assert headline_text(run).startswith(words)


def test_headlines_without_heldout_accuracy_use_reward_loss_or_truth() -> None:
    rewards = history(steps=40)
    assert kind(rewards) == "Reinforcement learning"
    assert headline_text(rewards).startswith("At first the reward was 0.3")
    assert "after 40 steps of training it is 0.6" in headline_text(rewards)
    losses = history({"loss": lambda x: 2 - x}, steps=40)
    assert kind(losses) == "Learning from examples"
    assert headline_text(losses).startswith("At first the loss was 1.")
    assert headline(History("empty", {})) is None
    truth = replace(rewards, curves=rewards.curves | {"heldout/truth": Curve((0, 40), (0.21, 0.354))})
    assert headline_text(truth).startswith("Before training the true reward on new prompts was 0.21; after 40 steps")
    assert headline_text(truth).endswith("of training it is 0.354.")


def test_accuracy_near_100_percent_keeps_a_decimal() -> None:
    run = history(steps=5)
    nearly = replace(run, curves=run.curves | {"heldout/accuracy": Curve((0, 5), (0.994, 0.996))})
    assert "99.4 %" in headline_text(nearly)
    assert "99.6 %" in headline_text(nearly)
