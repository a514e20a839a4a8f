"""Level 4: one set of weights in two modes. During generation the KV cache uses the memory; during training gradients
and activations do.

In one process both modes run on one module. With resources.rollout.processes the engine is in another process,
which maps the learner's memory: a weight update copies nothing.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Literal

from plaudit.place.colocated import Colocated
from plaudit.place.disaggregated import Disaggregated
from plaudit.place.placement import PlacementContext
from plaudit.place.workers.fleet import Fleet
from plaudit.records import Batch, Prompt, Sample
from plaudit.train.rollouts.rollouts import RolloutSource

Mode = Literal["generate", "train"]


class Switching:
    """Rollouts that switch the engine on before they generate, and off after a step's samples. The duration of a switch
    is a span `mode_switch` in the log and part of the step's time."""

    def __init__(
        self, inner: RolloutSource, stage: PlacementContext, sleep: Callable[[], object], wake: Callable[[], object]
    ) -> None:
        self.inner = inner
        self.stage = stage
        self.mode: Mode = "generate"
        self._switches: dict[Mode, Callable[[], object]] = {"generate": wake, "train": sleep}

    @property
    def drawn(self) -> int:
        return self.inner.drawn

    @drawn.setter
    def drawn(self, count: int) -> None:
        self.inner.drawn = count

    def next(self, step: int, version: int) -> Batch:
        self.switch("generate")
        batch = self.inner.next(step, version)
        self.switch("train")
        return batch

    def heldout(self, prompts: Sequence[Prompt], n: int, seed: str) -> list[Sample]:
        self.switch("generate")
        return self.inner.heldout(prompts, n, seed)

    def switch(self, mode: Mode) -> None:
        if mode == self.mode:
            return
        with self.stage.clock("mode_switch"), self.stage.events.span("mode_switch"):
            self._switches[mode]()
        self.mode = mode


class Hybrid(Colocated):
    def __init__(self, stage: PlacementContext) -> None:
        super().__init__(stage)
        self.rollouts = Switching(self.rollouts, stage, self.engine.sleep, self.engine.wake)


class HybridProcesses(Disaggregated):
    paused = True

    def _rollouts(self) -> Switching:
        assert isinstance(self.engine, Fleet)  # the only one that a recipe allows here
        ask = self.engine.ask_all
        return Switching(super()._rollouts(), self.stage, lambda: ask("sleep"), lambda: ask("wake"))
