"""Several weighted sources, prompts selected and ordered by pass rate: the i-th prompt is a function of (seed, i)."""

from __future__ import annotations

import json
from collections import Counter
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest

from plaudit.config import to_toml
from plaudit.config.rl import RlDataTable
from plaudit.errors import ConfigError, DataError
from plaudit.models import load_tokenizer
from plaudit.records import Batch, Prompt, Sample
from plaudit.train.data.mixed import shares
from plaudit.train.data.prompts import Prompts
from plaudit.train.rollouts.dump import Dump
from plaudit.train.rollouts.measured import pass_rates
from plaudit.train.rollouts.sources import open_prompts
from tests.command import plaudit_here
from tests.train.rl_world import recipe


def opened(**data: Any) -> Prompts:
    return open_prompts(recipe(data={"world": None, **data}).data, load_tokenizer("sums-policy"), 1)


@pytest.fixture
def file(tmp_path: Path) -> str:
    path = tmp_path / "prompts.jsonl"
    path.write_text("".join(json.dumps({"prompt": f"{i}+1=", "answer": str(i + 1)}) + "\n" for i in range(20)))
    return str(path)


def mixture(file: str) -> dict[str, Any]:
    return {
        "file": {"path": file, "weight": 1, "eval_items": 2},
        "easy": {"world": "sums", "weight": 2.5, "eval_items": 3},
        "hard": {"world": "sums-hard", "weight": 1.5, "eval_items": 4},
    }


def test_each_source_gets_its_share_of_the_prompts(file: str) -> None:
    prompts = opened(sources=mixture(file), eval_items=200)
    drawn = prompts.train(range(2000))
    assert Counter(prompt.extra["source"] for prompt in drawn) == {"file": 400, "easy": 1000, "hard": 600}
    in_first_step = Counter(prompt.extra["source"] for prompt in drawn[:100])
    assert min(in_first_step.values()) >= 10, "mixed, not one after the other"
    alone = opened(world="sums").train(range(1000))
    assert sorted(p.text for p in drawn if p.extra["source"] == "easy") == sorted(p.text for p in alone)
    of_file = Counter(p.text for p in drawn if p.extra["source"] == "file")
    assert len(of_file) == 18, "two of its rows are held out"
    assert {*of_file.values()} == {22, 23}, "each is drawn as often as the others"


def test_mixture_does_not_depend_on_how_it_is_drawn(file: str) -> None:
    """The prompts are the same in any pieces, also for a process that has drawn nothing before."""
    expected = opened(sources=mixture(file), eval_items=200).train(range(1500))
    cuts = [0, 1, 7, 999, 1001, 1500]
    pieces = [p for a, b in pairwise(cuts) for p in opened(sources=mixture(file), eval_items=200).train(range(a, b))]
    assert pieces == expected


def test_held_out_prompts_come_from_all_sources_and_are_checked_by_their_own(file: str) -> None:
    prompts = opened(sources=mixture(file), eval_items=200)
    heldout = prompts.heldout()
    assert Counter(prompt.extra["source"] for prompt in heldout) == {"file": 2, "easy": 3, "hard": 4}
    assert prompts.right(heldout[0], sample(heldout[0], 0.0)) is None, "of a file nobody knows"
    assert prompts.right(heldout[2], sample(heldout[2], 0.0)) is False


@pytest.mark.parametrize(
    ("weights", "expected"), [([1, 1, 1], [334, 333, 333]), ([3, 1], [750, 250]), ([1e6, 1e-6], [999, 1])]
)
def test_shares_are_whole_numbers(weights: list[float], expected: list[int]) -> None:
    assert shares(weights, 1000) == expected


def sample(prompt: Prompt, reward: float) -> Sample:
    assert prompt.token_ids is not None
    return Sample(prompt.token_ids, (5,), "?", (0.0,), (0.0,), (0,), (1,), "stop", reward=reward)


@pytest.fixture
def measured(tmp_path: Path, file: str) -> Path:
    """Rollouts of all prompts but the first two: of ten responses to n+1=, min(n, 10) are right."""
    items = opened(path=file).items()
    samples = [sample(p, float(k < min(10, number(p)))) for p in items[2:] for k in range(10)]
    Dump(tmp_path / "run" / "rollouts").write(1, Batch(tuple(samples)), 16)
    return tmp_path / "run"


def number(prompt: Prompt) -> int:
    return int(prompt.text.partition("+")[0])


