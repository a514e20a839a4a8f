"""Routes for Triton clients under /v2, with the tensors of NeMo-Aligner's reward models."""

from __future__ import annotations

import gzip
import zlib
from collections.abc import Mapping, Sequence
from functools import partial
from typing import ClassVar

import numpy as np

from plaudit import __version__
from plaudit.records import Item, Score
from plaudit.serve.handle import Result
from plaudit.serve.http.message import ErrorWriter, HttpError, Reply, Request, Route
from plaudit.serve.model import ServedModel
from plaudit.serve.protocols.protocol import ProtocolRoutes, sound
from plaudit.serve.protocols.triton import wire as triton
from plaudit.serve.scoring import SCORED, ScoringService

WORTH_PACKING = 1024  # bytes
MAX_NAMED = 20  # models listed in an error
METADATA = "Triton: inputs and outputs of the model in the path"
CONFIG = "Triton: configuration of the model in the path"
STATS = "Triton: counts and times of the model in the path"
READY = "Triton: 200 if the model in the path is ready"
INFER = "Triton and NeMo-Aligner: rewards of sentences or tokens by the model in the path"


class TritonRoutes(ProtocolRoutes):
    name = "triton"
    fields = False
    errors = staticmethod(triton.write_error)
    shapes: ClassVar[Mapping[str, ErrorWriter]] = {"/v2": triton.write_error}

    def __init__(self, scoring: ScoringService) -> None:
        super().__init__(scoring)
        served = scoring.models.served
        models = [name for name, model in served.items() if isinstance(model, ServedModel) and model.kind in SCORED]
        aliases = [alias for alias, name in scoring.aliases.items() if name in models and alias not in models]
        self.names = [*models, *aliases]

    def routes(self) -> list[Route]:
        routes = [
            self.route("GET", "/v2", self.server, "Triton: name, release and extensions of the server"),
            self.route("GET", "/v2/health/live", self.live, "Triton: 200 while the process answers", "open"),
            self.route("GET", "/v2/health/ready", self.ready, "Triton: 200 if every model is ready", "open"),
            self.route("POST", "/v2/repository/index", self.index, "Triton: list the models and their state"),
            self.route("GET", "/v2/models/stats", self.all_stats, "Triton: statistics of all models"),
        ]
        for name in self.names:
            for start in (f"/v2/models/{name}", f"/v2/models/{name}/versions/1"):
                routes += [
                    self.route("GET", start, partial(self.metadata, name), METADATA),
                    self.route("GET", f"{start}/config", partial(self.config, name), CONFIG),
                    self.route("GET", f"{start}/stats", partial(self.stats, name), STATS),
                    self.route("GET", f"{start}/ready", partial(self.model_ready, name), READY, "open"),
                    self.work(f"{start}/infer", partial(self.infer, name), INFER),
                ]
        return routes

    def catch_alls(self) -> list[tuple[str, Route]]:
        """The catch-all for paths of unknown models. It needs a key, because the error lists the served models."""
        return [("/v2/models/", self.route("", "/v2/models/", self.unknown, ""))]

    async def server(self, request: Request) -> Reply:
        return Reply.json(triton.server_metadata(__version__))

    async def unknown(self, request: Request) -> Reply:
        name, _, rest = request.path.removeprefix("/v2/models/").partition("/")
        served = ", ".join(self.names[:MAX_NAMED]) or "none"
        if rest.rpartition("/")[2] == "ready":
            raise HttpError(400, "unknown_model", f"Model version not ready: {request.path[:200]!r}; served: {served}")
        if name in self.names:
            raise HttpError(404, "not_found", f"no {rest[:100]!r} of model {name!r}; its only version is 1; see /docs")
        raise HttpError(
            404, "unknown_model", f"Request for unknown model: {name[:100]!r} is not found; served: {served}"
        )

    async def live(self, request: Request) -> Reply:
        return Reply(200, b"")

    async def ready(self, request: Request) -> Reply:
        return _health(await self.scoring.models.unready())

    async def model_ready(self, name: str, request: Request) -> Reply:
        return _health(await self.scoring.find(name).healthy())

    async def index(self, request: Request) -> Reply:
        statuses = [(name, self.scoring.find_model(name).status()) for name in self.names]
        return Reply.json(triton.index([(name, s.state == "ready", s.reason) for name, s in statuses]))

    async def metadata(self, name: str, request: Request) -> Reply:
        return Reply.json(triton.metadata(name, self._signature(name)))

    async def config(self, name: str, request: Request) -> Reply:
        return Reply.json(triton.config(name, self.scoring.most_items, self._signature(name)))

    async def stats(self, name: str, request: Request) -> Reply:
        return Reply.json(triton.statistics(self._counts([name])))

    async def all_stats(self, request: Request) -> Reply:
        return Reply.json(triton.statistics(self._counts(self.names)))

    async def infer(self, name: str, request: Request) -> Reply:
        header = request.headers.get(b"inference-header-content-length")
        size = triton.json_size(header, len(request.content))
        infer = await request.aside(triton.read_infer, header, self.scoring.most_items, json_bytes=size)
        inputs = triton.reward_rows(infer)
        served = self.scoring.find_model(name)
        if inputs.tokens is not None:
            tokens, exceeded = inputs.tokens, np.zeros((len(inputs.tokens), 1), dtype=np.int32)
        else:
            tokens, exceeded = await self._sentences(served, inputs, cut="exceeded" in infer.outputs)
        scored = await self.scoring.score(request, served, [Item(tokens=tuple(row)) for row in tokens])
        rows = [_labels(result) for result in scored.results] if name in self.scoring.unmerged else []
        if not rows or not all(rows):
            rows = [[value] for value in self.scoring.values(scored.results, "row")]
        outputs = {"rewards": _matrix(rows), "exceeded": exceeded}
        body, head = triton.write_infer(infer, name, outputs)
        return packed(body, head, request.headers.get(b"accept-encoding", b""))

    async def _sentences(
        self, served: ServedModel, rows: triton.Rows, *, cut: bool
    ) -> tuple[list[list[int]], np.ndarray]:
        """Tokenises without BOS and EOS, as the original does; truncates on the right if the caller reads
        `exceeded`."""
        intake = served.intake()
        end = rows.add_end and intake.tokenizer.eos_token_id is not None
        tokens: list[list[int]] = []
        exceeded: list[list[int]] = []
        for ids in sound(await served.tokenise(rows.sentences or [], special=False), "sentences", 400):
            ended = [*ids, intake.tokenizer.eos_token_id] if end else ids
            exceeded.append([int(len(ended) > intake.limit)])
            tokens.append(ended[: intake.limit] if cut else ended)
        return tokens, np.array(exceeded, dtype=np.int32).reshape(-1, 1)

    def _signature(self, name: str) -> triton.Signature:
        return triton.ATTRIBUTES if name in self.scoring.unmerged else triton.REWARD

    def _counts(self, names: Sequence[str]) -> dict[str, tuple[int, int, int]]:
        history = self.scoring.models.metrics.history
        counts = {name: history.model(self.scoring.find(name).name) for name in names}
        return {name: (c.items, c.failed, c.steps) for name, c in counts.items()}


