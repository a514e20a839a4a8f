"""Infinity's /classify, /rerank and /models. Infinity silently truncates texts that are too long; here that is an
error, as everywhere."""

from __future__ import annotations

import time
from collections.abc import Sequence
from http import HTTPStatus
from typing import Annotated, Any

import msgspec
import numpy as np
from msgspec import Meta

from plaudit.serve.handle import WorkerStatus
from plaudit.serve.http.message import HttpError, Reply
from plaudit.serve.protocols.tei.wire import predictions


class _Named(msgspec.Struct, kw_only=True):
    model: str | None = None
    raw_scores: bool = False

    @property
    def name(self) -> str | None:
        """The model's name. Infinity's clients send "default/not-specified" for no name."""
        return None if self.model == "default/not-specified" else self.model


class Classify(_Named):
    input: list[str]


class InfinityRerank(_Named):
    query: str
    documents: list[str]
    return_documents: bool = False
    top_n: Annotated[int, Meta(ge=1)] | None = None


def write_error(error: HttpError, request_id: str) -> Reply:
    status = {"invalid_json": 422, "unknown_model": 400}.get(error.type, error.status)
    content = {"error": {"message": str(error), "type": HTTPStatus(status).phrase, "param": None, "code": status}}
    return error.shaped(content, request_id, status)


def classified(id: str, model: str, rows: Sequence[np.ndarray], labels: Sequence[str], tokens: int) -> dict[str, Any]:
    data = [predictions(row, labels) for row in rows]
    return {"object": "classify", "data": data, **_tail(id, model, tokens)}


def reranked(id: str, model: str, request: InfinityRerank, values: Sequence[float], tokens: int) -> dict[str, Any]:
    order = sorted(range(len(values)), key=lambda place: -values[place])[: request.top_n]
    results = [
        {
            "relevance_score": values[place],
            "index": place,
            "document": request.documents[place] if request.return_documents else None,
        }
        for place in order
    ]
    return {"object": "rerank", "results": results, **_tail(id, model, tokens)}


def models(statuses: Sequence[WorkerStatus], created: int) -> dict[str, Any]:
    """The list of models, from their statuses."""
    data = [
        {
            "id": status.name, "object": "model", "owned_by": "infinity", "created": created, "backend": "plaudit",
            "stats": {
                "queue_fraction": 0.0, "queue_absolute": status.queue_items, "results_absolute": 0,
                "batch_size": status.budget,
            },
            "capabilities": ["classify", "rerank"] if len(status.labels) == 1 else ["classify"],
        }
        for status in statuses
    ]  # fmt: skip
    return {"object": "list", "data": data}


def _tail(id: str, model: str, tokens: int) -> dict[str, Any]:
    usage = {"prompt_tokens": tokens, "total_tokens": tokens}
    return {"model": model, "usage": usage, "id": f"infinity-{id}", "created": int(time.time())}
