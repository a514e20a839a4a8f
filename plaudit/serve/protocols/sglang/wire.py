"""SGLang's native and `/v1` scoring routes, as of version 0.5.

`POST` or `PUT /classify`, `/encode`:

    in    {"text": "..." or ["...", ...]} or {"input_ids": [1, 2] or [[1, 2], ...]}
    out   {"embedding": [0.7], "meta_info": {...}}, or a list of them for a list

`POST /generate`, for log-probs of the input without generation (`max_new_tokens` 0 or 1):

    in    {"text" or "input_ids", "sampling_params": {"max_new_tokens": 0}, "return_logprob": true,
           "logprob_start_len": 0, "token_ids_logprob": [648, 387]}
    out   {"text": "", "output_ids": [], "meta_info": {"input_token_logprobs": [[null, 1, null], [-0.3, 12, null], ...],
           "input_token_ids_logprobs": [null, [[-0.1, 648, null], ...], ...], "output_token_ids_logprobs": [[...]]}}

Entry i of the `input_` lists belongs to token `logprob_start_len + i` and is computed from the tokens before it; the
first is null, whatever stands before it. What follows the last token is in `output_token_ids_logprobs[0]`.

`/v1/classify`, `/v1/score` and `/v1/rerank` are described at their functions below. Other keys are ignored.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import msgspec
import numpy as np

from plaudit.serve.http.message import HttpError, Reply, convert

Name = Callable[[int], str | None]
# SGLang's errors of request validation have another format than later errors.
SCHEMA_ERRORS = ("invalid_json", "invalid_request")


@dataclass(frozen=True, slots=True)
class SglangInputs:
    """Texts or token ids, and the name of their field. `single`: a single input, not a list."""

    field: str
    single: bool
    texts: list[str]
    tokens: list[list[int]]

    def __len__(self) -> int:
        return len(self.texts) or len(self.tokens)


@dataclass(frozen=True, slots=True)
class LogprobRequest:
    """The log-probs requested for one input. start: None requests no log-probs of the input's own tokens."""

    logprobs: bool
    start: int | None
    tokens: tuple[int, ...]


NO_LOGPROBS = LogprobRequest(False, None, ())


@dataclass(frozen=True, slots=True)
class Generate:
    inputs: SglangInputs
    wishes: list[LogprobRequest]
    named: bool  # the entries' third element is the token's text


@dataclass(frozen=True, slots=True)
class Scoring:
    """queries and items are both texts, or both token ids."""

    inputs: SglangInputs
    labels: tuple[int, ...] | None
    softmax: bool


class _Inputs(msgspec.Struct):
    text: str | list[str] | None = None
    input_ids: list[int | list[int]] | None = None


class _Generate(_Inputs):
    sampling_params: dict[str, Any] | list[dict[str, Any]] | None = None
    return_logprob: bool | list[bool] | None = False
    logprob_start_len: int | list[int] | None = -1
    top_logprobs_num: int | list[int] | None = 0
    token_ids_logprob: list[int | list[int]] | None = None
    return_text_in_logprobs: bool = False
    stream: bool = False


class _Classify(msgspec.Struct):
    input: str | list[str | int | list[int]]


class _Scoring(msgspec.Struct):
    query: str | list[int]
    items: str | list[str | list[int]]
    label_token_ids: list[int] | None = None
    apply_softmax: bool = False
    item_first: bool = False


class SglangRerank(msgspec.Struct):
    query: str
    documents: list[str]
    top_n: int | None = None
    return_documents: bool = True
    instruct: str | None = None


def claims_inputs(fields: Mapping[str, Any]) -> bool:
    return "text" in fields or "input_ids" in fields


def claims_scoring(fields: Mapping[str, Any]) -> bool:
    return "query" in fields and "items" in fields


def claims_rerank(fields: Mapping[str, Any]) -> bool:
    """Clients of vLLM, Jina and Cohere send `return_documents` too, and are more common."""
    return "instruct" in fields


def write_error(error: HttpError, request_id: str) -> Reply:
    if error.type in SCHEMA_ERRORS:
        return write_openai_error(error, request_id)
    return error.shaped({"error": {"message": str(error)}}, request_id, _status(error))


def write_openai_error(error: HttpError, request_id: str) -> Reply:
    """The flat format of routes below /v1, and of every request that fails validation."""
    status = _status(error)
    if error.type in SCHEMA_ERRORS:
        kind = "Bad Request"
    else:
        kind = "BadRequestError" if status == 400 else "InternalServerError" if status == 500 else str(status)
    fields = {"object": "error", "message": str(error), "type": kind, "param": None, "code": status}
    return error.shaped(fields, request_id, status)


def _status(error: HttpError) -> int:
    return 400 if error.status == 422 else error.status


