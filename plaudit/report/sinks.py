"""Forwards a run's metrics to a tracker. Each sink reads the event log: training does not depend on them."""

from __future__ import annotations

import importlib
import importlib.util
import tomllib
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, Protocol

from plaudit.errors import ConfigError, nearest
from plaudit.report.following import Tail
from plaudit.report.source import run_events


class Sink(Protocol):
    def metrics(self, step: int, values: Mapping[str, float], wall: float) -> None: ...

    def close(self) -> None: ...


class Tensorboard:
    """Event files in the run directory, for `tensorboard --logdir runs`."""

    def __init__(self, run: Path) -> None:
        self.writer = _need("torch.utils.tensorboard", "tensorboard").SummaryWriter(str(run / "tensorboard"))
        self.writer.add_text("recipe", "".join(f"    {line}\n" for line in _recipe(run).splitlines()))

    def metrics(self, step: int, values: Mapping[str, float], wall: float) -> None:
        for name, value in values.items():
            self.writer.add_scalar(name, value, step, walltime=wall)
        self.writer.flush()

    def close(self) -> None:
        self.writer.close()


class Tracker:
    """wandb and trackio have the same interface."""

    def __init__(self, package: str, run: Path) -> None:
        self.module = _need(package, package)
        try:
            self.module.init(project="plaudit", name=run.resolve().name, config=tomllib.loads(_recipe(run)))
        except Exception as error:  # errors of a tracker: no key, no network, no disk space
            reason = " ".join(str(error).split())
            raise ConfigError(f"{package} did not start: {reason or type(error).__name__}") from error

    def metrics(self, step: int, values: Mapping[str, float], wall: float) -> None:
        self.module.log(dict(values), step=step)

    def close(self) -> None:
        self.module.finish()


SINKS: dict[str, Callable[[Path], Sink]] = {
    "tensorboard": Tensorboard,
    "wandb": lambda run: Tracker("wandb", run),
    "trackio": lambda run: Tracker("trackio", run),
}


def forward(run: Path, name: str) -> int:
    """Send the metrics of a run to the tracker of that name; returns the number of steps with metrics."""
    check_tracker(name)
    by_step: dict[int, tuple[dict[str, float], float]] = {}
    for event in run_events(run):
        if event["kind"] == "metric" and "step" in event:
            values, _ = by_step.setdefault(event["step"], ({}, event["wall"]))
            values.update({key: float(value) for key, value in event["values"].items()})
    sink = SINKS[name](run)
    for step in sorted(by_step):
        sink.metrics(step, *by_step[step])
    sink.close()
    return len(by_step)


def follow(run: Path, name: str, over: Callable[[], bool] = lambda: False) -> int:
    """The same during the run, until it is over: every metric as soon as it is logged."""
    check_tracker(name)
    sink, begun, steps = SINKS[name](run), 0.0, set()
    try:
        for event in Tail(run, over=over):
            if event["kind"] == "note" and "wall" in event:
                begun = float(event["wall"])
            elif event["kind"] == "metric" and "step" in event:
                steps.add(event["step"])
                values = {key: float(value) for key, value in event["values"].items()}
                sink.metrics(event["step"], values, begun + float(event["t"]))
    finally:
        sink.close()
    return len(steps)


def check_tracker(name: str) -> None:
    """Check before a run begins that the tracker exists and is installed."""
    if name not in SINKS:
        raise ConfigError(f"unknown tracker {name!r}; {nearest(name, SINKS)}")
    if importlib.util.find_spec(name) is None:
        raise ConfigError(_missing(name))


def _recipe(run: Path) -> str:
    file = run / "recipe.toml"
    return file.read_text(encoding="utf-8") if file.is_file() else ""


def _missing(package: str) -> str:
    return f"{package} is not installed: pip install 'plaudit[track]'"


def _need(module: str, package: str) -> Any:
    try:
        return importlib.import_module(module)
    except ImportError:
        raise ConfigError(_missing(package)) from None
