"""OpenR's process reward worker, and the part of its FastChat controller that clients of the worker need.

POST /get_worker_address       {"model": "NAME"} -> {"address": "http://..."}, "" for a name that is not served
POST <address>/worker_value_inference
     {"input_str": "<question and steps with their tags>" or ["...", ...]}
     -> {"input": unchanged, "value": [step scores], or a list of them for a list}
POST /worker_get_status        -> {"model_names", "speed", "queue_length"}
POST /list_models              -> {"models": ["NAME", ...]}
"""

from __future__ import annotations

from functools import partial

import msgspec

from plaudit.records import Item, StepScores
from plaudit.serve.http.message import HttpError, Reply, Request, Route, convert
from plaudit.serve.protocols.protocol import ProtocolRoutes, sound
from plaudit.serve.scoring import PROCESS_MODEL, ScoringService

VALUE, STATUS = "/worker_value_inference", "/worker_get_status"
ADDRESS = "OpenR: the address of a model's worker"


class _Model(msgspec.Struct):
    model: str


class _Value(msgspec.Struct):
    input_str: str | list[str]


class OpenRRoutes(ProtocolRoutes):
    name = "openr"

    def __init__(self, scoring: ScoringService) -> None:
        super().__init__(scoring)
        models = [name for name, served in scoring.models.served.items() if served.kind == "process"]
        aliases = [alias for alias, name in scoring.aliases.items() if name in models and alias not in models]
        self.names = [*models, *aliases]

    def routes(self) -> list[Route]:
        refused = "OpenR: always rejected, no other workers can register"
        routes = [
            self.route("POST", "/get_worker_address", self.address, ADDRESS),
            self.route("POST", "/list_models", self.models, "OpenR: list the process models"),
            self.route("POST", "/register_worker", self.register, refused),
            self.route("POST", "/receive_heart_beat", self.register, refused),
        ]
        # An OpenR worker serves one model, which requests do not name; so each model gets its own worker address.
        for name, start in ((PROCESS_MODEL, ""), *((name, f"/openr/{name}") for name in self.names)):
            status = partial(self.status, name)
            routes.append(self.work(start + VALUE, partial(self.value, name), "OpenR: scores of a text's steps"))
            routes.append(self.route("POST", start + STATUS, status, "OpenR: the worker's queue"))
        return routes

    @staticmethod
    def errors(error: HttpError, request_id: str) -> Reply:
        """FastChat's error format, but with an HTTP error status."""
        code = {401: 40101, 429: 42901}.get(error.status, 40001 if error.status < 500 else 50001)
        return error.shaped({"text": str(error), "error_code": code}, request_id)

    async def address(self, request: Request) -> Reply:
        request.content = await request.body()
        await request.read_fields()
        name = convert(request.fields(), _Model).model
        # The address of this connection, not the Host header, which the client controls.
        host, port = request.server
        if port is None:
            raise HttpError(
                422,
                "no_address",
                "the server listens on a unix socket, which has no URL; start it with --host and --port",
            )
        shown = f"[{host}]" if ":" in host else host
        return Reply.json({"address": f"{request.scheme}://{shown}:{port}/openr/{name}" if name in self.names else ""})

    async def models(self, request: Request) -> Reply:
        return Reply.json({"models": self.names})

    async def register(self, request: Request) -> Reply:
        raise HttpError(
            403, "forbidden", "this server controls only its own models; run OpenR's controller and "
            "register this server there",
        )  # fmt: skip

    async def status(self, name: str, request: Request) -> Reply:
        served = self.scoring.find_model(name, "process")
        names = [n for n in self.names if self.scoring.find(n) is served]
        return Reply.json({"model_names": names, "speed": 1, "queue_length": served.deployment.queue.items})

    async def value(self, name: str, request: Request) -> Reply:
        texts = convert(request.fields(), _Value).input_str
        if texts == []:
            raise HttpError(422, "invalid_request", "input_str is an empty list; expected at least one text")
        served = self.scoring.find_model(name, "process")
        single = isinstance(texts, str)
        rows = sound(await served.tokenise([texts] if isinstance(texts, str) else texts, special=True), "input_str")
        scored = await self.scoring.score(request, served, [Item(tokens=tuple(row)) for row in rows])
        self.scoring.values(scored.results, "input_str")
        values = [list(result.values) for result in scored.results if isinstance(result, StepScores)]
        return Reply.json({"input": texts, "value": values[0] if single else values})
