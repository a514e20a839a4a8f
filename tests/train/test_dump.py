"""Dumped samples are read back bit for bit, and training on them again gives the same numbers."""

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from plaudit.cli import app
from plaudit.config import RlRecipe, to_toml
from plaudit.errors import ConfigError, DataError, RunError
from plaudit.events import EventLog, read_events
from plaudit.records import Batch, ItemError
from plaudit.rl.loop import RlTraining
from plaudit.rl.replay import compare, replay
from plaudit.rl.rollout_only import roll_out
from plaudit.train.rollouts.dump import Dump, DumpEnded
from plaudit.train.run.run import Run
from tests.rotation import mostly_slow
from tests.train.rl_world import Silent, made_up, recipe, weights

STEPS = {"steps": 5, "eval_every": 2, "dump": True, "checkpoint": {"every": 2}}
TOOL: dict[str, Any] = {"environment": {"name": "calculator"}, "sampling": {"max_tokens": 48, "stop": ("=",)}}
RUNS: dict[str, dict[str, Any]] = {
    "grpo": {"train": STEPS},
    "dapo": {"algorithm": {"name": "dapo"}, "train": STEPS},
    "ppo": {
        "algorithm": {"name": "ppo", "kl": {"coef": 0.05, "target": 1.0, "horizon": 50}},
        "train": {**STEPS, "minibatches": 2, "epochs": 2},
    },
    "tool": {**TOOL, "train": STEPS},
}


def train(directory: Path, tree: RlRecipe, dumped: Dump | None = None, **options: Any) -> dict[str, Any]:
    with Run(directory, tree, **options) as run:
        return RlTraining(tree, run, Silent(), dumped).fit()


def plaudit(*arguments: str) -> int:
    """Runs `plaudit train` in this process."""
    return app(["train", *arguments], standalone_mode=False) or 0


