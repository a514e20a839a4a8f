"""The twelve most common client mistakes in each protocol: the request, and the status and shape of the error.

`originally` has the status of the project's own server where it differs: for PyTriton and vLLM as measured
(tests/interop), for the others as their source code says.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import httpx

MISTAKES = {
    "no body": "no body", "cut": "JSON that ends too early", "list": "a list as the body",
    "missing": "the input is missing", "null": "the input is null", "type": "the input is a number",
    "empty": "the input is empty", "long": "a text that is too long", "model": "a model that is not served",
    "gzip": "a body that is not the gzip it says", "method": "GET", "path": "a path that is not there",
}  # fmt: skip


@dataclass(frozen=True)
class Form:
    """A request of a protocol: its input is under `key`; `shape` checks the form of its errors."""

    path: str
    body: dict[str, Any]
    key: str
    empty: Any
    long: Any
    shape: Callable[[Any], bool]
    statuses: dict[str, int]
    originally: dict[str, int] = field(default_factory=dict)


LONG = "7+8=15;" * 300
OWN = lambda error: set(error) == {"error"} and set(error["error"]) == {"type", "message", "request_id", "retryable"}  # noqa: E731
LIKE_OPENAI = lambda error: set(error) == {"error"} and set(error["error"]) == {"message", "type", "param", "code"}  # noqa: E731
FLAT = {"object", "message", "type", "param", "code"}
ALL = {"method": 405, "path": 404, "gzip": 400}
BROKEN = dict.fromkeys(("no body", "cut", "list"), 400)
INVALID = {"missing": 422, "null": 422, "type": 422}
# Servers that parse JSON without a schema fail on unexpected values.
FALLS = dict.fromkeys((*BROKEN, *INVALID, "gzip"), 500)


def sentences(text: str) -> list[dict[str, Any]]:
    return [{"name": "sentences", "shape": [1, 1], "datatype": "BYTES", "data": [text]}]


def verify(prompt: Any, *output: dict[str, Any], **fields: Any) -> dict[str, Any]:
    return {"responses_create_params": {"input": prompt}, "response": {"id": "r", "output": list(output)}, **fields}


def message_of(text: str) -> dict[str, Any]:
    content = [{"type": "output_text", "text": text, "annotations": []}]
    return {"type": "message", "role": "assistant", "status": "completed", "id": "m", "content": content}


# 200: not a mistake in this protocol, or an error of the item.
FORMS = {
    "native": Form(
        "/v1/rewards", {"model": "sums", "items": [{"text": "#3"}]}, "items", [], [{"text": LONG}], OWN,
        {**ALL, **BROKEN, **INVALID, "cut": 400, "list": 422, "empty": 422, "long": 200, "model": 404},
    ),
    "triton": Form(
        "/v2/models/reward_model/infer", {"inputs": sentences("#3")}, "inputs", [], sentences(LONG),
        lambda error: set(error) == {"error"} and isinstance(error["error"], str),
        {**ALL, **BROKEN, **dict.fromkeys(INVALID, 400), "empty": 400, "long": 200, "model": 200},
        dict.fromkeys(("cut", "list", *INVALID), 500),
    ),
    "openrlhf": Form(
        "/get_reward", {"query": ["#3"]}, "query", [], [LONG], OWN,
        {**ALL, **dict.fromkeys(BROKEN, 422), **INVALID, "empty": 200, "long": 422, "model": 200},
        {**FALLS, "long": 200},
    ),
    "slime": Form(
        "/remote_rm", {"prompt": "1+2=", "response": "#3", "label": ""}, "response", "", LONG, OWN,
        {**ALL, **dict.fromkeys(BROKEN, 422), **INVALID, "empty": 200, "long": 422, "model": 200},
    ),
    "openr": Form(
        "/worker_value_inference", {"input_str": "1+2=#3;"}, "input_str", [], LONG,
        lambda error: set(error) == {"text", "error_code"},
        {**ALL, **BROKEN, **INVALID, "empty": 422, "long": 422, "model": 200},
        {**FALLS, "empty": 200, "long": 200},
    ),
    "sglang": Form(
        "/sglang/classify", {"text": "#3"}, "text", [], LONG,
        lambda error: set(error) == FLAT or set(error["error"]) == {"message"},
        {**ALL, **BROKEN, **dict.fromkeys(INVALID, 400), "empty": 400, "long": 400, "model": 200},
    ),
    "tei": Form(
        "/predict", {"inputs": "#3"}, "inputs", [], LONG, lambda error: set(error) == {"error", "error_type"},
        {**ALL, **BROKEN, **INVALID, "empty": 400, "long": 413, "model": 200},
        {"list": 422},
    ),
    "infinity": Form(
        "/infinity/classify", {"model": "sums", "input": ["#3"]}, "input", [], [LONG], LIKE_OPENAI,
        {**ALL, **dict.fromkeys(BROKEN, 422), **INVALID, "empty": 422, "long": 422, "model": 400},
        {"gzip": 422, "long": 200},
    ),
    "vllm": Form(
        "/vllm/classify", {"model": "sums", "input": ["#3"]}, "input", [], [LONG],
        lambda error: LIKE_OPENAI(error) or set(error) == {"detail"},
        {**ALL, **BROKEN, **dict.fromkeys(INVALID, 400), "empty": 400, "long": 400, "model": 404},
    ),
    "openai": Form(
        "/v1/completions", {"model": "sums", "prompt": "1+2="}, "prompt", [], LONG, LIKE_OPENAI,
        {**ALL, **BROKEN, **dict.fromkeys(INVALID, 400), "empty": 400, "long": 400, "model": 404},
    ),
    "nemo-gym": Form(
        "/verify", verify("1+2=", message_of("#3")), "response", {"output": []}, {"output": [message_of(LONG)]},
        lambda error: set(error) == {"detail"},
        {**ALL, **dict.fromkeys(BROKEN, 422), **INVALID, "empty": 422, "long": 422, "model": 200},
        {"gzip": 422},
    ),
}  # fmt: skip


def replies_to_mistakes(http: httpx.Client, form: Form, base: str = "") -> dict[str, httpx.Response]:
    """The reply to each mistake. Unknown paths below `base` belong to the protocol."""
    path, body, json_type = form.path, form.body, {"content-type": "application/json"}

    def posted(value: Any) -> httpx.Response:
        return http.post(path, json={**body, form.key: value})

    def raw(content: bytes, **headers: str) -> httpx.Response:
        return http.post(path, content=content, headers={**json_type, **headers})

    return {
        "no body": raw(b""), "cut": raw(b"{"), "list": http.post(path, json=[1]),
        "missing": http.post(path, json={key: value for key, value in body.items() if key != form.key}),
        "null": posted(None), "type": posted(5), "empty": posted(form.empty), "long": posted(form.long),
        "model": http.post(path, json={**body, "model": "nobody"}),
        "gzip": raw(b"xx", **{"content-encoding": "gzip"}), "method": http.get(path),
        "path": http.post(f"{base}{path.removeprefix(base)}x", json=body),
    }  # fmt: skip
