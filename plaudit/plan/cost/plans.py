"""A plan: placement, devices and parallel layouts."""

from __future__ import annotations

from dataclasses import dataclass

from plaudit.errors import ConfigError, nearest
from plaudit.plan.cost.channel import CHANNELS
from plaudit.plan.shape.hardware import Cluster
from plaudit.plan.shape.layouts import GenerationLayout, TrainingLayout
from plaudit.plan.shape.model_shape import ModelShape

PLACEMENTS = ("colocated", "swapped", "disaggregated", "hybrid", "async")
SHARED = ("colocated", "swapped", "hybrid")
"""Placements in which generation and training take turns on the same devices."""


@dataclass(frozen=True, slots=True)
class Plan:
    placement: str
    cluster: Cluster
    """Devices of training, and of generation if they are shared."""
    generation_cluster: Cluster
    generation: GenerationLayout
    training: TrainingLayout
    channel: str
    staleness: int = 0
    double_buffer: bool = False
    """async: new weights are received into a second buffer, so generation never pauses."""

    @property
    def shared(self) -> bool:
        return self.placement in SHARED

    @property
    def replicas(self) -> int:
        return max(1, self.generation_cluster.devices // self.generation.devices)

    @property
    def idle_devices(self) -> int:
        """Devices of the generation cluster that no engine uses."""
        return self.generation_cluster.devices - self.replicas * self.generation.devices

    @property
    def devices(self) -> int:
        return self.cluster.devices + (0 if self.shared else self.generation_cluster.devices)

    @property
    def hardware(self) -> str:
        apart = not self.shared and self.generation_cluster.accelerator != self.cluster.accelerator
        return f"{self.devices} {self.cluster.accelerator.name}" if not apart else (
            f"{self.generation_cluster.devices} {self.generation_cluster.accelerator.name} and "
            f"{self.cluster.devices} {self.cluster.accelerator.name}"
        )  # fmt: skip

    def check(self, model: ModelShape) -> None:
        if self.placement not in PLACEMENTS:
            raise ConfigError(f"unknown placement {self.placement!r}; {nearest(self.placement, PLACEMENTS)}")
        if self.channel not in CHANNELS:
            raise ConfigError(f"unknown weight channel {self.channel!r}; {nearest(self.channel, CHANNELS)}")
        self.generation.check(model)
        self.training.check(model)
        if self.training.devices != self.cluster.devices:
            cuts = self.training
            fits = max(1, self.cluster.devices // (cuts.tp * cuts.pp * cuts.cp))
            raise ConfigError(
                f"training tp × pp × cp × dp = {cuts.tp} × {cuts.pp} × {cuts.cp} × {cuts.dp} = {cuts.devices} devices, "
                f"and there are {self.cluster.devices}; set dp to {fits}"
            )
        if self.generation.devices > self.generation_cluster.devices:
            raise ConfigError(
                f"a generation replica takes {self.generation.devices} devices, and there are "
                f"{self.generation_cluster.devices}; take a smaller tp, pp or ep"
            )
        if self.staleness < 0:
            raise ConfigError(f"staleness = {self.staleness}: expected zero or more")

    def one_module(self, dtype: str, engine_dtype: str) -> bool:
        """Whether engine and trainer can share the same tensors: same sharding, unsharded between steps, same format.
        On several ranks of our trainer, engines have a separate module."""
        generation, training = self.generation, self.training
        alike = generation.tp == training.tp and generation.pp == training.pp == 1 and training.zero < 3
        alike &= not training.plain or training.devices == 1
        experts = training.ep == 1 and generation.ep == 1
        return self.shared and alike and experts and training.cp == 1 and dtype == engine_dtype

    def __str__(self) -> str:
        where = "" if self.shared else f" {self.generation_cluster.devices}+{self.cluster.devices}"
        stale = f" staleness {self.staleness}" if self.placement == "async" else ""
        return f"{self.placement}{where}{stale}: generation {self.generation}, training {self.training}, {self.channel}"
