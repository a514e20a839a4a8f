"""The placement interface: it builds the rollouts and the learner, and publishes new weights to the engine.

The loop in `plaudit.rl` is the same for every placement.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol

from plaudit.config import RlRecipe
from plaudit.events import EventLog
from plaudit.place.workers.engine_part import EnginePart
from plaudit.place.workers.remote_engine import Host, OwnProcess
from plaudit.train.data.prompts import Prompts
from plaudit.train.policy.rl_learner import RlLearner
from plaudit.train.policy.trainee import Trainee
from plaudit.train.rollouts.rollouts import Generator, RolloutSource, SampleScorer
from plaudit.train.run.clock import Clock
from plaudit.train.run.ranks import Ranks


@dataclass(frozen=True)
class PlacementContext:
    """The inputs of every placement."""

    recipe: RlRecipe
    ranks: Ranks
    clock: Clock
    trainee: Trainee
    prompts: Prompts
    scorer: SampleScorer
    events: EventLog
    directory: Path
    warn: Callable[[str], None]
    cores: tuple[int, ...]
    """CPUs that the run may use; the learner itself may be pinned to some of them."""
    host: Host = OwnProcess
    """Starts a rollout process."""


class Placement(Protocol):
    @property
    def engine(self) -> Generator | EnginePart: ...

    @property
    def rollouts(self) -> RolloutSource: ...

    @property
    def learner(self) -> RlLearner: ...

    def publish(self, version: int) -> dict[str, float]:
        """Give the engine the learner's weights as this version; returns the cost as metrics. Must be called once
        before any generation."""

    def save(self, directory: Path) -> None:
        """State for a checkpoint besides `rollouts.drawn`."""

    def load(self, directory: Path) -> None: ...

    def close(self) -> None:
        """Stop everything that was started. Also called after a failure."""
