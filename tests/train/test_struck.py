"""SIGKILL and SIGTERM at every place of the loop: no training is lost, and no sample is used twice."""

import os
from pathlib import Path
from typing import Any

import pytest
import torch

from plaudit.config import to_toml
from plaudit.events import read_events
from tests.command import plaudit_here
from tests.forked import ForkedCommand
from tests.train.rl_world import recipe, weights

pytestmark = pytest.mark.slow
# The call that is signalled. Evaluations run first, between steps 2 and 3, and last; checkpoints after steps 2 and 4.
CALLS = {
    "prompts": 3, "generation": 4, "scoring": 4, "update": 3, "publication": 3, "evaluation": 2, "saving": 1,
    "last evaluation": 3, "final save": 1,
}  # fmt: skip
SIGNALS = ("SIGKILL", "SIGTERM")
ALL_CASES = [(place, number) for place in CALLS for number in SIGNALS]
CASES = ALL_CASES if os.environ.get("PLAUDIT_SOAK") else [(p, SIGNALS[i % 2]) for i, p in enumerate(CALLS)]


@pytest.fixture(scope="module")
def straight(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The directory of an uninterrupted run and its recipe."""
    directory = tmp_path_factory.mktemp("straight")
    train = {"steps": 4, "eval_every": 2, "checkpoint": {"every": 2}, "prompts_per_step": 2}
    (directory / "recipe.toml").write_text(to_toml(recipe(train=train)))
    done = plaudit_here("train", str(directory / "recipe.toml"), "--out", str(directory / "run"))
    assert done.returncode == 0, done.stderr
    return directory


def figures(run: Path) -> list[dict[str, Any]]:
    steps = [e["values"] for e in read_events(run) if e["kind"] == "metric" and "progress/samples" in e["values"]]
    return [{n: v for n, v in values.items() if not n.startswith(("time/", "perf/"))} for values in steps]


@pytest.mark.parametrize(("place", "number"), CASES)
def test_a_signal_at_any_place_loses_nothing(tmp_path: Path, straight: Path, place: str, number: str) -> None:
    run, output = tmp_path / "run", tmp_path / "output"
    place_name = "evaluation" if place == "last evaluation" else place
    words = [str(straight / "recipe.toml"), str(run), place_name, str(CALLS[place]), number]
    code = ForkedCommand(["-m", "tests.train.struck", *words], output).wait(200)
    if number == "SIGKILL":
        assert code == -9
        assert not (run / "summary.json").exists()
    else:
        assert code == 1
        assert "state saved: --resume continues" in output.read_text()
    done = plaudit_here("train", str(straight / "recipe.toml"), "--out", str(run), "--resume")  # the suggested fix
    assert done.returncode == 0, done.stderr
    assert figures(run) == figures(straight / "run")
    expected, actual = weights(straight / "run"), weights(run)
    assert all(torch.equal(expected[name], actual[name]) for name in expected)
