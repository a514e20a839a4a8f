"""OpenR's process reward worker, and as much of its FastChat controller as the worker's own models need.

POST /get_worker_address       {"model": "NAME"} -> {"address": "http://..."}, "" for a name that is not served
POST <address>/worker_value_inference
     {"input_str": "<question and steps with their tags>" or ["...", ...]}
     -> {"input": as it came, "value": [step scores], or a list of them for a list}
POST /worker_get_status        -> {"model_names", "speed", "queue_length"}
POST /list_models              -> {"models": ["NAME", ...]}
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import msgspec

from plaudit.errors import one_line
from plaudit.serve.http.message import HttpError


class _Model(msgspec.Struct):
    model: str


class _Value(msgspec.Struct):
    input_str: str | list[str]


@dataclass(frozen=True, slots=True)
class OpenrRequest:
    texts: list[str]
    single: bool


def read_model(fields: Mapping[str, Any]) -> str:
    return str(_converted(fields, _Model).model)


def read_value(fields: Mapping[str, Any]) -> OpenrRequest:
    texts = _converted(fields, _Value).input_str
    if texts == []:
        raise HttpError(422, "invalid_request", "input_str is an empty list; give at least one text")
    return OpenrRequest([texts] if isinstance(texts, str) else texts, isinstance(texts, str))


def write_value(request: OpenrRequest, rows: Sequence[Sequence[float]]) -> dict[str, Any]:
    values = [list(row) for row in rows]
    return {
        "input": request.texts[0] if request.single else request.texts,
        "value": values[0] if request.single else values,
    }


def status(names: Sequence[str], waiting: int) -> dict[str, Any]:
    return {"model_names": list(names), "speed": 1, "queue_length": waiting}


def _converted(fields: Mapping[str, Any], type: Any) -> Any:
    try:
        return msgspec.convert(fields, type)
    except msgspec.ValidationError as error:
        raise HttpError(422, "invalid_request", one_line(error, 200)) from None