def read_inputs(fields: Mapping[str, Any]) -> SglangInputs:
    return _inputs(convert(fields, _Inputs, 400))


def read_generate(fields: Mapping[str, Any]) -> Generate:
    request = convert(fields, _Generate, 400)
    inputs = _inputs(request)
    count = len(inputs)
    if request.stream:
        raise _bad("stream is true, but nothing is generated that could be streamed; leave it out")
    if any(_each(request.top_logprobs_num, count, "top_logprobs_num")):
        raise _bad("top_logprobs_num is not supported; expected 0; list tokens in token_ids_logprob instead")
    returned = _each(request.return_logprob, count, "return_logprob")
    for params, logprobs in zip(_each(request.sampling_params or {}, count, "sampling_params"), returned, strict=True):
        _refuse_writing(params, logprobs)
    starts = _each(request.logprob_start_len, count, "logprob_start_len")
    chosen = _token_rows(request.token_ids_logprob or [], count)
    wishes = [
        LogprobRequest(True, start if start is not None and start >= 0 else None, tuple(tokens))
        if logprobs
        else NO_LOGPROBS
        for logprobs, start, tokens in zip(returned, starts, chosen, strict=True)
    ]
    return Generate(inputs, wishes, request.return_text_in_logprobs)


def write_generate(
    tokens: Sequence[int], wish: LogprobRequest, read: np.ndarray | None, last: np.ndarray | None, name: Name,
    meta: dict[str, Any],
) -> dict[str, Any]:  # fmt: skip
    """read: log-probs of the next token, followed by those of the requested tokens, for the positions from `start` to
    the one before the last. last: those of the requested tokens at the last position."""
    if wish.logprobs:
        scored = [] if wish.start is None else list(tokens[wish.start :])
        values = [None] if scored else []
        chosen: list[list[list[Any]] | None] = [None] if scored else []
        for row in () if read is None else read.tolist():
            values.append(row[0])
            chosen.append(_entries(row[1:], wish.tokens, name))
        meta["input_token_logprobs"] = [[v, t, name(t)] for v, t in zip(values, scored, strict=True)]
        meta["output_token_logprobs"] = []
        if wish.tokens:
            assert last is not None
            meta["input_token_ids_logprobs"] = chosen
            meta["output_token_ids_logprobs"] = [_entries(last.tolist(), wish.tokens, name)]
    return {"text": "", "output_ids": [], "meta_info": {**meta, "completion_tokens": 0, "cached_tokens": 0}}


def write_embedding(values: Sequence[float], meta: dict[str, Any]) -> dict[str, Any]:
    return {"embedding": list(values), "meta_info": meta}


def meta_info(id: str, tokens: int, version: str, began: float) -> dict[str, Any]:
    return {
        "id": id, "finish_reason": {"type": "length", "length": 0}, "prompt_tokens": tokens, "weight_version": version,
        "e2e_latency": round(time.monotonic() - began, 6),
    }  # fmt: skip


def read_classify(fields: Mapping[str, Any]) -> SglangInputs:
    """in    {"input": "...", ["...", ...], [1, 2] or [[1, 2], ...]}"""
    inputs = convert(fields, _Classify, 400).input
    if isinstance(inputs, str) or all(isinstance(part, str) for part in inputs):
        return replace(_inputs(_Inputs(text=inputs)), field="input")  # type: ignore[arg-type]
    if any(isinstance(part, str) for part in inputs):
        raise _bad("input mixes texts and token ids; give one kind")
    return replace(_inputs(_Inputs(input_ids=inputs)), field="input")  # type: ignore[arg-type]


def write_classify(model: str, rows: Sequence[Mapping[str, float]], tokens: int, request_id: str) -> dict[str, Any]:
    """out   {"data": [{"index", "label", "probs", "num_classes"}, ...], "usage", ...}; rows are logits by label"""
    data = []
    for index, row in enumerate(rows):
        chances = softmax(list(row.values()))
        best = max(range(len(chances)), key=chances.__getitem__)
        data.append({"index": index, "label": list(row)[best], "probs": chances, "num_classes": len(row)})
    return {
        "id": f"classify-{request_id}", "object": "list", "created": int(time.time()), "model": model, "data": data,
        "usage": _usage(tokens),
    }  # fmt: skip


