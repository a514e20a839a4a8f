"""Level 1: rollouts in the learner's process, on the learner's module. All models stay in device memory."""

from __future__ import annotations

from pathlib import Path

from plaudit.core import Engine
from plaudit.place.placement import PlacementContext
from plaudit.place.player import close_player, new_player
from plaudit.train.rollouts.rollouts import Rollouts, RolloutSource
from plaudit.train.rollouts.sharing import SharedPlayer


class Colocated:
    def __init__(self, stage: PlacementContext) -> None:
        self.stage = stage
        recipe, trainee, ranks = stage.recipe, stage.trainee, stage.ranks
        self.engine = Engine(
            trainee.loaded.module, trainee.loaded.tokenizer, kv_bytes=recipe.engine.kv_bytes, seed=recipe.seed,
            state_every=recipe.engine.state_every, record_experts=recipe.train.routing_replay,
        )  # fmt: skip
        self.learner = trainee.learner
        tokenizer, positions = trainee.loaded.tokenizer, trainee.decoder.max_positions
        self.player = player = new_player(recipe, self.engine, tokenizer, positions, stage.clock)
        if ranks.everyone.size > 1:
            player = SharedPlayer(player, ranks.everyone)
        self.rollouts: RolloutSource = Rollouts(recipe, player, stage.prompts, stage.scorer, stage.clock)

    def publish(self, version: int) -> dict[str, float]:
        metrics = self.stage.trainee.make_whole()
        self.engine.new_version(version)
        return metrics

    def save(self, directory: Path) -> None: ...

    def load(self, directory: Path) -> None: ...

    def close(self) -> None:
        close_player(self.player)
