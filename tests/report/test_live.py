"""The live view, and following a run of another process."""

from __future__ import annotations

import io
import random
import time
from pathlib import Path

import pytest
from rich.console import Console

from plaudit.errors import RunError
from plaudit.events import RESUME, EventLog
from plaudit.report.following import Following
from plaudit.report.live import LiveView
from tests.command import plaudit_here
from tests.forked import ForkedCommand, run_forked
from tests.report.made_up import HEALTHY, values_at, write_run

SIZES = {"width": 120, "height": 40}


class Clock:
    now = 0.0

    def __call__(self) -> float:
        return self.now


def plain() -> tuple[Console, io.StringIO]:
    out = io.StringIO()
    return Console(file=out, **SIZES), out


def terminal() -> tuple[Console, io.StringIO]:
    out = io.StringIO()
    return Console(file=out, force_terminal=True, color_system=None, **SIZES), out


def drawn(view: LiveView) -> str:
    console, out = plain()
    console.print(view.panel())
    return out.getvalue()


def test_without_a_terminal_it_prints_at_most_every_five_seconds_and_every_evaluation() -> None:
    console, out = plain()
    clock = Clock()
    view = LiveView("demo", console, clock)
    with view.bar(0, 100):
        for step in range(1, 51):
            clock.now += 1.0
            view.step(step, values_at(HEALTHY, step / 100, random.Random(step)))
            if step % 25 == 0:
                view.figures(step, {"accuracy": 0.5})
        view.warn("[odd] something")
    lines = out.getvalue().splitlines()
    steps = [line for line in lines if "reward" in line]
    assert len(steps) == 10
    assert steps[0].startswith("demo step 1/100  reward 0.3")
    for words in ("right", "KL", "entropy", "length", "cut off", "mismatch", "samples/s"):
        assert words in steps[-1]
    assert steps[-1].endswith("0:00:54 left")
    assert [line for line in lines if "accuracy" in line] == [
        "demo step 25: accuracy 0.500", "demo step 50: accuracy 0.500"
    ]  # fmt: skip
    assert lines[-1] == "warning: [odd] something"


def test_the_panel_shows_curves_phases_and_the_remaining_time() -> None:
    console, out = terminal()
    clock = Clock()
    view = LiveView("demo [b]", console, clock)
    with view.bar(0, 40):
        for step in range(1, 21):
            clock.now += 2.0
            view.step(step, {"reward/mean": step / 20, "accuracy": 0.25, "time/generate": 3.0, "time/update": 1.0,
                             "time/step": 4.0, "kl/reference": float("nan")})  # fmt: skip
        view.figures(20, {"accuracy": 0.5})
    panel = drawn(view)
    for words in ("demo [b]", "▁", "█", "25 %", "generate 75 %", "update 25 %", "step 20 of 40", "0:00:40 left", "nan",
                  "accuracy 0.500"):  # fmt: skip
        assert words in panel, words
    assert "generate 75 %" in out.getvalue()


def test_an_empty_view_can_be_drawn() -> None:
    console, _ = plain()
    view = LiveView("demo", console)
    assert "step 0" in drawn(view)
    view.step(1, {})
    assert view.line() == "demo step 1"


def test_a_finished_run_is_shown_to_its_end(tmp_path: Path) -> None:
    run = tmp_path / "done"
    code = f"from pathlib import Path; from tests.report.made_up import write_run; write_run(Path({str(run)!r}))"
    assert run_forked("-c", code).returncode == 0
    console, out = plain()
    Following(run, console, poll_seconds=0.01).show()
    lines = out.getvalue().splitlines()
    assert lines[-1].startswith("done step 120/120  reward 0.")
    assert "done step 0: accuracy 0.280  reward 0.300" in lines


def test_a_run_in_progress_is_followed_until_it_ends(tmp_path: Path) -> None:
    code = (
        "import sys, time; from pathlib import Path; from plaudit.events import EventLog\n"
        "log = EventLog(Path(sys.argv[1]))\n"
        "for step in range(1, 21): log.metric({'reward/mean': step / 20}, step=step); time.sleep(0.02)\n"
    )
    writer = ForkedCommand(["-c", code, str(tmp_path)], tmp_path / "output")
    try:
        while not (tmp_path / "events.jsonl").is_file():
            time.sleep(0.01)
        console, out = plain()
        following = Following(tmp_path, console, poll_seconds=0.02)
        following.show()
    finally:
        writer.kill()
        writer.wait()
    assert out.getvalue().splitlines()[-1].endswith("step 20  reward 1")


def test_steps_after_the_resumed_checkpoint_are_discarded(tmp_path: Path) -> None:
    log = EventLog(tmp_path)
    for step in range(1, 11):
        log.metric({"reward/mean": float(step)}, step=step)
    log.close()
    with log.path.open("ab") as file:
        file.write(b'{"t":1,"kind":"metric","st')
    following = Following(tmp_path, plain()[0], poll_seconds=0.01)
    events = iter(following.tail)
    for _ in range(11):
        following._take(next(events))
    log = EventLog(tmp_path)
    log.note(RESUME, step=4)
    log.metric({"reward/mean": 0.5}, step=5)
    log.note("end")
    log.close()
    for event in events:
        following._take(event)
    assert following.view.line().endswith("step 5  reward 0.5")
    assert [step for step, _ in following.view._series["reward/mean"]] == [1, 2, 3, 4, 5]


def test_following_a_directory_without_events_fails(tmp_path: Path) -> None:
    with pytest.raises(RunError, match=r"it has no events\.jsonl"):
        Following(tmp_path)


def test_the_report_command_follows_a_run(tmp_path: Path) -> None:
    write_run(tmp_path / "run", steps=20)
    with (tmp_path / "run" / "events.jsonl").open("a") as file:
        file.write('{"t":9,"kind":"note","text":"end"}\n')
    command = ["report", "--follow", str(tmp_path / "run")]
    done = run_forked(*command)
    assert done.returncode == 0, done.stderr
    assert "run step 20/20  reward 0.7" in done.stderr
    rejected = plaudit_here(*command, "--out", "x.html")
    assert rejected.returncode == 2
    assert "--follow watches one run" in rejected.stderr
