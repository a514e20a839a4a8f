import importlib.util
import io
from pathlib import Path

import pytest
from rich.console import Console

from plaudit.errors import ConfigError, RunError
from plaudit.events import EventLog
from plaudit.report.sinks import forward
from plaudit.report.terminal import print_report, sparkline


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


def test_the_table_tells_figures_and_curve(run: Path) -> None:
    out = io.StringIO()
    print_report([run], Console(file=out, width=120))
    text = out.getvalue()
    assert "demo" in text
    assert "answers right, greedy" in text
    assert "0.812" in text
    assert "nan" in text
    assert "loss over 50 steps █" in text


def test_sparkline() -> None:
    assert sparkline([0, 1, 2, 3, 4, 5, 6, 7]) == "▁▂▃▄▅▆▇█"
    assert sparkline([3.0, 3.0]) == "▁▁"
    assert sparkline([]) == ""
    assert len(sparkline(list(range(1000)))) == 24


def test_no_run_there(tmp_path: Path) -> None:
    with pytest.raises(RunError, match=r"it has no events\.jsonl"):
        print_report([tmp_path])
    with pytest.raises(RunError, match=r"it has no events\.jsonl"):
        forward(tmp_path, "tensorboard")


def test_tensorboard_receives_every_step(run: Path) -> None:
    assert forward(run, "tensorboard") == 50
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    accumulator = EventAccumulator(str(run / "tensorboard"))
    accumulator.Reload()
    losses = accumulator.Scalars("loss")
    assert [event.step for event in losses] == list(range(1, 51))
    assert losses[9].value == pytest.approx(0.1)
    assert accumulator.Scalars("heldout/accuracy/sums/greedy")[0].value == pytest.approx(0.8125)


def test_unknown_and_absent_trackers(run: Path) -> None:
    with pytest.raises(ConfigError, match="unknown tracker 'tensorbord'; did you mean 'tensorboard'"):
        forward(run, "tensorbord")


@pytest.mark.parametrize("name", ["wandb", "trackio"])
def test_trackers_receive_every_step_where_they_are_installed(
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
