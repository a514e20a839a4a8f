"""Messages between a trainer and a rollout worker, over a socket: length-prefixed MessagePack, no pickle.

    trainer -> worker   Start, then GenerateCall, Cancel, Release, WeightCall, ControlCall
    worker -> trainer   Hello (loaded), Alive (every second), Samples, Refused, WeightCallReply, ControlReply;
                        or Failed, and the end

WeightCall and WeightCallReply contain a weight channel's messages. A worker is stale until one of them has delivered
weights, and accepts no GenerateCall before that.
"""

from __future__ import annotations

from typing import Any, Literal

import msgspec

from plaudit.core import SamplingParams
from plaudit.process.framing import FrameReader, as_bytes, cut, pack
from plaudit.process.worker import Alive, Failed
from plaudit.records import Sample

__all__ = ["Alive", "Failed", "as_bytes", "cut", "pack"]

ControlAction = Literal["health", "sleep", "wake", "stats"]


class Start(msgspec.Struct, tag=True, array_like=True):
    """The model to load, and its devices. The weights of its directory only define the shapes of those to come.

    devices  one for each rank of the engine
    keep     what happens to sequences in flight when new weights arrive: core.Engine.new_version
    """

    recipe: dict[str, Any]
    devices: list[str]
    threads: int
    cores: list[int]
    keep: Literal["recompute", "continue"]


class Hello(msgspec.Struct, tag=True, array_like=True):
    pid: int


class GenerateCall(msgspec.Struct, tag=True, array_like=True):
    """One `generate`: `lengths` splits `tokens` into prompts. Samples are sent as they finish.

    hand_over   samples come with a parcel of their prompt's KV, which is kept until Release
    begun       per prompt, the samples to continue, with such parcels
    """

    id: int
    lengths: list[int]
    tokens: bytes  # int32
    params: list[SamplingParams]
    hand_over: bool = False
    begun: list[list[Sample]] | None = None


class Cancel(msgspec.Struct, tag=True, array_like=True):
    id: int


class Release(msgspec.Struct, tag=True, array_like=True):
    """The parcels of a GenerateCall are no longer needed."""

    id: int


class Samples(msgspec.Struct, tag=True, array_like=True):
    id: int
    samples: list[Sample]


class Refused(msgspec.Struct, tag=True, array_like=True):
    """A GenerateCall that the engine rejects."""

    id: int
    message: str


class WeightCall(msgspec.Struct, tag=True, array_like=True):
    message: dict[str, Any]


class WeightCallReply(msgspec.Struct, tag=True, array_like=True):
    message: dict[str, Any]


class ControlCall(msgspec.Struct, tag=True, array_like=True):
    """health   generate a token
    sleep    free the KV cache; wake allocates it again
    stats    the engine's counters, and its version
    """

    id: int
    what: ControlAction


class ControlReply(msgspec.Struct, tag=True, array_like=True):
    id: int
    value: dict[str, Any]


Frame = (
    Start | Hello | Alive | Failed | GenerateCall | Cancel | Release | Samples | Refused
    | WeightCall | WeightCallReply | ControlCall | ControlReply
)  # fmt: skip
DECODER: msgspec.msgpack.Decoder[Frame] = msgspec.msgpack.Decoder(Frame)


class FrameStream(FrameReader[Frame]):
    def __init__(self) -> None:
        super().__init__(DECODER)
