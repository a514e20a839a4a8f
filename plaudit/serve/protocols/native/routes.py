"""The native routes: rewards, the list of models, model swaps, health, metrics, live page and documentation."""

from __future__ import annotations

import time
from collections.abc import Awaitable, Sequence
from pathlib import Path
from typing import Annotated, Any, TypeVar

import msgspec

from plaudit import __version__
from plaudit.errors import PlauditError, StorageError, one_line
from plaudit.records import Item
from plaudit.serve.handle import Result
from plaudit.serve.http.message import HttpError, Reply, Request, Route
from plaudit.serve.protocols.native import wire as native
from plaudit.serve.protocols.openapi import docs_page, openapi
from plaudit.serve.protocols.vllm import wire as vllm
from plaudit.serve.scoring import ScoringService

REWARDS = "Score responses, or the steps of responses"
MODELS = "List the models, with kind, version and state"
ONE_MODEL = "/v1/models/"  # followed by a name or alias, as OpenAI clients request it
HTML = b"text/html; charset=utf-8"
PAGE = Path(__file__).with_name("page.html").read_text(encoding="utf-8")  # loads nothing from the network


class NativeRoutes:
    """others  routes of the other protocols, for the documentation"""

    def __init__(self, scoring: ScoringService, others: Sequence[Route] = ()) -> None:
        self.scoring = scoring
        self.models = scoring.models
        self.others = others
        self.began = time.monotonic()
        self.created = int(time.time())

    def routes(self) -> list[Route]:
        return [
            Route("POST", "/v1/rewards", "key", self.rewards, work=True, summary=REWARDS),
            Route("GET", "/v1/models", "key", self.list_models, summary=MODELS),
            Route("POST", "/admin/swap", "admin", self.swap, summary="Replace a model by another directory"),
            Route("GET", "/admin/swaps", "admin", self.swaps, summary="Canaries, and swaps started with wait false"),
            Route(
                "POST", "/admin/rollback", "admin", self.rollback, summary="Remove the canary, or undo the last swap"
            ),
            Route("POST", "/admin/promote", "admin", self.promote, summary="Send all requests to the canary"),
            Route("POST", "/admin/scale", "admin", self.scale, summary="Set the number of a model's replicas"),
            Route("GET", "/health/live", "open", self.live, summary="Liveness: 503 if a model has failed permanently"),
            Route(
                "GET",
                "/health/ready",
                "open",
                self.ready,
                summary="Readiness: 200 if every model, or ?model=NAME, is ready",
            ),
            Route("GET", "/health", "open", self.ready, summary="Readiness, at the path load balancers expect"),
            Route("GET", "/metrics", "metrics", self.metrics, summary="Metrics in Prometheus format"),
            Route("GET", "/stats", "key", self.stats, summary="Statistics of the last minutes, for the live page"),
            Route("GET", "/", "open", self.page, summary="The live page: load, models, a form to try them"),
            Route("GET", "/docs", "open", self.docs, summary="This page: every route of the server"),
            Route("GET", "/openapi.json", "open", self.openapi, summary="This documentation as an OpenAPI document"),
        ]

    async def rewards(self, request: Request) -> Reply:
        kind = request.content_type()
        if kind == native.BINARY:
            parsed = native.read_binary(request.content, request.query, self.scoring.most_items)
        elif kind == b"application/json":
            parsed = await request.aside(native.read_json, self.scoring.most_items)
        else:
            content_type, binary = kind[:60].decode("latin-1"), native.BINARY.decode()
            cure = f"expected application/json (curl: -H 'Content-Type: application/json') or {binary}"
            raise HttpError(415, "unsupported_type", f"Content-Type {content_type!r}; {cure}")
        served = self.scoring.find(parsed.model)
        request.model = served.name
        if parsed.steps and served.kind != "process":
            raise HttpError(422, "not_a_process_model", f"{served.name} is not a process model: it has no step scores")
        items = [item for group in parsed.groups if not isinstance(group, str) for item in group]
        scored = await self.scoring.score(request, served, items, priority=parsed.priority, cache=parsed.cache)
        results = _regrouped(parsed.groups, scored.results)
        usage = {"items": len(items), "tokens": scored.tokens}
        if kind == native.BINARY:
            body = native.write_binary(served.name, scored.version, results, usage, request.id)
            return Reply(200, body, native.BINARY_REPLY)
        return Reply.json(native.write_json(parsed, served.name, scored.version, results, usage, request.id))

    async def list_models(self, request: Request) -> Reply:
        return Reply.json({"object": "list", "data": self._cards()})

    async def show_model(self, request: Request) -> Reply:
        if request.method != "GET":
            raise HttpError(405, "method_not_allowed", "this path accepts GET", allow="GET")
        meant = self.scoring.find(request.path.rpartition(ONE_MODEL)[2]).name
        return Reply.json(next(card for card in self._cards() if card["id"] == meant))

    def _cards(self) -> list[dict[str, Any]]:
        keys = ("name", "kind", "version", "state", "max_tokens", "labels")
        models = [{k: d[k] for k in keys if k in d} for d in self.models.describe()]
        # vLLM clients also read the root. The model's path stays private, so its root is its name.
        cards = [vllm.model_card(m["name"], m["name"], m.get("max_tokens"), self.created) for m in models]
        return [{"id": m["name"], "object": "model", **m, **card} for m, card in zip(models, cards, strict=True)]

    async def scale(self, request: Request) -> Reply:
        order = await _decoded(request, _Scale)
        try:
            self.models.scale(order.model, order.replicas)
        except PlauditError as error:
            raise HttpError(400, "scale_failed", str(error)) from None
        return Reply.json({"model": order.model, "replicas": order.replicas})

    async def swap(self, request: Request) -> Reply:
        order = await _decoded(request, _Swap)
        if order.path is None:
            if order.share is None:
                raise HttpError(400, "invalid_request", "a swap needs a path, or the new share of a canary")
            return await self._replaced(order.model, self.models.share(order.model, order.share))
        if not order.wait:
            return Reply.json(self.models.start_swap(order.model, order.path, order.share), 202)
        return await self._replaced(order.model, self.models.swap(order.model, order.path, order.share))

    async def swaps(self, request: Request) -> Reply:
        canaries = [{"model": d["name"], **d["canary"]} for d in self.models.describe() if d.get("canary")]
        return Reply.json({"swaps": self.models.started_swaps(), "canaries": canaries})

    async def promote(self, request: Request) -> Reply:
        order = await _decoded(request, _Named)
        return await self._replaced(order.model, self.models.promote(order.model))

    async def rollback(self, request: Request) -> Reply:
        order = await _decoded(request, _Named)
        return await self._replaced(order.model, self.models.rollback(order.model))

    async def _replaced(self, model: str, replacing: Awaitable[str]) -> Reply:
        try:
            return Reply.json({"model": model, "version": await replacing})
        except StorageError as error:  # a full disk, not the request
            raise HttpError(507, "storage", f"{self.models.scrub(str(error))}; nothing has changed") from None
        except PlauditError as error:
            raise HttpError(400, "swap_failed", f"{self.models.scrub(str(error))}; nothing has changed") from None

    async def live(self, request: Request) -> Reply:
        uptime = round(time.monotonic() - self.began, 1)
        if lost := self.models.given_up():
            return Reply.json({"status": "failed", "models": lost, "uptime": uptime}, 503)
        return Reply.json({"status": "live", "uptime": uptime})

    async def ready(self, request: Request) -> Reply:
        reasons = await self.models.unready(request.parameters().get("model"))
        if not reasons:
            return Reply.json({"status": "ready"})
        reply = Reply.json({"status": "not ready", "reasons": reasons}, 503)
        reply.headers.append((b"retry-after", b"1"))
        return reply

    async def metrics(self, request: Request) -> Reply:
        self.models.update_gauges()
        return Reply(200, self.models.metrics.text(), b"text/plain; version=0.0.4; charset=utf-8")

    async def stats(self, request: Request) -> Reply:
        return Reply.json(self.models.stats(request.tenant, everyone="admin" in request.roles))

    async def page(self, request: Request) -> Reply:
        return _html(PAGE)

    async def docs(self, request: Request) -> Reply:
        return _html(docs_page([*self.routes(), *self.others]))

    async def openapi(self, request: Request) -> Reply:
        return Reply.json(openapi([*self.routes(), *self.others], __version__))


