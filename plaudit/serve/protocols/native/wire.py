"""`POST /v1/rewards`, Plaudit's own protocol, as JSON and as binary.

JSON, in:

    {"model": "sums",                     # the first model served, if left out
     "items": [{"prompt": "7+8=", "responses": ["#15", ["7+8=15;", "#15"]]},     # a response: a text, or its steps
               {"messages": [{"role": "user", "content": "7+8="}, {"role": "assistant", "content": "#15"}]},
               {"text": "7+8=#15"},       # rendered by the caller: control tokens in it count
               {"tokens": [1, 12, 14]}],
     "steps": false,                      # step scores of a process model as well
     "truncate": "left" | "right",        # the side to truncate; without it, too long is an error
     "priority": 0, "cache": true}

An item may also hold `truth`, for rules, and `"cut": true` if its responses reached their token limit, so that nothing
ends them. JSON, out:

    {"model", "version", "request_id", "usage": {"items", "tokens", "cached_items"},
     "items": [{"scores": [0.9, 0.8], "steps": [[..], [..]], "attributes": [{..}, {..}], "truncated": [..]}
               | {"error": {"type", "message"}}]}

`steps`, `attributes` and `truncated` are present when requested or not empty. Where only some responses of an item
fail, their entry in `scores` is `null`, and `errors` has the reason at the same index.

Binary (`Content-Type: application/x-plaudit-tokens`, `?model=NAME`), everything little-endian:

    in    uint32 n, uint32 offsets[n + 1], int32 tokens[offsets[n]]
    out   uint32 n, float32 scores[n], then JSON as above with `errors` ({index: {type, message}}) instead of `items`;
          the score of a failed item is NaN, and its error is there
"""

from __future__ import annotations

import re
import struct
from collections.abc import Sequence
from itertools import compress, pairwise
from typing import Any, Literal
from urllib.parse import parse_qsl

import msgspec
import numpy as np

from plaudit.errors import one_line
from plaudit.records import Item, Score, StepScores
from plaudit.serve.http.message import HttpError

BINARY = b"application/x-plaudit-tokens"
BINARY_REPLY = b"application/x-plaudit-scores"
PRIORITIES = 10

Result = Score | StepScores


class _Item(msgspec.Struct, forbid_unknown_fields=True):
    prompt: str | list[dict[str, Any]] | None = None
    responses: list[str | list[str]] | None = None
    messages: list[dict[str, Any]] | None = None
    text: str | None = None
    tokens: tuple[int, ...] | None = None
    truth: Any = None
    cut: bool = False


class _Body(msgspec.Struct, forbid_unknown_fields=True):
    items: list[msgspec.Raw]
    model: str | None = None
    steps: bool = False
    truncate: Literal["left", "right"] | None = None
    priority: int = 0
    cache: bool = True


NO_TEXT = b"\xff"  # never occurs in UTF-8
_LONE_SURROGATE = re.compile(
    rb"(?<!\\)((?:\\\\)*)"  # an even number of backslashes: the next one starts an escape
    rb"\\u[dD](?:[89abAB][0-9a-fA-F]{2}(?!\\u[dD][c-fC-F])|(?<!\\u[dD][89abAB]..\\u[dD])[c-fC-F][0-9a-fA-F]{2})"
)
_BODY = msgspec.json.Decoder(_Body)
_ITEM = msgspec.json.Decoder(_Item)


class RewardRequest(msgspec.Struct, frozen=True):
    """A parsed request: groups of items answered together, or the reason why a group is invalid."""

    model: str | None
    groups: list[list[Item] | str]
    steps: bool = False
    priority: int = 0
    cache: bool = True


def read_json(body: bytes, most_items: int) -> RewardRequest:
    if not body:
        raise HttpError(400, "empty_body", 'the body is empty; send {"model": ..., "items": [...]}')
    try:
        request = _decoded(body, most_items)
    except msgspec.ValidationError as error:
        raise HttpError(422, "invalid_request", one_line(error, 200)) from None
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
        raise HttpError(400, "invalid_json", f"the body is not JSON: {one_line(error, 200)}") from None
    if not -PRIORITIES <= request.priority <= PRIORITIES:
        raise HttpError(
            422, "invalid_request", f"priority is {request.priority}; expected {-PRIORITIES} to {PRIORITIES}"
        )
    if not request.items:
        raise HttpError(422, "no_items", "items is empty; send at least one")
    _check_count(len(request.items), most_items)
    groups = [_group(raw, request.truncate) for raw in request.items]
    _check_count(sum(1 if isinstance(group, str) else len(group) for group in groups), most_items)
    return RewardRequest(request.model, groups, request.steps, request.priority, request.cache)


def _decoded(body: bytes, most_items: int) -> _Body:
    try:
        return _BODY.decode(body)
    except msgspec.ValidationError:
        raise
    except msgspec.DecodeError:
        # One lone surrogate makes msgspec reject the whole body. Replaced by an invalid byte it fails only its item.
        mended = _LONE_SURROGATE.sub(rb"\1" + NO_TEXT, body, count=most_items)
        if mended == body:
            raise
        return _BODY.decode(mended)


