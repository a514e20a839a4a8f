"""Forward a run's metrics to a tracker. Each sink is a thin reader of the event log: training knows nothing of them."""

from __future__ import annotations

import importlib
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, Protocol

from plaudit.errors import ConfigError, nearest
from plaudit.report.source import run_events


class Sink(Protocol):
    def metrics(self, step: int, values: Mapping[str, float], wall: float) -> None: ...

    def close(self) -> None: ...


class Tensorboard:
    """Event files beside the run's own, for `tensorboard --logdir runs`."""

    def __init__(self, run: Path) -> None:
        self.writer = _need("torch.utils.tensorboard", "tensorboard").SummaryWriter(str(run / "tensorboard"))

    def metrics(self, step: int, values: Mapping[str, float], wall: float) -> None:
        for name, value in values.items():
            self.writer.add_scalar(name, value, step, walltime=wall)

    def close(self) -> None:
        self.writer.close()


class Tracker:
    """wandb and trackio share one interface."""

    def __init__(self, package: str, run: Path) -> None:
        self.module = _need(package, package)
        try:
            self.module.init(project="plaudit", name=run.resolve().name)
        except Exception as error:  # a tracker's own errors: no key, no network, no disk
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
    """Send the metrics of a run to the tracker of that name; returns how many steps had some."""
    if name not in SINKS:
        raise ConfigError(f"unknown tracker {name!r}; {nearest(name, SINKS)}")
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


def _need(module: str, package: str) -> Any:
    try:
        return importlib.import_module(module)
    except ImportError:
        raise ConfigError(f"{package} is not installed: pip install 'plaudit[track]'") from None
