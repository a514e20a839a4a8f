"""A run that signals itself at a place of the loop: `python -m tests.train.struck RECIPE RUN PLACE CALL SIGNAL`."""

from __future__ import annotations

import os
import signal
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

from plaudit.config import RlRecipe, load_recipe
from plaudit.errors import RunError
from plaudit.rl.loop import RlTraining
from plaudit.train.run.run import Run
from tests.train.rl_world import Silent

PLACES: dict[str, tuple[Callable[[RlTraining], Any], str]] = {
    "prompts": (lambda training: training.prompts, "train"),
    "generation": (lambda training: training.engine, "generate"),
    "scoring": (lambda training: training.scorer, "score"),
    "update": (lambda training: training.policy, "gradient"),
    "publication": (lambda training: training.placement, "publish"),
    "evaluation": (lambda training: training, "evaluate"),
    "saving": (lambda training: training.run.checkpoints, "save"),
    "final save": (lambda training: training.trainee, "save_final"),
}


def signal_at(training: RlTraining, place: str, call: int, number: int) -> None:
    """Send the signal to this process when the place is reached for the `call`-th time."""
    owner_of, name = PLACES[place]
    owner = owner_of(training)
    inner = getattr(owner, name)
    calls = 0

    def counted(*arguments: Any, **options: Any) -> Any:
        nonlocal calls
        calls += 1
        if calls == call:
            os.kill(os.getpid(), number)
        return inner(*arguments, **options)

    setattr(owner, name, counted)


def main() -> None:
    recipe, run, place, call, name = sys.argv[1:]
    tree = load_recipe(Path(recipe))
    assert isinstance(tree, RlRecipe)
    with Run(Path(run), tree) as opened:
        training = RlTraining(tree, opened, Silent())
        signal_at(training, place, int(call), signal.Signals[name])
        try:
            training.fit()
        except RunError as error:
            raise SystemExit(f"plaudit: {error}") from error


if __name__ == "__main__":
    main()
