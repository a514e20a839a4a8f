"""An engine's receiver for every kind of channel: the message says which."""

from __future__ import annotations

from typing import Any

from torch import nn

from plaudit.errors import WeightsRefused, nearest
from plaudit.place.channels.channel import Side, Target
from plaudit.place.channels.collective import CollectiveSide
from plaudit.place.channels.disk import DiskSide
from plaudit.place.channels.shared import SharedSide
from plaudit.place.channels.target import ModuleTarget
from plaudit.place.channels.weights import Layout


class WeightReceiver:
    """version   of the weights it has; None while it is stale"""

    def __init__(self, target: nn.Module | Target) -> None:
        self.target: Target = ModuleTarget(target) if isinstance(target, nn.Module) else target
        self.version: int | None = None
        self._publisher: str | None = None
        self._sides: dict[str, Side] = {"disk": DiskSide(), "collective": CollectiveSide(), "shared": SharedSide()}

    def receive(self, message: dict[str, Any]) -> dict[str, Any]:
        side = self._sides.get(message["channel"])
        if side is None:
            raise WeightsRefused(
                f"weights come by {message['channel']!r}, {nearest(str(message['channel']), self._sides)}"
            )
        layout = Layout.from_message(message["layout"])
        self._check_version(message["version"], message["publisher"])
        self.target.check(layout)
        if message["do"] == "prepare":
            return side.prepare(message)
        self.version = None  # until all of it has been checked: a failure leaves some tensors new and some old
        taken = side.take(message, layout, self.target)
        self.version, self._publisher = message["version"], message["publisher"]
        return {"version": self.version, "checksum": taken.checksum, "extra_bytes": taken.extra_bytes}

    def close(self) -> None:
        for side in self._sides.values():
            side.close()

    def _check_version(self, version: int, publisher: str) -> None:
        if publisher == self._publisher and self.version is not None and version < self.version:
            raise WeightsRefused(f"version {version} was published to an engine that has version {self.version}")
