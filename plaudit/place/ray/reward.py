"""Rewards in Ray actors, resources.reward.processes of them.

A batch is cut into one piece per actor, in order. A piece whose actor died is given to its successor, whole: scores
come with the piece or not at all, so that none is lost and none is there twice.
"""

from __future__ import annotations

import os
from collections.abc import Sequence
from itertools import pairwise
from pathlib import Path
from threading import Lock
from typing import Any

from plaudit.config import RlRecipe
from plaudit.config.reward import RlRewardTable
from plaudit.errors import PlauditError, one_line
from plaudit.place.ray.cluster import bundles_of, import_ray, in_bundle, own_group
from plaudit.process.guard import guard_this_process
from plaudit.records import Item
from plaudit.reward.reward import Result, Reward, cuts
from plaudit.train.rollouts.scorer import RewardFailed, local_reward
from plaudit.train.run.overdue import Warn

LOAD_SECONDS = 300.0
SCORE_SECONDS = 600.0
MOST_DEATHS = 3  # of one piece


class RewardActor:
    reward: Reward

    def load(self, table: RlRewardTable, directory: str) -> int:
        guard_this_process("a reward actor")
        os.chdir(directory)  # the recipe's paths are the trainer's
        self.reward = local_reward(table)
        return os.getpid()

    def score(self, items: list[Item]) -> list[Result]:
        return list(self.reward.score(items))


class RayReward:
    """The main rank's; on the other ranks it has no actors and is not called."""

    def __init__(self, recipe: RlRecipe, main: bool, warn: Warn) -> None:
        """`warn` hears of every actor that was lost."""
        self.warn = warn
        self.table = recipe.reward
        self.ray = import_ray()
        self.group = own_group(self.ray)
        self.restarts = 0
        self._asking = Lock()
        self._actors: dict[int, Any] = {}
        self.pids: dict[int, int] = {}
        bundles = bundles_of(recipe, "reward") if main else ()
        loading = {bundle: self._start(bundle) for bundle in bundles}
        for bundle, loaded in loading.items():
            self.pids[bundle] = self._value(loaded, LOAD_SECONDS)

    def score(self, items: Sequence[Item]) -> list[Result]:
        if not items:
            return []
        with self._asking:
            groups = [place if item.group is None else item.group for place, item in enumerate(items)]
            pieces = [list(items[a:b]) for a, b in pairwise(cuts(groups, len(self._actors)))]
            pending = [
                (bundle, piece, self._actors[bundle].score.remote(piece))
                for bundle, piece in zip(list(self._actors), pieces, strict=True)
            ]
            return [result for each in pending for result in self._piece(*each)]

    def close(self) -> None:
        for actor in self._actors.values():
            self.ray.kill(actor)
        self._actors.clear()

    def _piece(self, bundle: int, items: list[Item], scores: Any) -> list[Result]:
        for death in range(MOST_DEATHS):
            try:
                results: list[Result] = self._value(scores, SCORE_SECONDS)
                return results
            except (self.ray.exceptions.RayActorError, self.ray.exceptions.GetTimeoutError) as error:
                self.restarts += 1
                if death + 1 == MOST_DEATHS:
                    raise RewardFailed(
                        f"a reward process was lost {MOST_DEATHS} times with the same {len(items)} responses: "
                        f"{one_line(error, 160)}"
                    ) from error
                self.warn(
                    f"the reward actor (pid {self.pids[bundle]}) has died or does not answer: another takes its place"
                )
                self.ray.kill(self._actors[bundle])
                self.pids[bundle] = self._value(self._start(bundle), LOAD_SECONDS)
                scores = self._actors[bundle].score.remote(items)
        raise AssertionError("unreachable")

    def _start(self, bundle: int) -> Any:
        actor = self.ray.remote(RewardActor).options(**in_bundle(self.group, bundle)).remote()
        self._actors[bundle] = actor
        return actor.load.remote(self.table, str(Path.cwd()))

    def _value(self, promised: Any, seconds: float) -> Any:
        try:
            return self.ray.get(promised, timeout=seconds)
        except self.ray.exceptions.RayTaskError as error:
            if isinstance(error.cause, PlauditError):
                raise error.cause from None
            raise RewardFailed(f"a reward process failed: {one_line(error.cause)}") from error