class _Swap(msgspec.Struct, forbid_unknown_fields=True):
    model: str
    path: str | None = None
    wait: bool = True
    share: Annotated[float, msgspec.Meta(gt=0, lt=1)] | None = None


class _Named(msgspec.Struct, forbid_unknown_fields=True):
    model: str


class _Scale(msgspec.Struct, forbid_unknown_fields=True):
    model: str
    replicas: Annotated[int, msgspec.Meta(ge=1, le=1024)]


A = TypeVar("A", _Swap, _Named, _Scale)


async def _decoded(request: Request, kind: type[A]) -> A:
    try:
        return msgspec.json.decode(await request.body(), type=kind)
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
        raise HttpError(400, "invalid_request", one_line(error, 200)) from None


def _regrouped(groups: list[list[Item] | str], results: list[Result]) -> list[list[Result] | str]:
    regrouped: list[list[Result] | str] = []
    at = 0
    for group in groups:
        if isinstance(group, str):
            regrouped.append(group)
        else:
            regrouped.append(results[at : at + len(group)])
            at += len(group)
    return regrouped


def _html(text: str) -> Reply:
    policy = (
        b"default-src 'none'; style-src 'unsafe-inline'; script-src 'unsafe-inline'; connect-src 'self'; img-src data:"
    )
    return Reply(
        200, text.encode(), HTML, [(b"content-security-policy", policy), (b"x-content-type-options", b"nosniff")]
    )
