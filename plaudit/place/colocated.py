"""Level 1: rollouts in the learner's process, on the learner's own module. All models stay where they are.

Over several ranks the engines have a module of their own: of one rank each a whole copy, of several each a part."""

from __future__ import annotations

from pathlib import Path

from plaudit.core import Engine
from plaudit.place.placement import PlacementContext
from plaudit.place.player import close_player, new_player
from plaudit.place.workers.engine_part import EnginePart, PartPlayer
from plaudit.train.rollouts.rollouts import Player, Rollouts, RolloutSource
from plaudit.train.rollouts.sharing import SharedPlayer


class Colocated:
    def __init__(self, stage: PlacementContext) -> None:
        self.stage = stage
        recipe, trainee, ranks = stage.recipe, stage.trainee, stage.ranks
        self.part: EnginePart | None = None
        self.engine: Engine | EnginePart
        if recipe.engine_parts:
            assert trainee.shards is not None
            self.part = EnginePart(recipe, ranks, trainee.shards)
            self.engine = self.part.engine or self.part
        else:
            self.engine = Engine(
                trainee.loaded.module, trainee.loaded.tokenizer, kv_bytes=recipe.engine.kv_bytes, seed=recipe.seed,
                state_every=recipe.engine.state_every, record_experts=recipe.train.routing_replay,
            )  # fmt: skip
        self.learner = trainee.learner
        self.player: Player | None = None
        if isinstance(self.engine, Engine):
            tokenizer, positions = trainee.loaded.tokenizer, trainee.decoder.max_positions
            self.player = new_player(recipe, self.engine, tokenizer, positions, stage.clock)
        self.rollouts: RolloutSource = Rollouts(recipe, self._for_all(), stage.prompts, stage.scorer, stage.clock)

    def _for_all(self) -> Player:
        """The player of all ranks."""
        everyone = self.stage.ranks.everyone
        if self.part is not None:
            return SharedPlayer(PartPlayer(self.player, self.part), everyone, self.part.engines)
        assert self.player is not None
        return self.player if everyone.size == 1 else SharedPlayer(self.player, everyone)

    def publish(self, version: int) -> dict[str, float]:
        if self.part is not None:
            return self.part.publish(version)
        metrics = self.stage.trainee.make_whole()
        assert isinstance(self.engine, Engine)
        self.engine.new_version(version)
        return metrics

    def save(self, directory: Path) -> None: ...

    def load(self, directory: Path) -> None: ...

    def close(self) -> None:
        close_player(self.player)
