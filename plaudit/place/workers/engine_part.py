"""Engines of several ranks on the training devices: the training ranks are also the engines' ranks, in order.

    ranks 0 .. T·P - 1    one engine of T × P ranks (resources.rollout), the next T·P ranks another, and so on

Rank 0 of an engine schedules and samples; the others follow it during rollouts, and then all of them continue
training. A rank has its training shards and its shard of the engine, and never the whole policy: new weights are
gathered one tensor at a time, of which it copies its own slices.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from datetime import timedelta
from functools import partial
from typing import TypeVar

import numpy as np

from plaudit.config import RlRecipe
from plaudit.config.reward import LogprobsTable
from plaudit.core import Engine
from plaudit.core.device.choose import backend_of
from plaudit.core.device.lockstep import Leader, RankGroups, follow
from plaudit.core.model.stages import RankPosition
from plaudit.core.proof.support import inspect
from plaudit.place.channels.target import PartTarget
from plaudit.place.channels.weights import Weights
from plaudit.records import Prompt, Sample
from plaudit.reward.load import load_part
from plaudit.train.optim.sharding import Shards
from plaudit.train.policy import lora
from plaudit.train.rollouts.rollouts import Player
from plaudit.train.run.ranks import Group, Ranks, groups_along, named_losses

Made = TypeVar("Made")


class EnginePart:
    """A training rank's shard of an engine. All ranks construct theirs together.

    engine    on rank 0 of each
    engines   index of this rank's engine and their number: they split the prompts, and exchange nothing
    """

    def __init__(self, recipe: RlRecipe, ranks: Ranks, shards: Shards) -> None:
        rollout, index = recipe.resources.rollout, ranks.everyone.index
        self.place = RankPosition(index % rollout.ranks, rollout.tensor_parallel, rollout.pipeline_parallel)
        self.engines = Group(index // rollout.ranks, ranks.everyone.size // rollout.ranks)
        self.device = str(shards.device)
        self.shards = shards
        self._ranks = ranks.everyone.size
        self._limit = timedelta(seconds=recipe.resources.timeout)
        table = LogprobsTable(
            path=str(recipe.model.path), tensor_parallel=rollout.tensor_parallel,
            pipeline_parallel=rollout.pipeline_parallel, dtype=recipe.model.dtype,
        )  # fmt: skip
        adapter = recipe.model.lora
        part = load_part(table, self, replaced=True, prepare=partial(lora.attach_blank, adapter))
        self.module, self.channel = part.loaded.module, part.channel
        # With an adapter the base weights stay those of the files.
        self._layout = (Weights.of if adapter is None else Weights.trained)(shards.skeleton).layout
        self._target = PartTarget(self.module, part.whole, part.cuts)
        self._target.check(self._layout)
        self.engine: Engine | None = None
        if self.place.rank == 0:
            self.engine = Engine(
                self.module, part.loaded.tokenizer, kv_bytes=recipe.engine.kv_bytes, seed=recipe.seed,
                channel=self.channel,
            )  # fmt: skip
        else:
            self._backend = backend_of(inspect(self.module, part.loaded.tokenizer))

    def meet(self, hashes: Mapping[str, str]) -> RankGroups:
        """The ranks are already connected, with the files of one policy."""
        place = self.place
        rows = np.arange(self._ranks).reshape(-1, place.stages, place.tensor_parallel)
        whole = rows.reshape(-1, place.size)
        carrier = "nccl" if self.device.startswith("cuda") else "gloo"
        messages = groups_along(whole, 1, "gloo", self._limit).channel
        stages = groups_along(whole, 1, carrier, self._limit).channel if place.stages > 1 else None
        tensors = groups_along(rows, 2, carrier, self._limit).channel
        assert messages is not None, "an engine of one rank has no part"
        return RankGroups(
            place.rank, place.size, messages, tensors or messages, stages=stages, last=place.last, beats=False
        )

    def together(self, act: Callable[[Engine], Made]) -> Made | None:
        """Run `act` on rank 0's engine. Meanwhile the other ranks compute with it, and return None."""
        if self.engine is None:
            with named_losses():
                follow(self._backend, self.channel)
            return None
        assert isinstance(self.engine.backend, Leader)
        try:
            return act(self.engine)
        finally:
            self.engine.backend.dismiss()

    def publish(self, version: int) -> dict[str, float]:
        """Load the current weights of the training shards, on all ranks; returns the metrics."""
        begin, size = time.monotonic(), 0
        for entry in self._layout.entries:
            whole = self.shards.full(entry.name)
            self._target.load([(entry.name, whole)])
            size += whole.nbytes
            del whole  # before the next one is gathered
        if self.engine is not None:
            self.engine.new_version(version)
        return {"publish/gather_seconds": time.monotonic() - begin, "publish/gather_bytes": float(size)}


class PartPlayer:
    """Generates on rank 0 of an engine, which has its player; the other ranks compute with it."""

    def __init__(self, player: Player | None, part: EnginePart) -> None:
        self.player = player
        self.part = part

    def play(
        self, prompts: Sequence[Prompt], n: int, seed: str, first: int = 0, evaluate: bool = False
    ) -> list[Sample]:
        def act(_: Engine) -> list[Sample]:
            assert self.player is not None
            return self.player.play(prompts, n, seed, first, evaluate)

        return self.part.together(act) or []
