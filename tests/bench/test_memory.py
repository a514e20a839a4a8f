"""`plaudit bench memory`: the same recipe in several placements."""

import json
from pathlib import Path

import pytest

from plaudit.bench.memory import PLACEMENTS, chosen, figures
from plaudit.config import to_toml
from plaudit.errors import ConfigError
from plaudit.events import EventLog
from tests.test_cli import plaudit
from tests.train.rl_world import recipe


def test_placements_are_chosen_by_name() -> None:
    assert chosen("") == list(PLACEMENTS)
    assert chosen("swapped, colocated") == ["swapped", "colocated"]
    with pytest.raises(ConfigError, match="unknown placement 'swaped'; did you mean 'swapped'"):
        chosen("swaped")


def test_figures_are_read_from_the_event_log(tmp_path: Path) -> None:
    log = EventLog(tmp_path)
    log.write("plan", steps=2, memory={"update": {"weights": 100, "activations": 800}})
    for step, update in ((1, 900), (2, 500)):
        log.metric({"time/step": 10.0 * step, "time/swap": 1.0 * step, "time/publish": 0.25}, step=step)
        log.write("memory", step=step, phase="generate", bytes={"KV": 300, "weights": 100}, taken={"peak": 420})
        log.write("memory", step=step, phase="update", bytes={"weights": 100, "activations": update}, taken={})
    log.close()
    measured = figures("swapped", tmp_path)
    assert (measured.peak_bytes, measured.peak_phase) == (1000, "update")
    assert (measured.seconds_per_step, measured.swap_seconds_per_step) == (20.0, 2.0)
    assert measured.phases == {"generate": {"KV": 300, "weights": 100}, "update": {"weights": 100, "activations": 900}}
    assert measured.planned == {"update": {"weights": 100, "activations": 800}}
    assert (
        measured.summary_line()
        == "swapped: peak 0 MiB in update; 20 s a step, 2 s of it moves, 0.25 s of it publishing"
    )


@pytest.mark.slow
def test_the_command_measures_each_placement_and_rejects_a_bad_setting(tmp_path: Path) -> None:
    file = tmp_path / "ppo.toml"
    tree = recipe(algorithm={"name": "ppo", "kl": {"coef": 0.05}}, reward={"path": "sums"}, data={"eval_items": 2})
    file.write_text(to_toml(tree))
    command = ["bench", "memory", str(file), "--placements", "colocated,swapped", "--out", str(tmp_path / "out")]
    completed = plaudit(*command, "--steps", "1", "--json")
    assert completed.returncode == 0, completed.stderr
    result = json.loads(completed.stdout)
    assert result == json.loads((tmp_path / "out" / "memory.json").read_text())
    colocated, swapped = result["placements"]
    assert (colocated["placement"], swapped["placement"]) == ("colocated", "swapped")
    assert "reference weights" in colocated["phases"]["generate"]
    assert swapped["phases"]["generate"].get("reference weights", 0) < 10_000
    page = (tmp_path / "out" / "memory.html").read_text()
    assert "colocated" in page
    assert "swapped" in page
    rejected = plaudit(*command, "--set", "train.minibatches=3")
    assert rejected.returncode == 2
    assert "are not a multiple of minibatches = 3" in rejected.stderr


@pytest.mark.slow
def test_a_setting_that_one_placement_rejects_does_not_stop_the_others(tmp_path: Path) -> None:
    file = tmp_path / "grpo.toml"
    file.write_text(to_toml(recipe(data={"eval_items": 2})))
    command = ["bench", "memory", str(file), "--placements", "colocated,async", "--out", str(tmp_path / "out")]
    completed = plaudit(*command, "--steps", "1", "--set", "resources.rollout.processes=1", "--json")
    assert completed.returncode == 1
    colocated, separate = json.loads(completed.stdout)["placements"]
    assert "generates in the learner's process" in colocated["error"]
    assert separate["error"] is None
    assert separate["seconds_per_step"] > 0
