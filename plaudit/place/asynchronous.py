"""Level 5: rollouts in processes of their own that go on while the learner trains; staleness is bounded.

Weights are published while sequences are in flight: they keep their tokens and go on with the new weights.
"""

from __future__ import annotations

from pathlib import Path
from typing import Literal

from plaudit.place.async_rollouts import AsyncRollouts
from plaudit.place.disaggregated import Disaggregated


class Asynchronous(Disaggregated):
    rollouts: AsyncRollouts

    @property
    def keep(self) -> Literal["recompute", "continue"]:
        return self.stage.recipe.placement.in_flight

    def _rollouts(self) -> AsyncRollouts:
        stage = self.stage
        return AsyncRollouts(stage.recipe, self._player(), stage.prompts, stage.scorer, stage.clock, self.engine.mend)

    def publish(self, version: int) -> dict[str, float]:
        ahead = {"rollout/dropped": self.rollouts.dropped, "rollout/staleness_bound": self.rollouts.staleness}
        return {**super().publish(version), **{name: float(value) for name, value in ahead.items()}}

    def save(self, directory: Path) -> None:
        self.rollouts.save(directory)

    def load(self, directory: Path) -> None:
        self.rollouts.load(directory)

    def close(self) -> None:
        super().close()  # first: whoever waits for an engine is told
        if hasattr(self, "rollouts"):
            self.rollouts.close()
