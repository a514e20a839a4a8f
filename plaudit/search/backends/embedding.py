"""Embeddings of steps for clustering, from a sentence encoder in this process or over HTTP."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Protocol

import httpx
import numpy as np

from plaudit.config.search import SearchRuleTable
from plaudit.errors import BadReply, ServerError

BATCH = 64


class Embedder(Protocol):
    def embed(self, texts: Sequence[str]) -> np.ndarray:
        """A row for each text."""

    def close(self) -> None: ...


class SentenceEncoder:
    """A model in this process: a directory, or the name of a package with a model."""

    def __init__(self, source: str, device: str = "cpu") -> None:
        from plaudit.models.encoder import load_encoder

        self._encoder = load_encoder(source, device=device)

    def embed(self, texts: Sequence[str]) -> np.ndarray:
        encoder = self._encoder
        rows = encoder.tokenizer(list(texts), truncation=True, max_length=encoder.limit)["input_ids"]
        # Texts of similar length are batched together to reduce padding.
        order = sorted(range(len(rows)), key=lambda i: len(rows[i]))
        vectors: dict[int, np.ndarray] = {}
        for begin in range(0, len(order), BATCH):
            batch = order[begin : begin + BATCH]
            vectors.update(zip(batch, encoder.embed([rows[i] for i in batch]), strict=True))
        return np.stack([vectors[i] for i in range(len(rows))])

    def close(self) -> None:
        """The model's memory is freed with the object."""


class ServedEncoder:
    """A server with OpenAI's `/v1/embeddings`."""

    def __init__(self, url: str, model: str | None = None, timeout: float = 60.0) -> None:
        self._url = url.rstrip("/") + "/v1/embeddings"
        self._model = model
        self._http = httpx.Client(timeout=timeout, follow_redirects=False, trust_env=False)

    def embed(self, texts: Sequence[str]) -> np.ndarray:
        body: dict[str, Any] = {"input": list(texts), "encoding_format": "float"}
        if self._model is not None:
            body["model"] = self._model
        try:
            reply = self._http.post(self._url, json=body)
        except httpx.HTTPError as error:
            raise ServerError(f"no embeddings from {self._url} ({type(error).__name__}: {error})") from None
        if reply.status_code != 200:
            raise ServerError(f"{self._url} answered {reply.status_code}: {reply.text[:200]!r}")
        try:
            rows = sorted(reply.json()["data"], key=lambda row: row["index"])
            vectors = np.array([row["embedding"] for row in rows], dtype=np.float32)
        except (ValueError, LookupError, TypeError) as error:
            raise BadReply(f"{self._url} sent no embeddings ({type(error).__name__})") from None
        if vectors.ndim != 2 or len(vectors) != len(texts):
            raise BadReply(f"{self._url} sent {len(vectors)} embeddings for {len(texts)} texts")
        return vectors

    def close(self) -> None:
        self._http.close()


def open_embedder(table: SearchRuleTable) -> Embedder | None:
    """None if clusters need no embeddings: the PRM's hidden states or the text suffice."""
    if not table.clustered or table.encoder is None:
        return None
    return ServedEncoder(table.encoder) if table.clusters == "served" else SentenceEncoder(table.encoder)
