"""The step scores that ETS and REBASE request from their fork of SGLang 0.1.14: `POST /generate` with `forward_only`.

    in    {"text": "<the whole path so far>", "sampling_params": {"max_new_tokens": 0, "forward_only": true,
           "logits_require_id": 8094}}
    out   {"text": "", "meta_info": {"prompt_tokens", "completion_tokens", ...}, "scores": [0.93, 0.88],
           "forward_only": true}

`logits_require_id` selects what is read and where:

    TAG                  the score that the model's own format gives each step; TAG is the format's step tag
    [PLUS, MINUS, TAG]   the probability of PLUS against MINUS at every token TAG
    [PLUS, MINUS, -k]    the same at the k-th token from the end

A text whose end is not a tag gets `"scores": []`, which makes the search drop the node. Lists of texts are answered
with lists; both fields may also be at the top level, where a list has one entry per text.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from plaudit.serve.http.message import HttpError
from plaudit.serve.protocols.sglang.wire import SglangInputs, read_inputs

FIELD = "logits_require_id"


@dataclass(frozen=True, slots=True)
class Require:
    """pair: the positive and the negative token; None: defined by the format. at: a token, or if negative a
    position."""

    pair: tuple[int, int] | None
    at: int


@dataclass(frozen=True, slots=True)
class EtsRequest:
    inputs: SglangInputs
    requires: list[Require]


def claims(fields: Mapping[str, Any]) -> bool:
    params = fields.get("sampling_params")
    each = params if isinstance(params, list) else [params]
    return bool(fields.get("forward_only")) or any(isinstance(p, dict) and p.get("forward_only") for p in each)


def read(fields: Mapping[str, Any]) -> EtsRequest:
    inputs = read_inputs(fields)
    params = fields.get("sampling_params") or {}
    rows = params if isinstance(params, list) else [params] * len(inputs)
    if len(rows) != len(inputs) or not all(isinstance(row, dict) for row in rows):
        raise _bad(f"sampling_params must be an object, or a list of {len(inputs)} objects, one for each input")
    top = fields.get(FIELD)
    return EtsRequest(inputs, [_require(row.get(FIELD, top)) for row in rows])


def write(tokens: int, scores: Sequence[float], id: str) -> dict[str, Any]:
    meta = {"prompt_tokens": tokens, "completion_tokens": 0, "completion_tokens_wo_jump_forward": 0, "id": id}
    return {"text": "", "meta_info": meta, "scores": list(scores), "forward_only": True}


def _require(field: Any) -> Require:
    numbers = field if isinstance(field, list) else [field]
    if any(type(n) is not int for n in numbers) or len(numbers) not in (1, 3) or any(n < 0 for n in numbers[:-1]):
        raise _bad(f"{FIELD} is {str(field)[:60]}; expected TAG, [PLUS, MINUS, TAG] or [PLUS, MINUS, -POSITION]")
    if len(numbers) == 1:
        return Require(None, numbers[0])
    return Require((numbers[0], numbers[1]), numbers[2])


def _bad(message: str) -> HttpError:
    return HttpError(400, "refused", message)
