"""`plaudit.train(...)`: the same run as `plaudit train`, from Python."""

from __future__ import annotations

import subprocess
import sys
import threading
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest

import plaudit
from plaudit import train
from plaudit.errors import ConfigError, RunError
from tests.command import plaudit_here
from tests.train.rl_world import weights

SMALL = {
    "train.prompts_per_step": 4, "train.samples_per_prompt": 4, "train.eval_every": 2, "data.eval_items": 8,
    "train.checkpoint.every": 1, "sampling.max_tokens": 32,
}  # fmt: skip


def correct(prompt: str, response: str, truth: str) -> float:
    return float(response.endswith(f"#{truth}"))


def grpo(out: Path, **keys: Any) -> plaudit.TrainedRun:
    keys = {"steps": 2, "reward": correct, "quiet": True, "options": SMALL, **keys}
    return train("sums-grpo", out=out, **keys)


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> plaudit.TrainedRun:
    return grpo(tmp_path_factory.mktemp("api") / "function")


@pytest.mark.slow
def test_function_reward_gives_the_same_run_as_the_commands_rule(run: plaudit.TrainedRun, tmp_path: Path) -> None:
    sets = [argument for key, value in SMALL.items() for argument in ("--set", f"{key}={value}")]
    result = plaudit_here("train", "sums-grpo", "--out", str(tmp_path), *sets, "--set", "train.steps=2")
    assert result.returncode == 0, result.stderr
    by_command = plaudit.TrainedRun(tmp_path, {})
    for name in ("reward/mean", "policy/loss", "heldout/accuracy"):
        assert run.curve(name) == by_command.curve(name)
    ours, theirs = weights(run.directory), weights(tmp_path)
    assert all((ours[name] == theirs[name]).all() for name in theirs)


def test_run_has_summary_curves_recipe_and_engine(run: plaudit.TrainedRun) -> None:
    assert run.summary["steps"] == 2
    assert [step for step, _ in run.curve("reward/mean")] == [1, 2]
    assert "steps = 2" in run.recipe
    assert 'function = "tests.test_api:correct"' in run.recipe
    assert run.engine().generate("8+7+6=")[0].text
    with pytest.raises(ConfigError, match=r"no metric 'reward/men'; did you mean 'reward/mean'\?"):
        run.curve("reward/men")


def test_interrupted_run_resumes_to_the_same_weights(run: plaudit.TrainedRun, tmp_path: Path) -> None:
    class Enough(Exception):
        pass

    def stop(step: int, metrics: Mapping[str, float]) -> None:
        assert "reward/mean" in metrics
        raise Enough

    with pytest.raises(Enough):
        grpo(tmp_path, on_step=stop)
    again = grpo(tmp_path, resume=True)
    assert again.curve("reward/mean") == run.curve("reward/mean")
    straight, resumed = weights(run.directory), weights(tmp_path)
    assert all((straight[name] == resumed[name]).all() for name in straight)


def test_trl_style_reward_gets_all_responses_of_a_prompt(tmp_path: Path) -> None:
    calls: list[int] = []

    def lengths(prompts: list[str], completions: list[str], **columns: Any) -> list[float]:
        assert len({*prompts}) == 1
        calls.append(len(completions))
        return [-float(len(each)) for each in completions]

    run = grpo(tmp_path, steps=1, reward=lengths)
    assert calls.count(4) == 4, "of four prompts, and of the held-out ones singly"
    assert run.curve("reward/mean")[0][1] < 0


@pytest.mark.slow
def test_failing_reward_function_raises(tmp_path: Path) -> None:
    def fails(prompt: str, response: str, truth: str) -> float:
        raise KeyError("price")

    with pytest.raises(RunError, match=r"16 of 16 responses have no reward .*rule_failed: KeyError: 'price'"):
        grpo(tmp_path, reward=fails)


def test_rows_are_saved_in_the_run_directory(tmp_path: Path) -> None:
    rows = [{"prompt": f"{n}+1=", "response": f"{n}+1={n + 1};#{n + 1}"} for n in range(1, 9)] * 3
    keys: dict[str, Any] = {"steps": 2, "quiet": True, "model": "sums-policy", "options": {"train.batch": 4}}
    first = train("sums-sft", out=tmp_path, data=iter(rows), **keys)
    (saved,) = tmp_path.glob("data-*.jsonl")
    assert len(saved.read_text().splitlines()) == 24
    assert len(first.curve("loss")) == 2
    with pytest.raises(RunError, match=r"already contains a run"):
        train("sums-sft", out=tmp_path, data=rows, **keys)
    with pytest.raises(ConfigError, match=r"data has no rows"):
        train("sums-sft", out=tmp_path, data=[], **keys)
    with pytest.raises(ConfigError, match=r"data: row 0 is not a mapping of JSON values"):
        train("sums-sft", out=tmp_path, data=[{"prompt": object()}], **keys)


@pytest.mark.slow
def test_a_run_in_a_thread(tmp_path: Path) -> None:
    runs: list[plaudit.TrainedRun] = []
    thread = threading.Thread(target=lambda: runs.append(grpo(tmp_path, steps=1)))
    thread.start()
    thread.join(120)
    assert [run.summary["steps"] for run in runs] == [1]


@pytest.mark.parametrize(
    ("keys", "message"),
    [
        ({"options": {"train.lrr": 1.0}}, r"unknown key 'train.lrr'; did you mean 'lr'\?"),
        ({"options": {"train..lr": 1.0}}, r"the option 'train..lr' is not of the form table.key=value"),
        ({"options": {"resources.data_parallel": 2}}, r"train\(\) runs in one process, but resources set 2 ranks"),
        ({"reward": 3.0}, r"reward is a float; expected a function, a URL, a model's path or a table"),
        ({"reward": lambda answer: 1.0}, r"the reward <lambda>\(answer\) cannot be called"),
    ],
)
def test_invalid_arguments_are_rejected_before_the_run(tmp_path: Path, keys: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        grpo(tmp_path, **keys)
    assert not (tmp_path / "events.jsonl").exists()


def test_reward_needs_an_rl_recipe(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"reward needs an RL recipe, but the recipe has task = 'sft'"):
        train("sums-sft", out=tmp_path, reward=correct)


def test_train_is_callable_after_submodule_imports() -> None:
    code = "import plaudit.train.rollouts.pairs, plaudit; from plaudit import train; assert callable(train)"
    assert subprocess.run([sys.executable, "-c", code], timeout=120).returncode == 0