def test_prompts_are_filtered_and_ordered_by_pass_rate(file: str, measured: Path) -> None:
    rates = pass_rates(measured)
    assert sorted(rates.values()) == pytest.approx([n / 10 for n in range(2, 10)] + [1.0] * 8)
    keys: dict[str, Any] = {"path": file, "measured": str(measured), "keep": [0.3, 0.9]}
    first = [number(p) for p in opened(**keys, order="easy-first").train(range(21))]
    assert first[:7] == [9, 8, 7, 6, 5, 4, 3]
    assert sorted(first[7:14]) == sorted(first[14:]) == [3, 4, 5, 6, 7, 8, 9]
    assert first[7:14] != first[14:], "later epochs are shuffled"
    assert [number(p) for p in opened(**keys, order="hard-first").train(range(7))] == [3, 4, 5, 6, 7, 8, 9]
    shuffled = [number(p) for p in opened(**keys).train(range(7))]
    assert sorted(shuffled) == [3, 4, 5, 6, 7, 8, 9]
    assert shuffled != sorted(shuffled)


def test_pass_rates_of_other_prompts_and_empty_ranges_are_rejected(file: str, measured: Path) -> None:
    with pytest.raises(DataError, match=r"has rollouts of 16 prompts, and none is among the 30 of \[data\]"):
        opened(world="sums", limit=30, measured=str(measured))
    with pytest.raises(DataError, match=r"\[0.31, 0.39\] leaves none of 16 .*, whose pass rates are 0.2 to 1"):
        opened(path=file, measured=str(measured), keep=[0.31, 0.39])


@pytest.mark.parametrize(
    ("data", "message"),
    [
        ({"world": "sums", "keep": (0.1, 0.9)}, "set data.measured"),
        ({"world": "sums", "measured": "runs/x"}, "set data.limit"),
        ({"path": "x", "measured": "runs/x", "keep": (0.9, 0.1)}, r"must be \[lowest, highest\]"),
        ({"sources": {"a": {"world": "sums"}}, "world": "sums"}, "got .*'world', 'sources'"),
        ({"sources": {"a": {"world": "sums"}}, "chat": True}, "such as data.sources.a.chat"),
        ({"sources": {"a": {"world": "sums", "weight": 0.0}}}, "greater than 0"),
        ({"sources": {"a": {"sources": {"b": {"world": "sums"}}}}}, "a source cannot have sources"),
    ],
)
def test_invalid_data_tables_are_rejected(data: dict[str, Any], message: str) -> None:
    with pytest.raises((ConfigError, ValueError), match=message):
        RlDataTable.model_validate(data)


@pytest.mark.slow
@pytest.mark.parametrize("placement", ["colocated", "async"])
def test_resumed_run_draws_the_same_prompts(tmp_path: Path, placement: str) -> None:
    """Two sources, one of them ordered by the pass rates of an earlier run; a run in two parts and one in one."""
    world = {"world": "sums", "limit": 12, "eval_items": 4}
    small = {"prompts_per_step": 4, "samples_per_prompt": 2, "dump": True, "checkpoint": {"every": 1}}
    for name, data, place in (
        ("measure", world, "colocated"),
        ("mixed", {"sources": {
            "by-rate": {**world, "measured": str(tmp_path / "measure"), "order": "easy-first"},
            "hard": {"world": "sums-hard", "eval_items": 4},
        }}, placement),
    ):  # fmt: skip
        tree = recipe(
            data={"world": None, "eval_items": 200, **data} if "sources" in data else data,
            train={**small, "steps": 3}, placement={"name": place},
        )  # fmt: skip
        (tmp_path / f"{name}.toml").write_text(to_toml(tree))
    done = plaudit_here(
        "train", str(tmp_path / "measure.toml"), "--rollout-only", "--out", str(tmp_path / "measure")
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    for out, steps in (("whole", ("3",)), ("parts", ("2", "3"))):
        for count in steps:
            words = ["--out", str(tmp_path / out), "--resume", "--set", f"train.steps={count}"]
            done = plaudit_here("train", str(tmp_path / "mixed.toml"), *words)
            assert done.returncode == 0, done.stderr
    drawn = [
        [s.prompt_ids for step in (1, 2, 3) for s in Dump.find(tmp_path / out).read(step)[0]]
        for out in ("whole", "parts")
    ]
    assert drawn[0] == drawn[1]
