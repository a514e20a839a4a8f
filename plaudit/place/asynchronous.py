"""Level 5: rollouts in separate processes that continue while the learner trains; staleness is bounded.

Weights are published while sequences are in flight: they keep their tokens and continue with the new weights.
"""

from __future__ import annotations

from pathlib import Path
from typing import Literal

from plaudit.place.async_rollouts import AsyncRollouts
from plaudit.place.disaggregated import Disaggregated
from plaudit.place.shared_queue import SharedQueue
from plaudit.train.rollouts.rollouts import RolloutSource
from plaudit.train.rollouts.sharing import SharedScorer


class Asynchronous(Disaggregated):
    """queue   the main rank's"""

    queue: AsyncRollouts | None = None

    @property
    def keep(self) -> Literal["recompute", "continue"]:
        return self.stage.recipe.placement.in_flight

    def _rollouts(self) -> RolloutSource:
        stage, player, scorer = self.stage, self._player(), self.stage.scorer
        own = scorer.scorer if isinstance(scorer, SharedScorer) else scorer
        if stage.ranks.main:
            self.queue = AsyncRollouts(stage.recipe, player, stage.prompts, own, stage.clock, self.engine.restart_lost)
        if self.queue is not None and stage.ranks.everyone.size == 1:
            return self.queue
        return SharedQueue(self.queue, self._for_all(player), scorer, stage.clock, self.orders)

    def publish(self, version: int) -> dict[str, float]:
        metrics = super().publish(version)
        if self.queue is None:
            return metrics
        ahead = {"rollout/dropped": self.queue.dropped, "rollout/staleness_bound": self.queue.staleness}
        return {**metrics, **{name: float(value) for name, value in ahead.items()}}

    def save(self, directory: Path) -> None:
        if self.queue is not None:
            self.queue.save(directory)

    def load(self, directory: Path) -> None:
        if self.queue is not None:
            self.queue.load(directory)

    def close(self) -> None:
        super().close()  # first: notifies threads that wait for an engine
        if self.queue is not None:
            self.queue.close()
