"""Time to transfer new weights to the engines, for each weight channel.

Published times for all channels but one scale with the bytes of the whole model and its number of tensors, not with the
number of devices: they are flat from 8 to 256 receivers. A channel is therefore a rate, a cost per tensor and a fixed
cost. With `rdma` every device sends its own shard over its own link. A cast to a narrower format runs on the ranks that
own the tensors: all senders, or the one that gathered them.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from plaudit.errors import ConfigError, nearest
from plaudit.plan.cost.term import Term, total
from plaudit.plan.shape.hardware import DTYPE_BYTES, Accelerator
from plaudit.plan.shape.model_shape import ModelShape

CAST_SECONDS = 2.5e-3
"""Seconds to cast one tensor to a narrower format, scales included: about a dozen small kernels launched from Python.
Fitted on three rows of NeMo RL (19,000 tensors on 16 senders take 3.2 s), so these rows do not validate it."""


@dataclass(frozen=True, slots=True)
class Channel:
    name: str
    about: str
    fixed: float
    per_tensor: float
    links: float
    """Network links used concurrently; zero for a rate that does not depend on the network."""
    rate: float
    """Share of one link's bandwidth if links > 0, otherwise bytes per second of the whole channel."""
    together: bool = False
    """All trainer devices send concurrently, each its own shard."""

    def speed(self, accelerator: Accelerator) -> float:
        return self.links * self.rate * accelerator.scale_out if self.links else self.rate


CHANNELS: Mapping[str, Channel] = {
    channel.name: channel
    for channel in (
        Channel("shared", "one set of tensors for both: nothing moves", 0.0, 0.0, 0.0, 1e15),
        Channel("ipc", "co-located processes: gathered in buckets, passed on by address", 1.0, 0.1e-3, 0.0, 55e9, True),
        Channel("tensors", "tensor by tensor, gathered and broadcast: a round trip for each", 0.5, 0.5e-3, 1.0, 0.30),
        Channel("broadcast", "buckets from one sender: gathered, sent and unpacked in turn", 0.5, 0.1e-3, 1.0, 0.30),
        Channel("pipeline", "host to device, broadcast and unpack at once, in buckets", 0.5, 0.0, 0.0, 70e9, True),
        Channel("reshard", "every sender to the receivers that need its part (NCCL)", 0.05, 0.0, 2.0, 0.8, True),
        Channel("rdma", "every device writes its part into the receivers' memory by its own link", 0.05, 0.0, 1.0, 0.8,
                True),
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
    parameters: float | None = None, senders: int = 1, busiest: float | None = None,
) -> Term:  # fmt: skip
    """Time of one weight publication. `parameters` replaces the model's count where only the count is known. `senders`:
    devices that own the weights; `busiest`: bytes over the busiest link where every device has its own (`rdma`)."""
    casts = to is not None and DTYPE_BYTES[to] < DTYPE_BYTES[dtype]
    sent = to if to is not None and casts and channel.together else dtype
    size = (parameters or model.parameters) * DTYPE_BYTES[sent]
    if channel.name == "shared":
        return Term("weights", 0.0, "s", "shared tensors: nothing moves")
    tensors = 0 if parameters else model.tensors
    parts = [
        Term("fixed", channel.fixed, "s", "metadata, barriers and acknowledgements of one publication"),
        Term("tensors", tensors * channel.per_tensor, "s", "tensors · seconds of one", (("tensors", tensors),)),
    ]  # fmt: skip
    way, speed = size, channel.speed(accelerator)
    if channel.name == "rdma" and busiest is not None:
        way = busiest
    how = "bytes of the model, or of the busiest device where each has its own link / rate of the way"
    parts.append(Term("bytes", way / speed, "s", how, (("bytes", way), ("rate", speed))))
    if casts:
        own = tensors / (senders if channel.together else 1)
        how = "tensors of a sender · CAST_SECONDS"
        parts.append(Term("cast", own * CAST_SECONDS, "s", how, (("tensors of a sender", own),)))
    return total("weights", parts, "s")
