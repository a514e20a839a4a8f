"""What a trainer and a machine that generates for it say to each other, over TCP: length-prefixed MessagePack.

    machine -> trainer   the endpoint's token, Join; later Ended
    trainer -> machine   Accepted, or Rejected; then Begin and End, as engines are needed; Done, when the run is over

The trainer's endpoint is a file of the run directory, which both see and nobody else reads. An engine has a connection
of its own to the trainer, which Begin says.
"""

from __future__ import annotations

import msgspec

from plaudit.process.framing import FrameReader

ENDPOINT = "trainer.json"


class TrainerEndpoint(msgspec.Struct):
    """Where the trainer of a run is, for machines that generate for it. The token is hexadecimal."""

    host: str
    port: int
    token: str


class Join(msgspec.Struct, tag=True, array_like=True):
    name: str
    version: str


class Accepted(msgspec.Struct, tag=True, array_like=True):
    """directory   the trainer's: paths of the recipe are relative to it"""

    directory: str


class Rejected(msgspec.Struct, tag=True, array_like=True):
    message: str


class Begin(msgspec.Struct, tag=True, array_like=True):
    """Start an engine, which is reached at this address by this token.

    place   of the machine's places for engines, each of which has `gpus` of its GPUs
    """

    number: int
    place: int
    gpus: int
    address: tuple[str, int]
    token: bytes


class End(msgspec.Struct, tag=True, array_like=True):
    """End an engine, if it is still running."""

    number: int


class Ended(msgspec.Struct, tag=True, array_like=True):
    """How an engine ended, in words."""

    number: int
    words: str


class Done(msgspec.Struct, tag=True, array_like=True):
    pass


Command = Accepted | Rejected | Begin | End | Done
Report = Join | Ended


class CommandStream(FrameReader[Command]):
    def __init__(self) -> None:
        super().__init__(msgspec.msgpack.Decoder(Command))


class ReportStream(FrameReader[Report]):
    def __init__(self) -> None:
        super().__init__(msgspec.msgpack.Decoder(Report))
