"""The table of protocols and their routes. The wire formats are in the protocols' own files."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from plaudit.errors import ConfigError, nearest
from plaudit.serve.http.message import Route, Routes
from plaudit.serve.protocols.native.routes import ONE_MODEL, NativeRoutes
from plaudit.serve.protocols.nemo_gym import NemoGymRoutes
from plaudit.serve.protocols.openai.routes import OpenAIRoutes
from plaudit.serve.protocols.openai.wire import write_error
from plaudit.serve.protocols.openr import OpenRRoutes
from plaudit.serve.protocols.openrlhf import OpenRLHFRoutes, SlimeRoutes
from plaudit.serve.protocols.protocol import ProtocolRoutes
from plaudit.serve.protocols.sglang.routes import SGLangRoutes
from plaudit.serve.protocols.tei.routes import InfinityRoutes, TeiRoutes
from plaudit.serve.protocols.triton.routes import TritonRoutes
from plaudit.serve.protocols.vllm.routes import VllmRoutes
from plaudit.serve.scoring import ScoringService

# On a shared path the first protocol that claims the body handles it; the last one handles the rest.
PROTOCOLS: dict[str, type[ProtocolRoutes]] = {
    each.name: each
    for each in (
        TritonRoutes, OpenRLHFRoutes, SlimeRoutes, OpenRRoutes, SGLangRoutes, TeiRoutes, InfinityRoutes, VllmRoutes,
        OpenAIRoutes, NemoGymRoutes,
    )
}  # fmt: skip
NATIVE = "native"
BELOW_BASE = (
    "/health",
    "/health/live",
    "/health/ready",
    "/v1/models",
    "/metrics",
)  # native routes that clients of other protocols use


def protocol_names() -> tuple[str, ...]:
    return NATIVE, *PROTOCOLS


def check_names(names: Sequence[str], what: str) -> None:
    for name in names:
        if name not in protocol_names():
            raise ConfigError(f"{what} names the protocol {name!r}; {nearest(name, protocol_names())}")


def protocol_routes(scoring: ScoringService, names: Sequence[str] | None, more: Sequence[Route] = ()) -> Routes:
    """The routes of these protocols, or of all if None. The native routes are always included. `more`: additional
    routes of these protocols, which are tried before all others."""
    protocols = [make(scoring) for name, make in PROTOCOLS.items() if names is None or name in names]
    spoken = {NATIVE, *(protocol.name for protocol in protocols)}
    more = [route for route in more if route.protocol in spoken]
    others = [*more, *(route for protocol in protocols for route in protocol.routes())]
    shapes = {start: writer for protocol in protocols for start, writer in protocol.shapes.items()}
    catch_alls: dict[str, Route] = {}
    for protocol in protocols:
        catch_alls.update(protocol.catch_alls())
    our = NativeRoutes(scoring, others)
    native = our.routes()
    for base in ("", *(f"/{protocol.name}" for protocol in protocols)):
        path = f"{base}{ONE_MODEL}"
        catch_alls[path] = Route("", path, "key", our.show_model, base[1:] or NATIVE, errors=write_error)
    based = [route for protocol in protocols for route in below_base_path(protocol, native, more)]
    shapes |= {f"/{protocol.name}/": protocol.errors for protocol in protocols}
    return Routes([*native, *others, *based], shapes, catch_alls)


def below_base_path(protocol: ProtocolRoutes, native: Sequence[Route], more: Sequence[Route] = ()) -> list[Route]:
    """The protocol's routes below /NAME, with the health and model routes its clients use: a client whose URL ends in
    /NAME gets this protocol, even for paths that other protocols share."""
    further = [route for route in more if route.protocol == protocol.name]
    own = [*further, *protocol.routes(), *protocol.base_routes()]
    taken = {(route.method, route.path) for route in own}
    common = [route for route in native if (route.method, route.path) not in taken and route.path in BELOW_BASE]
    return [replace(route, path=f"/{protocol.name}{route.path}", protocol=protocol.name) for route in (*own, *common)]
