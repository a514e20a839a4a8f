"""What a search and its workers say to each other, over a socket: length-prefixed MessagePack, no pickle.

search -> worker   Start, then for each method Begin, and for each Ready an Assigned
worker -> search   Loaded, Alive (every second), Ready, Result, Done; or Failed, and the end
"""

from __future__ import annotations

from typing import Any

import msgspec

from plaudit.process.worker import Alive, Failed


class Start(msgspec.Struct, tag=True, array_like=True):
    """The recipes of the run, which differ in [search] alone, and which of how many workers this is."""

    recipes: list[dict[str, Any]]
    number: int
    workers: int


class Begin(msgspec.Struct, tag=True, array_like=True):
    """From now on by this recipe."""

    recipe: dict[str, Any]


class Assigned(msgspec.Struct, tag=True, array_like=True):
    """The index of the next question; None: there are no more."""

    question: int | None


class Loaded(msgspec.Struct, tag=True, array_like=True):
    pass


class Ready(msgspec.Struct, tag=True, array_like=True):
    """There is room for a question."""


class Result(msgspec.Struct, tag=True, array_like=True):
    """A question, as a line of results.jsonl."""

    line: dict[str, Any]


class Done(msgspec.Struct, tag=True, array_like=True):
    """All that were given. Seconds of each phase, and answers that could not be compared."""

    phases: dict[str, float]
    undecided: int


ToWorker = Start | Begin | Assigned
FromWorker = Loaded | Ready | Result | Done | Alive | Failed
TO_WORKER: msgspec.msgpack.Decoder[ToWorker] = msgspec.msgpack.Decoder(ToWorker)
FROM_WORKER: msgspec.msgpack.Decoder[FromWorker] = msgspec.msgpack.Decoder(FromWorker)
