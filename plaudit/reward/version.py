"""The version of a score: a hash of everything that can change it.

It covers weights, config, tokenizer and chat template, the reward table, dtype, and the code that computes. It does not
cover where and how fast it is computed (`PLACE`): devices, ranks and batches change at most the last digits, and
servers that differ only in them may share a client.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterable, Mapping
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

from pydantic import BaseModel

PACKAGE = Path(__file__).resolve().parent.parent
PLACE = frozenset(
    (
        "path", "device", "threads", "kv_bytes", "budget", "memory_fraction", "replicas", "max_replicas",
        "replica_tokens", "tensor_parallel", "pipeline_parallel", "rank_seconds", "join_seconds", "processes",
        "concurrency", "retries", "key_env", "sandbox", "fork", "tasks",
    )
)  # fmt: skip
COMPUTING = ("core", "models", "reward")  # our packages
LIBRARIES = ("torch", "transformers", "tokenizers")


def digest(table: BaseModel, *parts: str, libraries: Iterable[str] = ()) -> str:
    """The first 12 hex digits of the SHA-256 of a reward's table, the code and `parts`."""
    keys = table.model_dump(mode="json", exclude=set(PLACE))
    return _short(json.dumps(keys, sort_keys=True), CODE, *map(_installed, libraries), *parts)


def model_digest(
    table: BaseModel, files: Mapping[str, str], tokenizer: tuple[bytes, Mapping[str, Any]], *others: str
) -> str:  # fmt: skip
    """files      SHA-256 by name, of the weights and the config
    tokenizer  as loaded: `models.text.tokenizer_parts`
    """
    backend, options = tokenizer
    texts = (json.dumps(dict(each), sort_keys=True) for each in (files, options))
    return digest(table, *texts, hashlib.sha256(backend).hexdigest(), *others, libraries=LIBRARIES)


def joined(versions: Iterable[str], table: BaseModel) -> str:
    """The version of a reward made of others: the sum of their numbers, and the hash of their versions and its
    table."""
    parts = sorted(versions)
    number = sum(int(first) for first in (each.partition("-")[0] for each in parts) if first.isdigit())
    return f"{number}-{digest(table, *parts)}"


def code(root: Path = PACKAGE) -> str:
    """The hash of our source code, which also changes between releases."""
    source_hash = hashlib.sha256()
    for package in COMPUTING:
        for file in sorted((root / package).rglob("*.py")):
            source_hash.update(f"{file.relative_to(root)}\0".encode() + file.read_bytes())
    return source_hash.hexdigest()


CODE = code()
"""Computed at import, together with the code that computes: a worker forked later runs the imported code, whatever is
on disk by then."""


def _installed(library: str) -> str:
    try:
        return f"{library} {version(library).partition('+')[0]}"  # the suffix +cpu or +cu128 is only the device
    except PackageNotFoundError:
        return library


def _short(*parts: str) -> str:
    return hashlib.sha256("\0".join(parts).encode()).hexdigest()[:12]
