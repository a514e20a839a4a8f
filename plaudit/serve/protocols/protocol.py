"""The base class of protocols: how routes are declared and unreadable inputs are rejected."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from typing import ClassVar

from plaudit.records import ItemError
from plaudit.serve.http.message import Access, Claims, ErrorWriter, Handler, HttpError, Reply, Route
from plaudit.serve.scoring import ScoringService


class ProtocolRoutes(ABC):
    """name    the protocol's name in `--protocols` and `--allow-open`
    errors  writes an error
    shapes  error writers for paths that do not exist, by path prefix
    fields  whether its handlers read bodies as JSON objects
    """

    name: ClassVar[str]
    shapes: ClassVar[Mapping[str, ErrorWriter]] = {}
    fields: ClassVar[bool] = True

    def __init__(self, scoring: ScoringService) -> None:
        self.scoring = scoring

    @abstractmethod
    def routes(self) -> list[Route]: ...

    def base_routes(self) -> list[Route]:
        """Additional routes below its base path /NAME, whose paths belong to another protocol elsewhere."""
        return []

    def catch_alls(self) -> list[tuple[str, Route]]:
        """Catch-all routes by path prefix, for all other paths there."""
        return []

    @staticmethod
    def errors(error: HttpError, request_id: str) -> Reply:
        return error.reply(request_id)

    def route(self, method: str, path: str, handler: Handler, summary: str, access: Access = "key") -> Route:
        return Route(method, path, access, handler, self.name, False, summary, self.errors)

    def work(
        self, path: str, handler: Handler, summary: str, claims: Claims | None = None, method: str = "POST",
        parameters: tuple[str, ...] = (),
    ) -> Route:  # fmt: skip
        return Route(
            method, path, "key", handler, self.name, True, summary, self.errors, claims, self.fields, parameters
        )


def sound(rows: Sequence[list[int] | ItemError], what: str, status: int = 422) -> list[list[int]]:
    """The token ids of all inputs. These protocols have no error for one input: an invalid input fails its request."""
    for place, row in enumerate(rows):
        if isinstance(row, ItemError):
            raise HttpError(status, row.type, f"{what}[{place}]: {row.message}")
    return [row for row in rows if not isinstance(row, ItemError)]
