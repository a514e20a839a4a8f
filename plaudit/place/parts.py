"""Colocated and hybrid with engines of several ranks: training ranks are also the engines' ranks."""

from __future__ import annotations

from pathlib import Path

from plaudit.core import Engine
from plaudit.place.hybrid import Switching
from plaudit.place.placement import PlacementContext
from plaudit.place.player import close_player, new_player
from plaudit.place.workers.engine_part import EnginePart, PartPlayer
from plaudit.train.rollouts.rollouts import Player, Rollouts, RolloutSource
from plaudit.train.rollouts.sharing import SharedPlayer


class ColocatedParts:
    def __init__(self, stage: PlacementContext) -> None:
        recipe, trainee, everyone = stage.recipe, stage.trainee, stage.ranks.everyone
        assert trainee.shards is not None
        self.part = EnginePart(recipe, stage.ranks, trainee.shards)
        self.engine: Engine | EnginePart = self.part.engine or self.part
        self.learner = trainee.learner
        self.player: Player | None = None
        if self.part.engine is not None:
            tokenizer, positions = trainee.loaded.tokenizer, trainee.decoder.max_positions
            self.player = new_player(recipe, self.part.engine, tokenizer, positions, stage.clock)
        player = SharedPlayer(PartPlayer(self.player, self.part), everyone, self.part.engines)
        self.rollouts: RolloutSource = Rollouts(recipe, player, stage.prompts, stage.scorer, stage.clock)

    def publish(self, version: int) -> dict[str, float]:
        return self.part.publish(version)

    def save(self, directory: Path) -> None: ...

    def load(self, directory: Path) -> None: ...

    def close(self) -> None:
        close_player(self.player)


class HybridParts(ColocatedParts):
    def __init__(self, stage: PlacementContext) -> None:
        super().__init__(stage)
        sleep, wake = lambda: self.part.together(Engine.sleep), lambda: self.part.together(Engine.wake)
        self.rollouts = Switching(self.rollouts, stage, sleep, wake)
