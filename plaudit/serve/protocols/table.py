"""One file per protocol: its routes, and how a request becomes scores. The wire formats are in `protocols/`."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Protocol

from plaudit.errors import ConfigError, nearest
from plaudit.serve.http.message import ErrorWriter, Route
from plaudit.serve.http.routes import Routes
from plaudit.serve.protocols.native.routes import NativeRoutes
from plaudit.serve.protocols.openr.routes import OpenRRoutes
from plaudit.serve.protocols.openrlhf.routes import OpenRLHFRoutes, SlimeRoutes
from plaudit.serve.protocols.sglang.routes import SGLangRoutes
from plaudit.serve.protocols.tei.routes import InfinityRoutes, TeiRoutes
from plaudit.serve.protocols.triton.routes import TritonRoutes
from plaudit.serve.protocols.vllm.routes import VllmRoutes
from plaudit.serve.scoring import ScoringService


class ProtocolRoutes(Protocol):
    """shapes  by a path's beginning, how errors of paths that do not exist are written"""

    shapes: Mapping[str, ErrorWriter]

    def routes(self) -> list[Route]: ...


# On a path that several have, the one that stands first and claims the body gets it; the last takes what is left.
PROTOCOLS: dict[str, Callable[[ScoringService], ProtocolRoutes]] = {
    "triton": TritonRoutes,
    "openrlhf": OpenRLHFRoutes,
    "slime": SlimeRoutes,
    "openr": OpenRRoutes,
    "sglang": SGLangRoutes,
    "tei": TeiRoutes,
    "infinity": InfinityRoutes,
    "vllm": VllmRoutes,
}
NATIVE = "native"


def protocol_names() -> tuple[str, ...]:
    return NATIVE, *PROTOCOLS


def check_names(names: Sequence[str], what: str) -> None:
    for name in names:
        if name not in protocol_names():
            raise ConfigError(f"{what} names the protocol {name!r}; {nearest(name, protocol_names())}")


def protocol_routes(scoring: ScoringService, names: Sequence[str] | None) -> Routes:
    """The routes of these protocols, of all if None. The native ones are always there."""
    protocols: list[ProtocolRoutes] = [
        make(scoring) for name, make in PROTOCOLS.items() if names is None or name in names
    ]
    others = [route for protocol in protocols for route in protocol.routes()]
    native = NativeRoutes(scoring, others)
    shapes = {start: writer for protocol in protocols for start, writer in protocol.shapes.items()}
    strangers = {
        start: route
        for protocol in protocols
        if isinstance(protocol, TritonRoutes)
        for start, route in protocol.strangers()
    }
    return Routes([*native.routes(), *others], shapes, strangers)
