"""Level 3: rollouts in separate processes with their own devices; new weights are transferred to them.

The step is synchronous: the learner waits for the samples, the workers for the weights.
"""

from __future__ import annotations

import threading
from functools import partial
from pathlib import Path
from typing import Literal

from plaudit.errors import ConfigError
from plaudit.place.channels.channel import Channel
from plaudit.place.channels.collective import CollectiveChannel
from plaudit.place.channels.delta import DeltaChannel
from plaudit.place.channels.disk import DiskChannel
from plaudit.place.channels.reshard.sending import ReshardChannel
from plaudit.place.channels.shared import SharedChannel
from plaudit.place.channels.weights import Weights
from plaudit.place.engines.build import new_served
from plaudit.place.engines.server_fleet import ServerFleet
from plaudit.place.machines.pool import RolloutMachines
from plaudit.place.placement import PlacementContext
from plaudit.place.player import close_player, new_player
from plaudit.place.ray.rollouts import RayRollouts
from plaudit.place.resharding import new_reshard
from plaudit.place.resources import rollout_seats
from plaudit.place.workers import frames
from plaudit.place.workers.fleet import Fleet
from plaudit.place.workers.remote_engine import RemoteEngine
from plaudit.place.workers.split_fleet import SplitFleet
from plaudit.train.rollouts.rollouts import Player, Rollouts, RolloutSource
from plaudit.train.rollouts.sharing import MainPlayer
from plaudit.train.run.orders import Orders


class Disaggregated:
    paused = False
    player: Player | None = None

    def __init__(self, stage: PlacementContext) -> None:
        self.stage = stage
        self.learner = stage.trainee.learner
        self.orders = Orders(stage.ranks.everyone)
        channel = new_channel(stage, self.orders, paused=self.paused)
        self.engine: Fleet | ServerFleet
        if stage.recipe.engine.name == "core":
            if stage.recipe.placement.delta:
                channel = DeltaChannel(channel, new_channel(stage, self.orders, paused=False, within="changes"))
            self.engine = new_fleet(stage, channel, self.orders, self.keep)
        else:
            self.engine = new_served(stage, channel)
        try:
            self.rollouts = self._rollouts()
        except BaseException:
            self.close()
            raise

    @property
    def keep(self) -> Literal["recompute", "continue"]:
        """What happens to sequences in flight when weights arrive. Here there are none."""
        return "recompute"

    def _rollouts(self) -> RolloutSource:
        stage = self.stage
        return Rollouts(stage.recipe, self._for_all(self._player()), stage.prompts, stage.scorer, stage.clock)

    def _for_all(self, player: Player) -> Player:
        """Makes the main rank's rollouts, which have the engines, those of all ranks."""
        ranks = self.stage.ranks
        return player if ranks.everyone.size == 1 else MainPlayer(player if ranks.main else None, self.orders)

    def _player(self) -> Player:
        stage, trainee = self.stage, self.stage.trainee
        tokenizer, positions = trainee.loaded.tokenizer, trainee.decoder.max_positions
        self.player = new_player(stage.recipe, self.engine, tokenizer, positions, stage.clock)
        return self.player

    def publish(self, version: int) -> dict[str, float]:
        # Reshard gathers nothing, because every rank sends its own shards; an adapter is gathered, since it is small.
        recipe = self.stage.recipe
        gathers = recipe.placement.channel != "reshard" or recipe.model.lora is not None
        metrics = self.stage.trainee.make_whole() if gathers else {}
        if not self.stage.ranks.main:
            self.orders.value(None)
            return metrics
        try:
            publication = self.engine.publish(version)
        finally:
            self.orders.value(None)  # the others execute what the publication needs until they receive this
        return {
            **metrics,
            "publish/seconds": publication.seconds,
            "publish/bytes": float(publication.bytes),
            "publish/extra_bytes": float(publication.extra_bytes),
            **({"publish/share": publication.share} if self.stage.recipe.placement.delta else {}),
            "rollout/restarts": float(self.engine.restarts),
            **(self.engine.probed if isinstance(self.engine, ServerFleet) else {}),
        }

    def save(self, directory: Path) -> None: ...

    def load(self, directory: Path) -> None: ...

    def close(self) -> None:
        self.engine.close()
        close_player(self.player)


def new_fleet(
    stage: PlacementContext, channel: Channel, orders: Orders, keep: Literal["recompute", "continue"]
) -> Fleet:
    """The main rank's; the others have none."""
    recipe, trainee = stage.recipe, stage.trainee
    news = threading.Condition()
    engines = []
    if stage.ranks.main:
        size = Weights.of(trainee.loaded.module).nbytes
        tree = recipe.model_dump(mode="json", exclude_none=True)
        for index, seat in enumerate(rollout_seats(recipe, trainee.decoder.device, size, stage.cores)):
            start = frames.Start(tree, list(seat.devices), seat.threads, list(seat.cores), keep)
            engines.append(RemoteEngine(f"rollout {index}", start, stage.host, news))
    readers = recipe.resources.rollout.prefill
    weights = channel.weights if isinstance(channel, ReshardChannel) else lambda: Weights.of(trainee.loaded.module)
    kind = Fleet if not readers else partial(SplitFleet, readers)
    fleet = kind(engines, channel, weights, news, stage.warn)
    in_place = isinstance(channel, SharedChannel) and channel.in_place  # nothing is transferred there
    if recipe.model.lora is not None and not in_place:
        adapter = new_channel(stage, orders, paused=False, within="adapter")
        fleet.part = adapter, lambda: Weights.trained(trainee.loaded.module)
    return fleet


def new_channel(stage: PlacementContext, orders: Orders, *, paused: bool, within: str = ".") -> Channel:
    """`orders`: from the main rank to the others, where a channel needs all of them. `paused`: no engine runs while the
    learner changes the weights, so they may share the learner's own memory. `within`: the subdirectory of this
    channel's files in the run's weights directory."""
    table = stage.recipe.placement
    host = "127.0.0.1"
    near = True
    if isinstance(stage.host, RayRollouts):
        host = stage.host.address
        # Ray shows a process its own GPU alone: memory of another GPU cannot be mapped.
        near = stage.host.near and stage.trainee.decoder.device.type == "cpu"
    elif isinstance(stage.host, RolloutMachines):
        host, near = stage.host.address, False
    backend: Literal["gloo", "nccl"] = "nccl" if stage.trainee.decoder.device.type == "cuda" else "gloo"
    default: Literal["disk", "collective", "shared"] = (
        "disk" if stage.recipe.engine.name == "sglang" else "shared" if near else "collective"
    )
    match table.channel or default:
        case "disk":
            return DiskChannel(stage.directory / "weights" / within, seconds=table.deadline)
        case "collective":
            return CollectiveChannel(backend, host=host, seconds=table.deadline)
        case "reshard" if within == ".":
            return new_reshard(stage, orders, backend, host)
        case "reshard":  # an adapter is too small for a reshard
            return CollectiveChannel(backend, host=host, seconds=table.deadline)
        case "shared":
            if not near:
                raise ConfigError(
                    'placement.channel = "shared" needs trainer and rollouts on one machine, and Ray gives each a '
                    'separate GPU or node: set placement.channel = "collective", or "disk"'
                )
            return SharedChannel(stage.trainee.loaded.module if paused else None, seconds=table.deadline)
