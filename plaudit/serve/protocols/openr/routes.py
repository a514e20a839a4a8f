"""OpenR: a process reward worker, and the controller of its own models."""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Mapping
from functools import partial

import msgspec

from plaudit.records import Item, ItemError, StepScores
from plaudit.serve.http.message import ErrorWriter, HttpError, Reply, Request, Route
from plaudit.serve.protocols.openr import wire as openr
from plaudit.serve.scoring import PROCESS_MODEL, ScoringService

VALUE, STATUS = "/worker_value_inference", "/worker_get_status"


class OpenRRoutes:
    shapes: Mapping[str, ErrorWriter] = {}

    def __init__(self, scoring: ScoringService) -> None:
        self.scoring = scoring
        models = [name for name, served in scoring.models.served.items() if served.kind == "process"]
        self.names = [*models, *(alias for alias, name in scoring.aliases.items() if name in models)]

    def routes(self) -> list[Route]:
        routes = [
            _route("/get_worker_address", self.address, "OpenR: the address at which a model's worker answers"),
            _route("/list_models", self.models, "OpenR: list the process models"),
            _route("/register_worker", self.register, "OpenR: always refused, no other workers are taken"),
            _route("/receive_heart_beat", self.register, "OpenR: always refused, no other workers are taken"),
        ]
        # A worker has one model and its requests do not name it; so each model is a worker with an address of its own.
        for name, start in ((PROCESS_MODEL, ""), *((name, f"/openr/{name}") for name in self.names)):
            routes.append(
                _route(start + VALUE, partial(self.value, name), "OpenR: scores of a text's steps", work=True)
            )
            routes.append(_route(start + STATUS, partial(self.status, name), "OpenR: what waits for the worker"))
        return routes

    async def address(self, request: Request) -> Reply:
        name = openr.read_model(await _fields(request))
        # Where this connection arrived, and not what the Host header says: that is the client's word.
        host, port = request.server
        shown = f"[{host}]" if ":" in host else host
        return Reply.json({"address": f"http://{shown}:{port}/openr/{name}" if name in self.names else ""})

    async def models(self, request: Request) -> Reply:
        return Reply.json({"models": self.names})

    async def register(self, request: Request) -> Reply:
        raise HttpError(
            403, "forbidden", "this server is the controller of its own models only; run OpenR's controller and "
            "register this server there",
        )  # fmt: skip

    async def status(self, name: str, request: Request) -> Reply:
        served = self.scoring.find_model(name, "process")
        names = [n for n in self.names if self.scoring.find(n) is served]
        return Reply.json(openr.status(names, served.deployment.queue.items))

    async def value(self, name: str, request: Request) -> Reply:
        parsed = openr.read_value(request.fields())
        served = self.scoring.find_model(name, "process")
        items = []
        for place, row in enumerate(await served.tokenise(parsed.texts, special=True)):
            if isinstance(row, ItemError):
                raise HttpError(422, row.type, f"input_str[{place}]: {row.message}")
            items.append(Item(tokens=tuple(row)))
        scored = await self.scoring.score(request, served, items)
        self.scoring.values(scored.results, "input_str")
        return Reply.json(openr.write_value(parsed, [r.values for r in scored.results if isinstance(r, StepScores)]))


async def _fields(request: Request) -> dict[str, object]:
    request.content = await request.body()
    return request.fields()


def _route(path: str, handler: Callable[[Request], Awaitable[Reply]], summary: str, *, work: bool = False) -> Route:
    return Route("POST", path, "key", handler, "openr", work, summary, _write_error)


def _write_error(error: HttpError, request_id: str) -> Reply:
    """FastChat's shape, with a status that says that it is an error."""
    code = {401: 40101, 429: 42901}.get(error.status, 40001 if error.status < 500 else 50001)
    body = msgspec.json.encode({"text": str(error), "error_code": code})
    return Reply(error.status, body, headers=error.reply(request_id).headers)
