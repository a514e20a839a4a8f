"""Metrics sent to a tracker during training; a fake trackio records what it receives."""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from plaudit.cli.tracking import tracked
from plaudit.events import EventLog
from plaudit.report.sinks import follow
from tests.command import plaudit_here

ROOT = Path(__file__).parents[2]
STAND_IN = """
import json, os
def _say(**what):
    with open(os.environ["TOLD"], "a") as file:
        file.write(json.dumps(what) + "\\n")
def init(project, name, config): _say(project=project, name=name, config=config)
def log(values, step): _say(step=step, **values)
def finish(): _say(finished=True)
"""


@pytest.fixture
def tracker_log(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    (tmp_path / "packages").mkdir()
    (tmp_path / "packages" / "trackio.py").write_text(STAND_IN)
    monkeypatch.syspath_prepend(str(tmp_path / "packages"))
    monkeypatch.setenv("PYTHONPATH", f"{tmp_path / 'packages'}{os.pathsep}{ROOT}")
    monkeypatch.setenv("TOLD", str(tmp_path / "told.jsonl"))
    yield tmp_path / "told.jsonl"
    sys.modules.pop("trackio", None)


def begun_run(directory: Path) -> EventLog:
    directory.mkdir()
    (directory / "recipe.toml").write_text('task = "rl"\n[train]\nlr = 0.25\n')
    log = EventLog(directory)
    log.metric({"reward/mean": 0.5}, step=1)
    return log


def lines(file: Path) -> list[dict[str, object]]:
    return [json.loads(line) for line in file.read_text().splitlines()]


def test_a_run_that_fails_is_sent_up_to_its_last_metric(
    tmp_path: Path, tracker_log: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    log = begun_run(tmp_path / "mine")

    def fails() -> None:
        with tracked(tmp_path / "mine", "trackio") as begun:
            begun()
            log.metric({"reward/mean": 0.75}, step=2)
            raise KeyError("a fault of the run, which writes no end")

    with pytest.raises(KeyError, match="a fault of the run"):
        fails()
    log.close()
    first, *steps, last = lines(tracker_log)
    assert first == {"project": "plaudit", "name": "mine", "config": {"task": "rl", "train": {"lr": 0.25}}}
    assert steps == [{"step": 1, "reward/mean": 0.5}, {"step": 2, "reward/mean": 0.75}]
    assert last == {"finished": True}
    assert "warning" not in capfd.readouterr().err


def test_a_tracker_that_fails_gives_a_warning_and_does_not_end_the_run(
    tmp_path: Path, tracker_log: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    log = begun_run(tmp_path / "mine")
    (tmp_path / "packages" / "trackio.py").write_text("def init(**_): raise OSError('no network')")
    with tracked(tmp_path / "mine", "trackio") as begun:
        begun()
    log.close()
    stderr = capfd.readouterr().err
    assert "plaudit: trackio did not start: no network" in stderr
    resend = f"`plaudit report {tmp_path / 'mine'} --to trackio` sends"
    assert f"warning: trackio did not receive all metrics; {resend}" in stderr


def test_a_run_without_a_tracker_starts_nothing(tmp_path: Path) -> None:
    with tracked(tmp_path / "none", None) as begun:
        begun()


def test_an_unknown_tracker_is_rejected_before_the_run_starts(tmp_path: Path) -> None:
    done = plaudit_here("train", "sums-sft", "--track", "wandbb", "--out", str(tmp_path / "run"))
    assert done.returncode == 2
    assert "unknown tracker 'wandbb'; did you mean 'wandb'" in done.stderr
    assert not (tmp_path / "run").exists()


def test_a_finished_run_is_followed_to_its_end(tmp_path: Path, tracker_log: Path) -> None:
    log = begun_run(tmp_path / "mine")
    log.note("end")
    log.close()
    assert follow(tmp_path / "mine", "trackio") == 1
    assert lines(tracker_log)[-1] == {"finished": True}


@pytest.mark.slow
def test_a_run_trains_and_is_tracked(tmp_path: Path, tracker_log: Path) -> None:
    small = ["--set", "train.steps=2", "--set", "train.batch=8", "--set", "data.eval_items=8"]
    done = plaudit_here("train", "sums-sft", *small, "--track", "trackio", "--out", str(tmp_path / "run"))
    assert done.returncode == 0, done.stderr
    first, *steps, _ = lines(tracker_log)
    assert first["config"]["train"]["steps"] == 2  # type: ignore[index]
    assert {each["step"] for each in steps if "loss" in each} == {1, 2}