@pytest.fixture(scope="module")
def dumped_run(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run that dumped its samples."""
    run = tmp_path_factory.mktemp("runs") / "made"
    train(run, recipe(**RUNS["grpo"]))
    return run


# Files


def test_samples_come_back_bit_for_bit(tmp_path: Path) -> None:
    samples = [
        replace(sample, text="a\nb\u2028c", extra={"right": True, "turns": i}, token_rewards=(0.1,) * len(sample.mask))
        for i, sample in enumerate(made_up())
    ]
    samples[1] = replace(samples[1], reward=None, error=ItemError("timeout", "too slow"), finish_reason="error")
    samples[2] = replace(samples[2], token_rewards=None)
    dump = Dump(tmp_path / "rollouts")
    dump.write(3, Batch(tuple(samples)), 17)
    assert dump.read(3) == (tuple(samples), 17)
    assert [path.name for path in dump.directory.iterdir()] == ["step-000003.jsonl"], "nothing half-written is left"


def test_each_sample_is_one_json_object(dumped_run: Path) -> None:
    lines = (dumped_run / "rollouts" / "step-000001.jsonl").read_bytes().decode().split("\n")[:-1]
    assert len(lines) == 16
    first = json.loads(lines[0])
    assert {"prompt_ids", "token_ids", "text", "logprobs", "versions", "mask", "reward", "extra"} <= first.keys()
    assert first["extra"]["prompt"].endswith("=")


def test_damaged_dump_error_names_the_file_and_line(tmp_path: Path) -> None:
    dump = Dump(tmp_path)
    dump.write(1, Batch(tuple(made_up())), 1)
    text = dump.path(1).read_text()
    dump.path(1).write_text(text + '{"drawn": 1}\n')
    with pytest.raises(DataError, match=r"step-000001.jsonl:7 is not a dumped sample: KeyError"):
        dump.read(1)
    dump.path(1).write_text(text[:-20])
    with pytest.raises(DataError, match=r"step-000001.jsonl:6 is not a dumped sample"):
        dump.read(1)
    with pytest.raises(DumpEnded, match=r"step-000002.jsonl does not exist: the dump has steps 1 to 1"):
        dump.read(2)
    with pytest.raises(RunError, match=r"train with train.dump = true"):
        Dump.find(tmp_path / "nowhere")


def test_dump_of_another_model_is_rejected(tmp_path: Path, dumped_run: Path) -> None:
    samples, drawn = Dump.find(dumped_run).read(1)
    other = Dump(tmp_path / "other")
    other.write(1, Batch((replace(samples[0], prompt_ids=(99,)), *samples[1:])), drawn)
    with pytest.raises(DataError, match=r"the token id 99, .* the dump is of another model"):
        train(tmp_path / "run", recipe(train={"steps": 1}), other)


# Steps after a checkpoint


@pytest.mark.slow
def test_resume_discards_samples_dumped_after_the_checkpoint(tmp_path: Path) -> None:
    """A run killed after dumping step 3 resumes from the checkpoint of step 2 and generates later samples again."""
    tree = recipe(**RUNS["grpo"])
    train(tmp_path / "straight", tree)

    class Killed(Silent):
        def step(self, step: int, metrics: dict[str, float]) -> None:
            if step == 3:
                raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt), Run(tmp_path / "broken", tree) as run:
        RlTraining(tree, run, Killed()).fit()
    dump = Dump.find(tmp_path / "broken")
    assert dump.steps() == [1, 2, 3]
    dump.path(3).write_text("an attempt that never was\n")
    dump.path(4).write_text("nor this one\n")
    with Run(tmp_path / "broken", tree, resume=True) as run:
        training = RlTraining(tree, run, Silent())
        assert dump.steps() == [1, 2]
        training.fit()
    for step in range(1, 6):
        assert dump.read(step) == Dump.find(tmp_path / "straight").read(step)
    assert compare(tmp_path / "straight", tmp_path / "broken").equal


@pytest.mark.slow
def test_a_fresh_run_removes_the_old_dump(tmp_path: Path) -> None:
    tree = recipe(train={**STEPS, "steps": 3})
    train(tmp_path / "run", tree)
    train(tmp_path / "run", recipe(train={"steps": 1}), fresh=True)
    assert not (tmp_path / "run" / "rollouts").exists()


# Training again


@pytest.mark.parametrize("name", mostly_slow(RUNS))
def test_replayed_run_is_equal_bit_for_bit(tmp_path: Path, name: str) -> None:
    run, again = tmp_path / "run", tmp_path / "again"
    train(run, recipe(**RUNS[name]))
    verdict = replay(run, again, Silent())
    assert verdict.equal, verdict.text
    assert verdict.text.startswith("equal to the bit: ")
    assert verdict.text.endswith("of 5 steps and the final weights")
    old, new = weights(run), weights(again)
    assert all(torch.equal(old[key], new[key]) for key in old)
    values = [e["values"] for e in read_events(again) if e["kind"] == "metric" and "policy/loss" in e["values"]]
    assert len(values) == 5
    assert not any("time/generate" in each or "time/reward" in each for each in values), "nothing was sampled"


@pytest.mark.slow
def test_partial_dump_is_replayed_to_its_last_step(tmp_path: Path, dumped_run: Path) -> None:
    for step in (4, 5):
        Dump.find(dumped_run).path(step).rename(tmp_path / f"{step}")
    try:
        verdict = replay(dumped_run, tmp_path / "again", Silent())
    finally:
        for step in (4, 5):
            (tmp_path / f"{step}").rename(Dump.find(dumped_run).directory / f"step-{step:06d}.jsonl")
    assert verdict.equal, verdict.text
    assert verdict.text.endswith("of 3 steps")


def test_the_first_difference_is_named(tmp_path: Path) -> None:
    logs = {"there": [0.5, 0.25, 0.125], "here": [0.5, 0.25, 0.126]}
    for name, losses in logs.items():
        (tmp_path / name).mkdir()
        log = EventLog(tmp_path / name)
        for step, loss in enumerate(losses, 1):
            log.metric({"policy/loss": loss, "time/step": float(len(name))}, step=step)
        log.close()
    verdict = compare(tmp_path / "there", tmp_path / "here")
    assert not verdict.equal
    assert verdict.text == "step 3: policy/loss was 0.125 and is now 0.126"


@pytest.mark.slow
def test_replay_reports_a_changed_learning_rate(tmp_path: Path, dumped_run: Path) -> None:
    tree = recipe(train={**STEPS, "lr": 2e-4, "dump": False})
    train(tmp_path / "run", tree, Dump.find(dumped_run))
    verdict = compare(dumped_run, tmp_path / "run")
    assert not verdict.equal
    assert verdict.text.startswith("step 1: policy/lr was 9.99"), verdict.text


# The command


@pytest.mark.slow
def test_rollout_only_train_only_and_replay_commands(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    file = tmp_path / "small.toml"
    file.write_text(to_toml(recipe(train={**STEPS, "steps": 2, "dump": False})))
    runs = {name: tmp_path / name for name in ("rolled", "learned", "run")}
    assert plaudit(str(file), "--rollout-only", "--out", str(runs["rolled"])) == 0
    output = capsys.readouterr()
    assert "32 samples of 2 steps" in output.out
    assert "reward" in output.err
    assert not (runs["rolled"] / "final").exists()
    versions = {v for step in (1, 2) for s in Dump.find(runs["rolled"]).read(step)[0] for v in s.versions}
    assert versions == {0}, "the policy stayed as it was"

    assert plaudit(str(file), "--train-only", str(runs["rolled"]), "--out", str(runs["learned"])) == 0
    assert (runs["learned"] / "final").exists()
    with pytest.raises(ConfigError, match="set another one with --out"):
        plaudit(str(file), "--train-only", str(runs["learned"] / "rollouts"), "--out", str(runs["learned"]))

    assert plaudit(str(file), "--out", str(runs["run"]), "--set", "train.dump=true") == 0
    assert plaudit("--replay", str(runs["run"])) == 0
    assert "run: equal to the bit" in capsys.readouterr().out
    log = runs["run"] / "events.jsonl"
    log.write_text(log.read_text().replace('"policy/grad_norm":', '"policy/grad_norm":1'))
    assert plaudit("--replay", str(runs["run"])) == 1
    assert "run: step 1: policy/grad_norm was 1" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ([], "the recipe is missing"),
        (["sums-grpo", "--replay", "runs/x"], "remove the recipe and other options"),
        (["sums-sft", "--rollout-only"], "need an RL recipe"),
        (["sums-grpo", "--rollout-only", "--train-only", "runs/x"], "exclude each other"),
        (["--replay", "nowhere"], "no recipe of a run at nowhere"),
    ],
)  # fmt: skip
def test_incompatible_options_are_rejected(arguments: list[str], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        plaudit(*arguments)


def test_rollout_only_does_not_change_the_weights(tmp_path: Path) -> None:
    tree = recipe(train={"steps": 2})
    with Run(tmp_path / "run", tree) as run:
        training = RlTraining(tree, run, Silent())
        before = {name: tensor.clone() for name, tensor in training.loaded.module.state_dict().items()}
        roll_out(training)
        after = training.loaded.module.state_dict()
    assert all(torch.equal(before[name], after[name]) for name in before)
