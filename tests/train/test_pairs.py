"""Preference pairs from rollouts."""

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from plaudit.cli import app
from plaudit.config import RewardRecipe, parse_recipe
from plaudit.errors import DataError
from plaudit.records import Batch, ItemError, Sample
from plaudit.rl.loop import RlTraining
from plaudit.rl.rollout_only import roll_out
from plaudit.train.rollouts.dump import Dump
from plaudit.train.rollouts.pairs import pairs_of, write_pairs
from plaudit.train.run.progress import Progress
from plaudit.train.run.run import Run
from plaudit.train.supervised.supervised import SupervisedTraining
from tests.train.rl_world import Silent, recipe


def scored_sample(text: str, reward: float | None, **extra: Any) -> Sample:
    error = ItemError("timeout", "too slow") if reward is None else None
    return Sample((1,), (2,), text, (-1.0,), (-1.0,), (0,), (1,), "stop", reward=reward, error=error,
                  extra={"prompt": "7+8=", "truth": "15", "right": None, **extra})  # fmt: skip


def test_best_responses_are_paired_with_the_worst_while_rewards_differ() -> None:
    group = [
        scored_sample("a", 0.0),
        scored_sample("b", 1.0),
        scored_sample("c", 0.5),
        scored_sample("d", 0.75),
        scored_sample("e", None),
        scored_sample("f", 0.5),
    ]
    assert [(row["chosen"], row["rejected"], row["margin"]) for row in pairs_of(group, 4)] == [
        ("b", "a", 1.0), ("d", "f", 0.25),
    ]  # fmt: skip
    assert [row["chosen"] for row in pairs_of(group, 1)] == ["b"]
    assert pairs_of([scored_sample("a", 1.0), scored_sample("b", 1.0)], 4) == []


def test_each_response_is_in_one_pair_and_empty_ones_in_none() -> None:
    group = [
        scored_sample("a", 0.0),
        scored_sample("a", 0.0),
        scored_sample("b", 1.0),
        scored_sample("b", 1.0),
        scored_sample("", 0.0),
    ]
    assert [(row["chosen"], row["rejected"]) for row in pairs_of(group, 4)] == [("b", "a")]


def test_conversation_messages_are_kept() -> None:
    messages = ({"role": "user", "content": "7+8="},)
    group = [scored_sample("a", 0.0, messages=messages), scored_sample("b", 1.0, messages=messages)]
    (row,) = pairs_of(group, 4)
    assert row == {"messages": messages, "chosen": "b", "rejected": "a", "margin": 1.0}


def test_pairs_from_rollouts_train_a_reward_model(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    tree = recipe(train={"steps": 2, "prompts_per_step": 16, "samples_per_prompt": 4})
    with Run(tmp_path / "made", tree) as run:
        roll_out(RlTraining(tree, run, Silent()))
    out = tmp_path / "pairs.jsonl"
    app(["pairs", str(tmp_path / "made"), str(out), "--most", "2"], standalone_mode=False)
    rows = [json.loads(line) for line in out.read_text().splitlines()]
    assert f"{len(rows)} pairs of 32 prompts" in capsys.readouterr().out
    by_prompt: dict[str, dict[str, float]] = {}
    for step in (1, 2):
        for sample in Dump.find(tmp_path / "made").read(step)[0]:
            assert sample.reward is not None
            by_prompt.setdefault(sample.extra["prompt"], {})[sample.text] = sample.reward
    for row in rows:
        rewards = by_prompt[row["prompt"]]
        assert (rewards[row["chosen"]], rewards[row["rejected"]]) == (1.0, 0.0)
    judge = parse_recipe(
        {"task": "reward", "model": {"path": "sums"}, "data": {"path": str(out)},
         "train": {"steps": 1, "batch": 4, "lr": 1e-4}}, "test",
    )  # fmt: skip
    assert isinstance(judge, RewardRecipe)
    with Run(tmp_path / "judge", judge) as run:
        assert SupervisedTraining(judge, run, Progress("judge")).fit()["pair_accuracy"] > 0.5


def test_dump_without_pairs_is_rejected(tmp_path: Path) -> None:
    dump = Dump(tmp_path / "rollouts")
    dump.write(1, Batch((scored_sample("a", 1.0), scored_sample("b", 1.0))), 1)
    with pytest.raises(DataError, match="0 pairs of 1 prompts; 1 prompts have responses of equal reward only; use"):
        write_pairs(tmp_path, tmp_path / "pairs.jsonl", 4)
    assert not (tmp_path / "pairs.jsonl").exists()
    dump.write(
        1, Batch(tuple(replace(scored_sample(text, float(text == "a")), extra={"prompt": "7+8="}) for text in "ab")), 1
    )
    with pytest.raises(DataError, match="the dump has no prompts with its samples: an older Plaudit wrote it"):
        write_pairs(tmp_path, tmp_path / "pairs.jsonl", 4)
