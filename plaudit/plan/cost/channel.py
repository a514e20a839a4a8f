"""Seconds in which new weights reach the engines, by the way they take.

Published times follow the bytes of the whole model and the number of its tensors, not the number of devices: from 8 to
256 receivers they are flat. So a way is a rate, a price per tensor and a fixed price, each with its reason.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from plaudit.errors import ConfigError, nearest
from plaudit.plan.cost.term import Term, total
from plaudit.plan.shape.hardware import DTYPE_BYTES, Accelerator
from plaudit.plan.shape.model_shape import ModelShape

CAST_RATE = 25e9
"""Bytes per second at which weights are cast to a narrower format on the way, scales and all."""


@dataclass(frozen=True, slots=True)
class Channel:
    name: str
    about: str
    fixed: float
    per_tensor: float
    links: float
    """Network links kept busy at once; zero for a rate that no network bounds."""
    rate: float
    """Of one link's bandwidth where links > 0 (a share), of the whole way otherwise (bytes per second)."""

    def speed(self, accelerator: Accelerator) -> float:
        return self.links * self.rate * accelerator.scale_out if self.links else self.rate


CHANNELS: Mapping[str, Channel] = {
    channel.name: channel
    for channel in (
        Channel("shared", "one set of tensors for both: nothing moves", 0.0, 0.0, 0.0, 1e15),
        Channel("ipc", "co-located processes: gathered in buckets, handed over by address", 1.0, 0.1e-3, 0.0, 55e9),
        Channel("tensors", "tensor by tensor, gathered and broadcast: a round trip for each", 0.5, 0.5e-3, 1.0, 0.30),
        Channel("broadcast", "buckets from one sender: gathered, sent and unpacked in turn", 0.5, 0.1e-3, 1.0, 0.30),
        Channel("pipeline", "host to device, broadcast and unpack at once, bucket after bucket", 0.5, 0.0, 0.0, 70e9),
        Channel("reshard", "every sender to the receivers that need its part (NCCL, RDMA)", 0.05, 0.0, 2.0, 0.8),
        Channel("host", "serialised through host memory and back", 1.0, 0.0, 0.0, 0.7e9),
        Channel("disk", "written to a shared file system and read by each replica", 2.0, 0.0, 0.0, 2e9),
    )
}  # fmt: skip


def find(name: str) -> Channel:
    if name not in CHANNELS:
        raise ConfigError(f"unknown weight channel {name!r}; {nearest(name, CHANNELS)}")
    return CHANNELS[name]


def transfer(
    channel: Channel, model: ModelShape, accelerator: Accelerator, dtype: str = "bf16", to: str | None = None,
    parameters: float | None = None,
) -> Term:  # fmt: skip
    """One publication. `parameters` in place of the model's own where only their number is known."""
    size = (parameters or model.parameters) * DTYPE_BYTES[dtype]
    if channel.name == "shared":
        return Term("weights", 0.0, "s", "shared tensors: nothing moves")
    tensors = 0 if parameters else model.tensors
    parts = [
        Term("fixed", channel.fixed, "s", "metadata, barriers and acknowledgements of one publication"),
        Term("tensors", tensors * channel.per_tensor, "s", "tensors · seconds of one", (("tensors", tensors),)),
        Term("bytes", size / channel.speed(accelerator), "s", "bytes of the model / rate of the way",
             (("bytes", size), ("rate", channel.speed(accelerator)))),
    ]  # fmt: skip
    if to is not None and DTYPE_BYTES[to] < DTYPE_BYTES[dtype]:
        parts.append(Term("cast", size / CAST_RATE, "s", "bytes / rate of casting and scaling", (("bytes", size),)))
    return total("weights", parts, "s")
