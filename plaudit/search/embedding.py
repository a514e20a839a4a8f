"""Which steps are alike: vectors for texts, from a sentence encoder here or behind HTTP."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Protocol

import httpx
import numpy as np

from plaudit.config.search import RuleTable
from plaudit.errors import BadReply, ConfigError, ServerError

BATCH = 64


class Embedder(Protocol):
    def embed(self, texts: Sequence[str]) -> np.ndarray:
        """A row for each text."""

    def close(self) -> None: ...


class SentenceEncoder:
    """A model of sentence-transformers: a directory, or the name of a package that carries one."""

    def __init__(self, source: str, device: str = "cpu") -> None:
        directory = _directory(source)
        try:
            from sentence_transformers import SentenceTransformer
        except ImportError:
            raise ConfigError(
                'search.clusters = "encoder" needs sentence-transformers: pip install "plaudit[search]"'
            ) from None
        from plaudit.models.quiet import quiet

        with quiet():
            self._model: Any = SentenceTransformer(str(directory), device=device, local_files_only=True)

    def embed(self, texts: Sequence[str]) -> np.ndarray:
        found: np.ndarray = self._model.encode(list(texts), batch_size=BATCH, show_progress_bar=False)
        return found

    def close(self) -> None:
        """The model's memory goes with the object."""


class ServedEncoder:
    """`/v1/embeddings` as OpenAI defines it."""

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


def open_embedder(table: RuleTable) -> Embedder | None:
    """None where the PRM's states or the words themselves tell."""
    if not table.clustered or table.encoder is None:
        return None
    return ServedEncoder(table.encoder) if table.clusters == "served" else SentenceEncoder(table.encoder)


def _directory(source: str) -> Any:
    from importlib.util import find_spec
    from pathlib import Path

    if Path(source).is_dir():
        return Path(source)
    spec = find_spec(source.replace("-", "_")) if source.replace("-", "_").isidentifier() else None
    for place in (spec.submodule_search_locations or []) if spec is not None else []:
        found = sorted(Path(place).rglob("modules.json"))
        if found:
            return found[0].parent
    raise ConfigError(f"search.encoder = {source!r} is no directory of a sentence encoder, nor a package with one")
