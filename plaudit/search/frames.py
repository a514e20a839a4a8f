"""The messages between a search and its worker processes, over a socket: length-prefixed MessagePack, no pickle.

search -> worker   Start, then for each method Begin, and for each Ready an Assigned
worker -> search   Loaded, Alive (every second), Ready, Result, Done; or Failed, then exit
"""

from __future__ import annotations

from typing import Any

import msgspec

from plaudit.process.worker import Alive, Failed


class Start(msgspec.Struct, tag=True, array_like=True):
    """The recipes of the run, which differ only in [search], and this worker's number and the number of workers."""

    recipes: list[dict[str, Any]]
    number: int
    workers: int


class Begin(msgspec.Struct, tag=True, array_like=True):
    """Use this recipe from now on."""

    recipe: dict[str, Any]


class Assigned(msgspec.Struct, tag=True, array_like=True):
    """The index of the next question; None: there are no more."""

    question: int | None


class Loaded(msgspec.Struct, tag=True, array_like=True):
    pass


class Ready(msgspec.Struct, tag=True, array_like=True):
    """The worker has capacity for a question."""


class Result(msgspec.Struct, tag=True, array_like=True):
    """A finished question, as a line of results.jsonl."""

    line: dict[str, Any]


class Done(msgspec.Struct, tag=True, array_like=True):
    """All assigned questions are finished. Seconds of each phase, and the number of undecided comparisons."""

    phases: dict[str, float]
    undecided: int


ToWorker = Start | Begin | Assigned
FromWorker = Loaded | Ready | Result | Done | Alive | Failed
TO_WORKER: msgspec.msgpack.Decoder[ToWorker] = msgspec.msgpack.Decoder(ToWorker)
FROM_WORKER: msgspec.msgpack.Decoder[FromWorker] = msgspec.msgpack.Decoder(FromWorker)
