"""The receiving process of `plaudit bench weights`: a model in memory, and raw broadcasts for comparison."""

from __future__ import annotations

import socket
import sys
from typing import Any

import torch

from plaudit.bench.shape import LlamaShaped
from plaudit.place.channels.channel import answered
from plaudit.place.channels.group import ChannelGroup
from plaudit.place.channels.messages import Invitation, typed
from plaudit.place.channels.receiver import WeightReceiver
from plaudit.place.channels.weights import Weights
from plaudit.place.channels.wire import serve_wire
from plaudit.train.run.checksum import Checksum

SECONDS = 300.0


def main(file: str, parameters: str, dtype: str, device: str) -> None:
    torch.set_num_threads(1)
    module = LlamaShaped(int(parameters), getattr(torch, dtype), torch.device(device))
    receiver = WeightReceiver(module)
    raw: dict[str, Any] = {}

    def respond(message: dict[str, Any]) -> dict[str, Any]:
        match message.get("bench"):
            case None:
                return answered(receiver, message)
            case "echo":
                return {}
            case "sum":
                return {"checksum": checksum_of(module)}
            case "join":
                raw["group"] = ChannelGroup(typed(message["join"], Invitation), 1, SECONDS)
                raw["flat"] = torch.empty(message["bytes"], dtype=torch.uint8)
                return {}
            case "broadcast":
                broadcast(raw["group"], raw["flat"], message["piece"])
                return {}
        raise ValueError(f"unknown message {message}")

    serve_wire(socket.socket(fileno=int(file)), respond)


def broadcast(group: ChannelGroup, flat: torch.Tensor, piece: int) -> None:
    """A plain gloo broadcast: chunks of one buffer, two in flight."""
    under_way = []
    for start in range(0, flat.numel(), piece):
        under_way.append(group.broadcast(flat[start : start + piece], SECONDS))
        if len(under_way) == 2:
            under_way.pop(0).wait(SECONDS)
    for pending in under_way:
        pending.wait(SECONDS)


def checksum_of(module: torch.nn.Module) -> str:
    checksum = Checksum()
    for _, tensor in Weights.of(module):
        checksum.update(tensor)
    return checksum.hexdigest()


if __name__ == "__main__":
    main(*sys.argv[1:])
