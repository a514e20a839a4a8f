"""One file per protocol: its routes, and how a request becomes scores. The wire formats are in `protocols/`."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Protocol

from plaudit.errors import ConfigError, nearest
from plaudit.serve.http.message import ErrorWriter, Route
from plaudit.serve.http.routes import Routes
from plaudit.serve.protocols.native.routes import NativeDoor
from plaudit.serve.protocols.openr.routes import OpenRDoor
from plaudit.serve.protocols.openrlhf.routes import OpenRLHFDoor, SlimeDoor
from plaudit.serve.protocols.sglang.routes import SGLangDoor
from plaudit.serve.protocols.tei.routes import InfinityDoor, TeiDoor
from plaudit.serve.protocols.triton.routes import TritonDoor
from plaudit.serve.protocols.vllm.routes import VllmDoor
from plaudit.serve.scoring import ScoringService


class ProtocolRoutes(Protocol):
    """shapes  by a path's beginning, how errors of paths that do not exist are written"""

    shapes: Mapping[str, ErrorWriter]

    def routes(self) -> list[Route]: ...


# On a path that several have, the one that stands first and claims the body gets it; the last takes what is left.
DOORS: dict[str, Callable[[ScoringService], ProtocolRoutes]] = {
    "triton": TritonDoor,
    "openrlhf": OpenRLHFDoor,
    "slime": SlimeDoor,
    "openr": OpenRDoor,
    "sglang": SGLangDoor,
    "tei": TeiDoor,
    "infinity": InfinityDoor,
    "vllm": VllmDoor,
}
NATIVE = "native"


def protocol_names() -> tuple[str, ...]:
    return NATIVE, *DOORS


def check_names(names: Sequence[str], what: str) -> None:
    for name in names:
        if name not in protocol_names():
            raise ConfigError(f"{what} names the protocol {name!r}; {nearest(name, protocol_names())}")


def open_doors(desk: ScoringService, names: Sequence[str] | None) -> Routes:
    """The routes of these protocols, of all if None. The native ones are always there."""
    doors: list[ProtocolRoutes] = [make(desk) for name, make in DOORS.items() if names is None or name in names]
    others = [route for door in doors for route in door.routes()]
    native = NativeDoor(desk, others)
    shapes = {start: writer for door in doors for start, writer in door.shapes.items()}
    strangers = {start: route for door in doors if isinstance(door, TritonDoor) for start, route in door.strangers()}
    return Routes([*native.routes(), *others], shapes, strangers)