def _group(raw: msgspec.Raw, truncate: Literal["left", "right"] | None) -> list[Item] | str:
    """The responses of one item, or an error message as text. An invalid item does not fail the request."""
    try:
        item = _ITEM.decode(raw)
    except UnicodeDecodeError:
        return "a text of this item is not valid Unicode: it has a lone surrogate, or bytes that are not UTF-8"
    except (msgspec.DecodeError, RecursionError) as error:
        return one_line(error, 200)
    given = (item.prompt is not None, item.messages is not None, item.text is not None, item.tokens is not None)
    if sum(given) != 1:
        forms = list(compress(("prompt", "messages", "text", "tokens"), given)) or "none"
        return f"this item has {forms}; expected one of prompt + responses, messages, text and tokens"
    if (item.prompt is None) != (item.responses is None):
        return "prompt or responses is missing; give both"
    if item.responses is not None:
        if not item.responses:
            return "responses is empty; send at least one"
        prompt = item.prompt if isinstance(item.prompt, str) else tuple(item.prompt or ())
        return [
            Item(
                prompt=prompt, response=r if isinstance(r, str) else tuple(r), truth=item.truth, truncate=truncate,
                cut=item.cut,
            )
            for r in item.responses
        ]  # fmt: skip
    if item.messages is not None:
        return [Item(messages=tuple(item.messages), truth=item.truth, truncate=truncate, cut=item.cut)]
    if item.cut:
        return "cut is for prompt + responses and messages; text and tokens are read as they are"
    if item.text is not None:
        return [Item(text=item.text, truth=item.truth, truncate=truncate)]
    return [Item(tokens=item.tokens, truth=item.truth, truncate=truncate)]


def write_json(
    request: RewardRequest, model: str, version: str, results: Sequence[Sequence[Result] | str], usage: dict[str, int],
    request_id: str,
) -> dict[str, Any]:  # fmt: skip
    items = [
        {"error": {"type": "invalid_item", "message": group}} if isinstance(group, str) else _item(group, request)
        for group in results
    ]
    return {"model": model, "version": version, "items": items, "usage": usage, "request_id": request_id}


def _item(results: Sequence[Result], request: RewardRequest) -> dict[str, Any]:
    failed = any(r.error is not None for r in results)
    errors = [None if r.error is None else {"type": r.error.type, "message": r.error.message} for r in results]
    attributes = [dict(r.attributes) if isinstance(r, Score) else {} for r in results]
    if failed and None not in errors and all(e == errors[0] for e in errors) and not any(attributes):
        return {"error": errors[0]}
    item: dict[str, Any] = {"scores": [value_of(r) for r in results]}
    if request.steps:
        item["steps"] = [list(r.values) if isinstance(r, StepScores) and r.error is None else None for r in results]
    if any(attributes):
        item["attributes"] = attributes
    truncated = [r.truncated for r in results]
    if True in truncated:
        item["truncated"] = truncated
    if failed:
        item["errors"] = errors
    return item


def value_of(result: Result) -> float | None:
    return result.aggregate if isinstance(result, StepScores) else result.value


def read_binary(body: bytes, query: bytes, most_items: int) -> RewardRequest:
    if len(body) < 4:
        raise HttpError(
            400, "invalid_binary", f"a body of {len(body)} bytes is too short for a request; see /docs for the format"
        )
    (count,) = struct.unpack_from("<I", body)
    head = 4 + 4 * (count + 1)
    if count == 0:
        raise HttpError(422, "no_items", "the request has 0 items; send at least one")
    if len(body) < head:
        raise HttpError(400, "invalid_binary", f"{count} items need {head} bytes of offsets; the body has {len(body)}")
    _check_count(count, most_items)
    offsets = np.frombuffer(body, dtype="<u4", count=count + 1, offset=4).astype(np.int64)
    total = int(offsets[-1])
    if offsets[0] != 0 or (np.diff(offsets) < 0).any() or len(body) != head + 4 * total:
        raise HttpError(
            400, "invalid_binary",
            f"offsets must increase from 0 to the number of tokens, {(len(body) - head) / 4:g}; the last offset is "
            f"{total}",
        )  # fmt: skip
    tokens = np.frombuffer(body, dtype="<i4", offset=head).tolist()
    ends = offsets.tolist()
    groups: list[list[Item] | str] = [[Item(tokens=tuple(tokens[a:b]))] for a, b in pairwise(ends)]
    return RewardRequest(_queried_model(query), groups)


def write_binary(
    model: str, version: str, results: Sequence[Sequence[Result] | str], usage: dict[str, int], request_id: str
) -> bytes:
    flat = [result for group in results if not isinstance(group, str) for result in group]
    errors = {
        str(i): {"type": r.error.type, "message": r.error.message} for i, r in enumerate(flat) if r.error is not None
    }
    values = [value_of(r) for r in flat]
    scores = np.array([np.nan if v is None else v for v in values], dtype="<f4")
    tail = {"model": model, "version": version, "errors": errors, "usage": usage, "request_id": request_id}
    return struct.pack("<I", len(flat)) + scores.tobytes() + msgspec.json.encode(tail)


def _queried_model(query: bytes) -> str | None:
    if query.count(b"&"):
        raise HttpError(422, "invalid_request", "several query fields; expected only model, once")
    fields = parse_qsl(query.decode("latin-1"), keep_blank_values=True)
    for name, _ in fields:
        if name != "model":
            raise HttpError(422, "invalid_request", f"unknown query field {name[:40]!r}; expected model")
    return fields[0][1] if fields else None


def _check_count(count: int, most: int) -> None:
    if count > most:
        raise HttpError(422, "too_many_items", f"{count} responses in one request; the limit is {most}; split it")
