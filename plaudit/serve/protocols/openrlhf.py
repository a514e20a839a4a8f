"""OpenRLHF's remote reward model: `POST /get_reward`.

    in    {"query": ["<whole text, rendered>", ...], "prompts": [...], "labels": [...]}   (the oldest: query alone)
    out   {"rewards": [0.7, ...], "scores": [0.7, ...], "extra_logs": {"helpfulness": [...]}}

A client with several URLs sends empty lists to all but one and wants 200 for them. There is no room for the error of a
single query: one that fails fails its request. Text that is too long is refused, where the original cuts the end of the
response off without a word; `/get_reward?truncate=left` (or `right`) asks for a cut.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Literal

import msgspec

from plaudit.records import Score, StepScores
from plaudit.serve.http import HttpError

Truncate = Literal["left", "right"] | None


class _Body(msgspec.Struct):
    query: list[str]
    prompts: Any = None
    labels: Any = None


@dataclass(frozen=True, slots=True)
class Asked:
    queries: list[str]
    labels: list[Any]
    truncate: Truncate


def read(body: bytes, query: dict[str, str]) -> Asked:
    try:
        asked = msgspec.json.decode(body, type=_Body)
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
        raise HttpError(422, "invalid_request", f"query must be a list of texts: {_one_line(error)}") from None
    labels = asked.labels if isinstance(asked.labels, list) and len(asked.labels) == len(asked.query) else []
    return Asked(asked.query, labels or [None] * len(asked.query), read_truncate(query))


def read_truncate(query: dict[str, str]) -> Truncate:
    given = query.get("truncate")
    if given is None or given == "left" or given == "right":
        return given  # type: ignore[return-value]
    raise HttpError(422, "invalid_request", f"truncate is {given[:20]!r}; expected left or right")


def write(results: Sequence[Score | StepScores], values: Sequence[float]) -> dict[str, Any]:
    logs: dict[str, list[float]] = {}
    attributes = [result.attributes if isinstance(result, Score) else {} for result in results]
    if attributes and all(attributes):
        logs = {name: [float(a[name]) for a in attributes] for name in attributes[0]}
    return {"rewards": list(values), "scores": list(values), "extra_logs": logs}


def _one_line(error: BaseException) -> str:
    return " ".join(str(error).split())[:200] or type(error).__name__