def read_scoring(fields: Mapping[str, Any]) -> Scoring:
    """in    {"query": "..." or [1, 2], "items": "...", ["...", ...] or [[3], ...], "label_token_ids": [1, 2],
    "apply_softmax": false, "item_first": false}"""
    request = convert(fields, _Scoring, 400)
    items = [request.items] if isinstance(request.items, str) else request.items
    if not items:
        raise _bad("items is empty; expected at least one")
    labels = None if request.label_token_ids is None else tuple(request.label_token_ids)
    if labels == ():
        raise _bad("label_token_ids is empty; give the ids of the tokens to compare")
    if isinstance(request.query, str) and all(isinstance(item, str) for item in items):
        pairs = [(request.query, str(item)) for item in items]
        texts = [second + first if request.item_first else first + second for first, second in pairs]
        inputs = SglangInputs("items", False, texts, [])
    elif not isinstance(request.query, str) and not any(isinstance(item, str) for item in items):
        rows = [list(item) for item in items]
        tokens = [[*row, *request.query] if request.item_first else [*request.query, *row] for row in rows]
        inputs = SglangInputs("items", False, [], tokens)  # type: ignore[arg-type]
    else:
        raise _bad("query and items must both be texts, or both token ids")
    return Scoring(inputs, labels, request.apply_softmax)


def write_scoring(model: str, rows: Sequence[Sequence[float]], tokens: int) -> dict[str, Any]:
    """out   {"scores": [[chance of each label], ...], "object": "scoring", "model", "usage"}"""
    return {"scores": [list(row) for row in rows], "object": "scoring", "model": model, "usage": _usage(tokens)}


def read_rerank(fields: Mapping[str, Any]) -> SglangRerank:
    """in    {"query": "...", "documents": ["...", ...], "top_n": 3, "return_documents": true}"""
    request = convert(fields, SglangRerank, 400)
    if request.instruct is not None:
        raise _bad("instruct is not supported by a reward model; add the instruction to query")
    if not request.documents:
        raise _bad("documents is empty; expected at least one")
    if request.top_n is not None and request.top_n < 1:
        raise _bad(f"top_n is {request.top_n}; expected 1 or more")
    return request


def write_rerank(
    request: SglangRerank, values: Sequence[float], metas: Sequence[dict[str, Any]]
) -> list[dict[str, Any]]:
    """out   [{"score", "document", "index", "meta_info"}, ...], the best first"""
    order = sorted(range(len(values)), key=lambda i: (-values[i], i))[: request.top_n]
    return [
        {
            "score": values[i], **({"document": request.documents[i]} if request.return_documents else {}), "index": i,
            "meta_info": metas[i],
        }
        for i in order
    ]  # fmt: skip


def softmax(values: Sequence[float]) -> list[float]:
    raised = np.exp(np.asarray(values, dtype=np.float64) - max(values))
    return [float(v) for v in raised / raised.sum()]


def _entries(values: Sequence[float], tokens: Sequence[int], name: Name) -> list[list[Any]]:
    return [[value, token, name(token)] for value, token in zip(values, tokens, strict=True)]


def _inputs(request: _Inputs) -> SglangInputs:
    if (request.text is None) == (request.input_ids is None):
        raise _bad("give either text or input_ids" + (", not both" if request.text is not None else ""))
    if request.text is not None:
        texts = [request.text] if isinstance(request.text, str) else request.text
        if not texts:
            raise _bad("text is an empty list; expected at least one text")
        return SglangInputs("text", isinstance(request.text, str), texts, [])
    ids = request.input_ids or []
    rows = [row for row in ids if isinstance(row, list)]
    if rows and len(rows) < len(ids):
        raise _bad("input_ids mixes token ids and lists of them; give one list, or a list of lists")
    if not ids:
        raise _bad("input_ids is empty; expected at least one token")
    return SglangInputs("input_ids", not rows, [], rows or [ids])  # type: ignore[list-item]


def _each(value: Any, count: int, field: str) -> list[Any]:
    """The option's value for every input: one value for all, or a list with one for each."""
    if not isinstance(value, list):
        return [value] * count
    if len(value) != count:
        raise _bad(f"{field} has {len(value)} entries for {count} inputs; expected one for all, or one each")
    return value


def _token_rows(ids: list[int | list[int]], count: int) -> list[list[int]]:
    """Token ids for every input: one list for all of them, or a list for each."""
    rows = [row for row in ids if isinstance(row, list)]
    if not rows:
        return [ids] * count  # type: ignore[list-item]
    if len(rows) < len(ids):
        raise _bad("token_ids_logprob mixes token ids and lists of them; give a list of ids, or one for each input")
    return _each(rows, count, "token_ids_logprob")


def _refuse_writing(params: Mapping[str, Any], logprobs: bool) -> None:
    most = params.get("max_new_tokens", "missing")
    # For 1 SGLang would generate one token. A client that requests log-probs with 1 does not need the token.
    if type(most) is not int or not 0 <= most <= int(bool(logprobs)):
        raise _bad(f"sampling_params.max_new_tokens is {str(most)[:20]}; this route generates no text: set it to 0")


def _usage(tokens: int) -> dict[str, int]:
    return {"prompt_tokens": tokens, "completion_tokens": 0, "total_tokens": tokens}


def _bad(message: str) -> HttpError:
    return HttpError(400, "refused", message)
