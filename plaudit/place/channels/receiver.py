"""An engine's receiver for every kind of channel: the message selects the method."""

from __future__ import annotations

from torch import nn

from plaudit.errors import WeightsRefused
from plaudit.place.channels.channel import Received, Target
from plaudit.place.channels.collective import CollectiveSide
from plaudit.place.channels.disk import take_from_disk
from plaudit.place.channels.messages import (
    CollectivePrepare,
    CollectiveTake,
    DiskTake,
    ReshardTake,
    SharedTake,
    WeightMessage,
    WeightReply,
)
from plaudit.place.channels.reshard.receiving import ReshardSide
from plaudit.place.channels.shared import SharedSide
from plaudit.place.channels.target import DeltaTarget, ModuleTarget, PartTarget
from plaudit.place.channels.weights import Layout


class WeightReceiver:
    """version   of the weights it has; None while it is stale"""

    def __init__(self, target: nn.Module | Target) -> None:
        self.target: Target = ModuleTarget(target) if isinstance(target, nn.Module) else target
        self.version: int | None = None
        self._publisher: str | None = None
        # Partial weights use separate buffers: those of the full weights stay in place.
        self._collective = {part: CollectiveSide() for part in (False, True)}
        self._shared = {part: SharedSide() for part in (False, True)}
        self._reshard = ReshardSide()

    def receive(self, message: WeightMessage) -> WeightReply:
        self._check_version(message.version, message.publisher)
        self.target.check(message.layout)
        if message.layout.part and self.version is None:
            raise WeightsRefused("a part of the weights was published to an engine that has none: publish all weights")
        if message.layout.since not in (None, self.version):
            raise WeightsRefused(
                f"changes since version {message.layout.since} were published to an engine that has version "
                f"{self.version}: publish all weights"
            )
        if isinstance(message.body, CollectivePrepare):
            return WeightReply(message.exchange, in_group=self._collective[message.layout.part].prepare(message.body))
        target = self._target(message.layout)
        self.version = None  # until everything has been checked: a failure leaves some tensors new and some old
        received = self._take(message, target)
        self.version, self._publisher = message.version, message.publisher
        return WeightReply(message.exchange, None, self.version, received.checksum, received.extra_bytes)

    def _target(self, layout: Layout) -> Target:
        if not layout.packed:
            return self.target
        if not isinstance(self.target, ModuleTarget | PartTarget):
            raise WeightsRefused(
                "changes were published to an engine that takes whole tensors: set placement.delta = false"
            )
        return DeltaTarget(self.target, layout)

    def _take(self, message: WeightMessage, target: Target) -> Received:
        part = message.layout.part
        match message.body:
            case DiskTake() as body:
                return take_from_disk(body, message.layout, target)
            case SharedTake() as body:
                return self._shared[part].take(body, message.publisher, message.layout, target)
            case CollectiveTake() as body:
                return self._collective[part].take(body, message.layout, target)
            case ReshardTake() as body:
                return self._take_parts(body, message.layout)
            case _:
                raise AssertionError(f"unexpected message body {message.body}")

    def _take_parts(self, body: ReshardTake, layout: Layout) -> Received:
        if not isinstance(self.target, ModuleTarget | PartTarget):
            raise WeightsRefused(
                'parts were published to an engine that takes whole tensors: set placement.channel = "collective"'
            )
        side = self._collective[layout.part]
        try:
            return self._reshard.take(body, side.group(body.group), layout, self.target)
        except BaseException:
            side.close()  # so that no other rank waits for this one
            raise

    def close(self) -> None:
        for part in (False, True):
            self._collective[part].close()
            self._shared[part].close()

    def _check_version(self, version: int, publisher: str) -> None:
        if publisher == self._publisher and self.version is not None and version < self.version:
            raise WeightsRefused(f"version {version} was published to an engine that has version {self.version}")
