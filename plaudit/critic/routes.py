"""The routes of a critic server: NeMo-Aligner's three models under /v2, its state, health and metrics."""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Mapping
from functools import partial
from typing import Any

import msgspec
import numpy as np

from plaudit import __version__
from plaudit.critic.host import CriticHost
from plaudit.errors import one_line
from plaudit.serve.http.message import Access, HttpError, Reply, Request, Route, Routes
from plaudit.serve.protocols.critic import wire as critic
from plaudit.serve.protocols.triton import wire as triton
from plaudit.serve.protocols.triton.routes import packed
from plaudit.serve.protocols.triton.wire import Infer, Signature

READING, WRITING = "triton", "critic-train"  # the names for --allow-open
PROTOCOLS = (READING, WRITING)

Outcome = tuple[dict[str, np.ndarray], dict[str, Any]]
Compute = Callable[[Infer, Request], Awaitable[Outcome]]


class CriticRoutes:
    """guarded  whether routes that change the critic need the admin key"""

    def __init__(self, host: CriticHost, *, guarded: bool) -> None:
        self.host = host
        self.most_rows = host.table.limits.items
        self._changing: Access = "admin" if guarded else "key"
        infer = critic.INFER if host.table.reward is None else critic.INFER_BOTH
        self.models: dict[str, tuple[Signature, Compute]] = {
            "critic_infer": (infer, self.infer),
            "critic_train": (critic.TRAIN, self.train),
            "critic_save": (critic.SAVE, self.save),
        }

    def routes(self) -> Routes:
        routes = [
            Route("GET", "/v1/critic", "key", self.state, summary="The critic's model and training state"),
            Route(
                "POST", "/v1/critic/load", self._changing, self.load, WRITING, True, "Load a save",
                critic.write_error,
            ),
            Route("GET", "/health/live", "open", self.live, summary="The process answers"),
            Route("GET", "/health/ready", "open", self.ready, summary="The critic is ready"),
            Route("GET", "/health", "open", self.ready, summary="The same, at the path other systems expect"),
            Route("GET", "/metrics", "metrics", self.metrics, summary="Prometheus metrics"),
            self._route("GET", "/v2", self.server, "key"),
            self._route("GET", "/v2/health/live", self.live, "open"),
            self._route("GET", "/v2/health/ready", self.ready, "open"),
            self._route("POST", "/v2/repository/index", self.index, "key"),
        ]  # fmt: skip
        for name, (signature, compute) in self.models.items():
            reads = name == "critic_infer"
            access: Access = "key" if reads else self._changing
            for start in (f"/v2/models/{name}", f"/v2/models/{name}/versions/1"):
                about = triton.metadata(name, signature), triton.config(name, self.most_rows, signature)
                answer = partial(self._answer, name, signature, compute)
                routes += [
                    self._route("GET", start, partial(_static_reply, about[0]), "key"),
                    self._route("GET", f"{start}/config", partial(_static_reply, about[1]), "key"),
                    self._route("GET", f"{start}/ready", self.ready, "open"),
                    Route(
                        "POST", f"{start}/infer", access, answer, READING if reads else WRITING, True, "Triton",
                        critic.write_error,
                    ),
                ]  # fmt: skip
        return Routes(routes, {"/v2": critic.write_error})

    @staticmethod
    def _route(method: str, path: str, handler: Callable[[Request], Awaitable[Reply]], access: Access) -> Route:
        return Route(method, path, access, handler, READING, False, "Triton", critic.write_error)

    async def _answer(self, name: str, signature: Signature, compute: Compute, request: Request) -> Reply:
        header = request.headers.get(b"inference-header-content-length")
        size = triton.json_size(header, len(request.content))
        infer = await request.aside(triton.read_infer, header, self.most_rows, signature, json_bytes=size)
        outputs, parameters = await compute(infer, request)
        body, head = triton.write_infer(infer, name, outputs, parameters)
        return packed(body, head, request.headers.get(b"accept-encoding", b""))

    async def infer(self, infer: Infer, request: Request) -> Outcome:
        rows = triton.reward_rows(infer)
        values, rewards = await self.host.evaluate(rows, request)
        columns = max(map(len, values), default=0) if rows.tokens is None else infer.tensors["tokens"].shape[1]
        outputs = {"values": critic.padded(values, columns)}
        if rewards is not None:
            outputs["rewards"] = rewards
        return outputs, {}

    async def train(self, infer: Infer, request: Request) -> Outcome:
        metrics = await self.host.learn(critic.read_training_rows(infer), request)
        return {"loss_mean": np.array([metrics["value/loss"]], dtype=np.float32)}, metrics

    async def save(self, infer: Infer, request: Request) -> Outcome:
        critic.check_save(infer)
        saved = await self.host.save(request)
        return {"status": np.zeros(1, dtype=np.int64)}, {"save": saved.save, "updates": saved.updates}

    async def load(self, request: Request) -> Reply:
        try:
            body = msgspec.json.decode(request.content, type=_Load)
        except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
            raise HttpError(400, "invalid_request", one_line(error, 200)) from None
        await self.host.load(body.save, request)
        return await self.state(request)

    async def state(self, request: Request) -> Reply:
        return Reply.json(self.host.describe()[0])

    async def server(self, request: Request) -> Reply:
        return Reply.json(triton.server_metadata(__version__))

    async def index(self, request: Request) -> Reply:
        reasons = "; ".join(await self.host.unready())
        return Reply.json(triton.index([(name, not reasons, reasons) for name in self.models]))

    async def live(self, request: Request) -> Reply:
        return Reply.json({"status": "live"})

    async def ready(self, request: Request) -> Reply:
        reasons = await self.host.unready()
        if not reasons:
            return Reply.json({"status": "ready"})
        reply = Reply.json({"status": "not ready", "reasons": reasons}, 503)
        reply.headers.append((b"retry-after", b"1"))
        return reply

    async def metrics(self, request: Request) -> Reply:
        return Reply(200, self.host.metrics.text(), b"text/plain; version=0.0.4; charset=utf-8")


class _Load(msgspec.Struct, forbid_unknown_fields=True):
    save: str


async def _static_reply(tree: Mapping[str, Any], request: Request) -> Reply:
    return Reply.json(tree)
