"""Output and exports of `plaudit report`."""

import importlib.util
import io
from pathlib import Path

import pytest
from rich.console import Console

from plaudit.errors import ConfigError, RunError
from plaudit.events import EventLog
from plaudit.report.curve import sparkline
from plaudit.report.history import History, read_history
from plaudit.report.sinks import forward
from plaudit.report.terminal import print_report
from tests.report.made_up import HEALTHY, write_run
from tests.test_cli import plaudit


@pytest.fixture
def run(tmp_path: Path) -> Path:
    directory = tmp_path / "demo"
    directory.mkdir()
    log = EventLog(directory)
    for step in range(1, 51):
        log.metric({"loss": 1 / step}, step=step)
    log.metric({"heldout/accuracy/sums/greedy": 0.8125, "heldout/odd": float("nan")}, step=50)
    log.close()
    return directory


def printed(*runs: History) -> str:
    out = io.StringIO()
    print_report(runs, Console(file=out, width=160))
    return out.getvalue()


def test_the_table_shows_metrics_and_the_curve(run: Path) -> None:
    text = printed(read_history(run))
    assert "demo" in text
    assert "answers right, greedy" in text
    assert "0.812" in text
    assert "nan" in text
    assert "loss over 50 steps █" in text
    assert "demo: Healthy. Loss" in text


def test_an_rl_run_shows_before_and_after_and_the_time_split(tmp_path: Path) -> None:
    good = read_history(write_run(tmp_path / "good"))
    falling = read_history(write_run(tmp_path / "falling", {**HEALTHY, "reward/mean": lambda x: 0.7 - 0.3 * x}))
    text = printed(good, falling)
    assert "answers right" in text
    assert "0.280 → 0.730" in text
    assert "over 120 steps of training" in text
    assert "reward        ▁" in text
    assert "time: generate 4" in text
    assert "good: Healthy. Reward 0.3" in text
    assert "held-out answers right 28 % → 73 %" in text
    assert "falling: Not well: the reward falls" in text
    assert "Lower train.lr" in text


def test_an_empty_event_log_is_reported(tmp_path: Path) -> None:
    EventLog(tmp_path).close()
    assert "Too little was logged" in printed(read_history(tmp_path))


def test_the_command_prints_and_writes_a_page(run: Path, tmp_path: Path) -> None:
    done = plaudit("report", str(run))
    assert done.returncode == 0, done.stderr
    assert "answers right, greedy" in done.stdout
    assert f"page: {run / 'report.html'}" in done.stdout
    assert (run / "report.html").read_text().startswith("<!doctype html>")
    other = tmp_path / "other.html"
    assert plaudit("report", str(run), str(run), "--out", str(other)).returncode == 0
    assert other.is_file()
    done = plaudit("report", str(run), "--out", str(tmp_path / "none" / "page.html"))
    assert done.returncode == 2
    assert "does not exist" in done.stderr


def test_sparkline() -> None:
    assert sparkline([0, 1, 2, 3, 4, 5, 6, 7]) == "▁▂▃▄▅▆▇█"
    assert sparkline([3.0, 3.0]) == "▁▁"
    assert sparkline([0.0, float("nan"), 1.0]) == "▁█"
    assert sparkline([]) == ""
    assert len(sparkline(list(range(1000)))) == 24


def test_a_directory_without_events_is_rejected(tmp_path: Path) -> None:
    with pytest.raises(RunError, match=r"it has no events\.jsonl"):
        read_history(tmp_path)
    with pytest.raises(RunError, match=r"it has no events\.jsonl"):
        forward(tmp_path, "tensorboard")


def test_time_split_lists_phases_and_the_remainder(tmp_path: Path) -> None:
    directory = tmp_path / "timed"
    directory.mkdir()
    log = EventLog(directory)
    for step in (1, 2):
        log.metric({"time/generate": 3.0, "time/update": 1.0, "time/step": 5.0}, step=step)
    log.close()
    assert read_history(directory).time_split() == {"generate": 6.0, "update": 2.0, "other": 2.0}


def test_tensorboard_receives_every_step(run: Path) -> None:
    assert forward(run, "tensorboard") == 50
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    accumulator = EventAccumulator(str(run / "tensorboard"))
    accumulator.Reload()
    losses = accumulator.Scalars("loss")
    assert [event.step for event in losses] == list(range(1, 51))
    assert losses[9].value == pytest.approx(0.1)
    assert accumulator.Scalars("heldout/accuracy/sums/greedy")[0].value == pytest.approx(0.8125)


def test_an_unknown_tracker_is_rejected_with_a_suggestion(run: Path) -> None:
    with pytest.raises(ConfigError, match="unknown tracker 'tensorbord'; did you mean 'tensorboard'"):
        forward(run, "tensorbord")


@pytest.mark.parametrize("name", ["wandb", "trackio"])
def test_installed_trackers_receive_every_step(
    run: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, name: str
) -> None:
    if importlib.util.find_spec(name) is None:
        with pytest.raises(ConfigError, match=f"{name} is not installed: pip install 'plaudit\\[track\\]'"):
            forward(run, name)
        return
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("WANDB_MODE", "offline")
    monkeypatch.setenv("TRACKIO_DIR", str(tmp_path / "trackio"))
    assert forward(run, name) == 50
