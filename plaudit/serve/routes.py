"""A route: a method, an exact path, who may call it, what answers. Their table is all that the server serves."""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Iterable
from dataclasses import dataclass

from plaudit.serve.auth import Access
from plaudit.serve.http import HttpError, Reply, Request

Handler = Callable[[Request], Awaitable[Reply]]


@dataclass(frozen=True, slots=True)
class Route:
    """protocol  whose wire format it speaks, and the name by which `--allow-open` means it
    work      whether it brings work: such routes are closed while the server drains or is overloaded
    """

    method: str
    path: str
    access: Access
    handler: Handler
    protocol: str = "native"
    work: bool = False
    summary: str = ""


class Routes:
    def __init__(self, routes: Iterable[Route]) -> None:
        self.all = tuple(routes)
        self._by_path: dict[str, dict[str, Route]] = {}
        for route in self.all:
            methods = self._by_path.setdefault(route.path, {})
            if route.method in methods:
                raise ValueError(f"two routes for {route.method} {route.path}")
            methods[route.method] = route

    def find(self, method: str, path: str) -> Route:
        methods = self._by_path.get(path)
        if methods is None:
            raise HttpError(404, "not_found", "no such path; see /docs")
        route = methods.get(method)
        if route is None:
            taken = ", ".join(sorted(methods))
            raise HttpError(405, "method_not_allowed", f"this path takes {taken}", allow=taken)
        return route
