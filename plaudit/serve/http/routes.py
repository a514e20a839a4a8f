"""A route: a method, an exact path, who may call it, what answers. Their table is all that the server serves.

Where two protocols have the same path, the body decides: every route but the last of them says which bodies are its own
(`claims`), in the order in which the protocols are listed.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping

from plaudit.serve.http.message import ErrorWriter, HttpError, Request, Route


class Endpoint:
    """What one method of one path leads to: mostly one route, sometimes several."""

    def __init__(self, routes: list[Route]) -> None:
        self.routes = tuple(routes)
        self.last = routes[-1]
        self.protocols = frozenset(route.protocol for route in routes)
        for route in routes[:-1]:
            if route.claims is None:
                raise ValueError(f"{route.protocol} and others have {route.method} {route.path}, and no claims")
        if len({(route.access, route.work) for route in routes}) > 1:
            raise ValueError(f"the routes of {self.last.method} {self.last.path} differ in access or work")

    def choose(self, request: Request) -> Route:
        if len(self.routes) == 1:
            return self.last
        fields = request.fields()
        return next((r for r in self.routes if r.claims is not None and r.claims(fields)), self.last)


class Routes:
    """shapes     by a path's beginning, how errors of paths that do not exist are written
    strangers  by a path's beginning, the route that all other paths there lead to, whatever their method
    """

    def __init__(
        self, routes: Iterable[Route], shapes: Mapping[str, ErrorWriter] | None = None,
        strangers: Mapping[str, Route] | None = None,
    ) -> None:  # fmt: skip
        self.all = tuple(routes)
        self._shapes = dict(shapes or {})
        self._strangers = {start: Endpoint([route]) for start, route in (strangers or {}).items()}
        claimed: dict[str, dict[str, list[Route]]] = {}
        for route in self.all:
            claimed.setdefault(route.path, {}).setdefault(route.method, []).append(route)
        self._by_path = {
            path: {method: Endpoint(routes) for method, routes in methods.items()} for path, methods in claimed.items()
        }

    def find(self, method: str, path: str) -> Endpoint:
        methods = self._by_path.get(path)
        if methods is None:
            for start, stranger in self._strangers.items():
                if path.startswith(start):
                    return stranger
            raise HttpError(404, "not_found", "no such path; see /docs")
        place = methods.get(method)
        if place is None:
            allowed = ", ".join(sorted(methods))
            raise HttpError(405, "method_not_allowed", f"this path takes {allowed}", allow=allowed)
        return place

    def errors(self, path: str) -> ErrorWriter:
        return next((writer for start, writer in self._shapes.items() if path.startswith(start)), HttpError.reply)
