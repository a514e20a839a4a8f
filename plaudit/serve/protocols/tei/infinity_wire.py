"""Infinity's /classify, /rerank and /models. Its texts are cut without a word where they are too long; here that is an
error, as everywhere."""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from http import HTTPStatus
from typing import Annotated, Any

import msgspec
import numpy as np
from msgspec import Meta

from plaudit.serve.http.message import HttpError, Reply
from plaudit.serve.protocols.tei.wire import decoded, predictions


class _Classify(msgspec.Struct):
    input: list[str]
    model: str | None = None
    raw_scores: bool = False


class _Rerank(msgspec.Struct):
    query: str
    documents: list[str]
    model: str | None = None
    return_documents: bool = False
    raw_scores: bool = False
    top_n: Annotated[int, Meta(ge=1)] | None = None


@dataclass(frozen=True, slots=True)
class Classify:
    model: str | None
    texts: Sequence[str]
    raw: bool


@dataclass(frozen=True, slots=True)
class InfinityRerank:
    model: str | None
    query: str
    documents: Sequence[str]
    raw: bool
    with_documents: bool
    top: int | None


def write_error(error: HttpError, request_id: str) -> Reply:
    kind = HTTPStatus(error.status).phrase
    content = {"error": {"message": str(error), "type": kind, "param": None, "code": error.status}}
    return Reply(error.status, msgspec.json.encode(content), headers=error.reply(request_id).headers)


def read_classify(fields: Mapping[str, Any]) -> Classify:
    request = decoded(fields, _Classify)
    if not request.input:
        raise HttpError(422, "empty", "input has no texts; give at least one")
    return Classify(_model(request.model), request.input, request.raw_scores)


def read_rerank(fields: Mapping[str, Any]) -> InfinityRerank:
    request = decoded(fields, _Rerank)
    if not request.documents:
        raise HttpError(422, "empty", "documents has no texts; give at least one")
    return InfinityRerank(
        _model(request.model), request.query, request.documents, request.raw_scores, request.return_documents,
        request.top_n,
    )  # fmt: skip


def _model(name: str | None) -> str | None:
    """Its clients send "default/not-specified" where they name none."""
    return None if name == "default/not-specified" else name


def classified(id: str, model: str, rows: Sequence[np.ndarray], labels: Sequence[str], tokens: int) -> dict[str, Any]:
    data = [predictions(row, labels) for row in rows]
    return {"object": "classify", "data": data, **_tail(id, model, tokens)}


def reranked(id: str, model: str, request: InfinityRerank, values: Sequence[float], tokens: int) -> dict[str, Any]:
    order = sorted(range(len(values)), key=lambda place: -values[place])[: request.top]
    results = [
        {
            "relevance_score": values[place],
            "index": place,
            "document": request.documents[place] if request.with_documents else None,
        }
        for place in order
    ]
    return {"object": "rerank", "results": results, **_tail(id, model, tokens)}


def models(entries: Sequence[Mapping[str, Any]], created: int) -> dict[str, Any]:
    """From what the server says of its models."""
    data = [
        {
            "id": entry["name"], "object": "model", "owned_by": "infinity", "created": created, "backend": "plaudit",
            "stats": {
                "queue_fraction": 0.0, "queue_absolute": entry["queue_items"], "results_absolute": 0,
                "batch_size": entry["budget"],
            },
            "capabilities": ["classify", "rerank"] if len(entry["labels"]) == 1 else ["classify"],
        }
        for entry in entries
    ]  # fmt: skip
    return {"object": "list", "data": data}


def _tail(id: str, model: str, tokens: int) -> dict[str, Any]:
    usage = {"prompt_tokens": tokens, "total_tokens": tokens}
    return {"model": model, "usage": usage, "id": f"infinity-{id}", "created": int(time.time())}