def _health(reasons: object) -> Reply:
    return Reply(503, b"", headers=[(b"retry-after", b"1")]) if reasons else Reply(200, b"")


def _labels(result: Result) -> list[float]:
    return list(result.attributes.values()) if isinstance(result, Score) else []


def _matrix(rows: Sequence[Sequence[float]]) -> np.ndarray:
    """Converts to FP32. A score outside its range is an error, not infinity."""
    with np.errstate(over="ignore"):
        matrix = np.array(rows, dtype=np.float32).reshape(len(rows), -1 if rows else 1)
    for row, column in np.argwhere(~np.isfinite(matrix)):
        raise HttpError(500, "nonfinite_score", f"row[{row}]: the score {rows[row][column]:g} does not fit into FP32")
    return matrix


def packed(body: bytes, head: int | None, accepted: bytes) -> Reply:
    headers: list[tuple[bytes, bytes]] = []
    kind = b"application/json"
    if head is not None:
        headers.append((b"inference-header-content-length", str(head).encode()))
        kind = b"application/octet-stream"
    if len(body) > WORTH_PACKING:
        if b"gzip" in accepted:
            headers.append((b"content-encoding", b"gzip"))
            body = gzip.compress(body, 1)
        elif b"deflate" in accepted:
            headers.append((b"content-encoding", b"deflate"))
            body = zlib.compress(body, 1)
    return Reply(200, body, kind, headers)
