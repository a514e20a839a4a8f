"""vLLM's pooling API (0.32), and the OpenAI embeddings format in which SGLang's reward models answer.

Fields unknown to vLLM are ignored, as vLLM does. Fields that vLLM knows but that are not supported here are rejected by
name.
"""

from __future__ import annotations

import base64
import re
import time
from collections.abc import Mapping, Sequence
from http import HTTPStatus
from typing import Annotated, Any, Literal, TypeVar

import msgspec
import numpy as np
from msgspec import Meta

from plaudit.serve.http.message import HttpError, Reply

T = TypeVar("T", bound="VllmRequest")
TASKS = ("classify", "token_classify")
ERROR_NAMES = {
    400: "BadRequestError", 404: "NotFoundError", 500: "InternalServerError", 503: "ServiceUnavailableError",
}  # fmt: skip
# vLLM's errors of request validation have another type than later errors.
SCHEMA_ERRORS = ("invalid_json", "invalid_request", "bad_encoding")
PATH_ERRORS = ("not_found", "method_not_allowed")  # answered by vLLM's web framework
NUMBERS = {"float32": "f4", "float16": "f2"}
ORDERS = {"native": "=", "little": "<", "big": ">"}
MOST_PRIORITY = 10


class FieldError(HttpError):
    """An error that names the invalid field."""

    def __init__(self, message: str, param: str | None, type: str = "refused") -> None:
        super().__init__(400, type, message)
        self.param = param


def write_error(error: HttpError, request_id: str) -> Reply:
    if error.type in PATH_ERRORS:
        return error.shaped({"detail": str(error)}, request_id)
    status = 400 if error.status in (415, 422) else error.status
    schema = error.type in SCHEMA_ERRORS
    name = "Bad Request" if schema else ERROR_NAMES.get(status, HTTPStatus(status).phrase)
    param = error.param if isinstance(error, FieldError) else "body" if schema else None
    content = {"error": {"message": str(error), "type": name, "param": param, "code": status}}
    return error.shaped(content, request_id, status)


class VllmRequest(msgspec.Struct, kw_only=True):
    """Fields common to all requests."""

    model: str | None = None
    user: str | None = None
    truncate_prompt_tokens: Annotated[int, Meta(ge=-1)] | None = None
    truncation_side: Literal["left", "right"] | None = None
    padding: Literal["max_length", "do_not_pad"] | None = None
    request_id: str | None = None
    priority: int = 0
    cache_salt: str | None = None
    mm_processor_kwargs: dict[str, Any] | None = None
    use_activation: bool | None = None
    activation: bool | None = None
    normalize: Any = msgspec.UNSET

    @property
    def activate(self) -> bool | None:
        """None: the route's default."""
        return self.activation if self.use_activation is None else self.use_activation

    @property
    def queue_priority(self) -> int:
        """vLLM serves lower numbers first, our queue higher ones."""
        return max(-MOST_PRIORITY, min(MOST_PRIORITY, -self.priority))


class _Chat(VllmRequest, kw_only=True):
    """messages  after parsing: a conversation, or None"""

    messages: Any = msgspec.UNSET
    add_special_tokens: bool | None = None
    continue_final_message: bool = False
    chat_template: str | None = None
    chat_template_kwargs: dict[str, Any] | None = None

    @property
    def special(self) -> bool:
        return self.add_special_tokens is not False


class VllmInputs(_Chat, kw_only=True):
    """input  after parsing: texts and token lists; empty if there are messages"""

    input: Any = msgspec.UNSET
    data: Any = msgspec.UNSET
    add_generation_prompt: bool = False
    media_io_kwargs: dict[str, Any] | None = None
    task: Literal["embed", "classify", "token_embed", "token_classify", "plugin", "score", "encode"] | None = None
    encoding_format: Literal["float", "base64", "bytes", "bytes_only"] = "float"
    embed_dtype: Literal["float32", "float16", "bfloat16", "fp8_e4m3", "fp8_e5m2"] = "float32"
    endianness: Literal["native", "big", "little"] = "native"
    dimensions: int | None = None

    def check_encoding(self) -> None:
        if self.encoding_format not in ("float", "base64"):
            raise FieldError(f"encoding_format {self.encoding_format!r} is not supported; use float or base64", None)
        if self.encoding_format == "base64" and self.embed_dtype not in NUMBERS:
            raise FieldError(f"embed_dtype {self.embed_dtype!r} is not supported; use float32 or float16", None)

    def encode(self, values: np.ndarray) -> Any:
        """An array in the requested encoding."""
        if self.encoding_format == "float":
            return values.tolist()
        number = ORDERS[self.endianness] + NUMBERS[self.embed_dtype]
        return base64.b64encode(np.ascontiguousarray(values, dtype=number).tobytes()).decode()


class Pairs(VllmRequest, kw_only=True):
    """queries, documents  after parsing: texts, one query for each document"""

    query: Any = msgspec.UNSET
    queries: Any = msgspec.UNSET
    documents: Any = msgspec.UNSET
    items: Any = msgspec.UNSET
    data_1: Any = msgspec.UNSET
    data_2: Any = msgspec.UNSET
    text_1: Any = msgspec.UNSET
    text_2: Any = msgspec.UNSET
    top_n: Annotated[int, Meta(ge=0)] = 0
    max_tokens_per_query: int = 0
    max_tokens_per_doc: int = 0
    instruction: str | None = None
    chat_template_kwargs: dict[str, Any] | None = None


class Tokenize(_Chat, kw_only=True):
    prompt: str | None = None
    add_generation_prompt: bool = True
    return_token_strs: bool | None = False
    tools: list[Any] | None = None


class Detokenize(VllmRequest, kw_only=True):
    tokens: list[Annotated[int, Meta(ge=0)]]


def read_inputs(fields: Mapping[str, Any]) -> VllmInputs:
    request = decoded(fields, VllmInputs)
    _refuse_chat_options(request, both=request.add_generation_prompt)
    if request.media_io_kwargs:
        raise FieldError("media_io_kwargs: the models here take text only", "media_io_kwargs")
    if request.data is not msgspec.UNSET:
        raise FieldError("`data` is for IO processor plugins, which this server does not have", "task")
    if request.task in ("score", "encode"):
        cure = "`classify`" if request.task == "score" else "`token_classify`"
        raise FieldError(f"`{request.task}` task was removed; use {cure} instead.", "task")
    if request.task is not None and request.task not in TASKS:
        raise FieldError(f"Unsupported task: {request.task!r} Supported tasks: {list(TASKS)}", "task")
    request.messages = conversation(request.messages, request.input)
    request.input = _prompts(request.input) if request.messages is None else []
    if request.messages is not None and request.add_special_tokens:
        raise FieldError("add_special_tokens: the chat template writes them already", "add_special_tokens")
    request.check_encoding()
    return request


def read_pairs(fields: Mapping[str, Any], *, rerank: bool) -> Pairs:
    request = decoded(fields, Pairs)
    if request.instruction or request.chat_template_kwargs:
        name = "instruction" if request.instruction else "chat_template_kwargs"
        raise FieldError(f"{name} needs a score template, which this server does not support", name)
    first, second = _pair_fields(request, rerank=rerank)
    queries, documents = _texts(request, first), _texts(request, second)
    if len(queries) > 1 and len(queries) != len(documents):
        raise FieldError("Input lengths must be either 1:1, 1:N or N:N", None)
    if not queries:
        raise FieldError("At least one text element must be given", None)
    if not documents:
        raise FieldError("At least one text_pair element must be given", None)
    for name, value in (("query", request.max_tokens_per_query), ("doc", request.max_tokens_per_doc)):
        if value < 0:
            raise FieldError(f"max_tokens_per_{name} must be a non-negative integer", None)
    request.queries, request.documents = queries * len(documents) if len(queries) == 1 else queries, documents
    return request


def read_tokenize(fields: Mapping[str, Any]) -> Tokenize:
    request = decoded(fields, Tokenize)
    # By default the generation prompt is added when tokenising: only an explicit request for both is a conflict.
    _refuse_chat_options(request, both=request.add_generation_prompt and "add_generation_prompt" in fields)
    if request.tools:
        raise FieldError("tools are not supported by a reward model's template", "tools")
    prompt = msgspec.UNSET if request.prompt is None else request.prompt
    request.messages = conversation(request.messages, prompt)
    if request.messages is None and request.prompt is None:
        raise _missing("prompt", "messages")
    return request


def decoded(fields: Mapping[str, Any], kind: type[T]) -> T:
    try:
        request = msgspec.convert(fields, kind)
    except msgspec.ValidationError as error:
        raise FieldError(str(error), blamed(str(error)), "invalid_request") from None
    if request.normalize is not msgspec.UNSET:
        raise FieldError("Parameter `normalize` was removed; use `use_activation` instead.", "normalize")
    if request.cache_salt == "":
        raise FieldError("Parameter 'cache_salt' must be a non-empty string if provided.", "cache_salt")
    if request.padding == "max_length":
        raise FieldError("padding: a reward model's prompts are not padded", "padding")
    if request.mm_processor_kwargs:
        raise FieldError("mm_processor_kwargs: the models here take text only", "mm_processor_kwargs")
    return request


def blamed(message: str) -> str:
    """The field named in msgspec's error, in vLLM's notation."""
    place = re.search(r"at `\$([^`]*)`", message)
    missing = re.search(r"missing required field `([^`]*)`", message)
    path = "" if place is None else re.sub(r"\[(\d+|\.\.\.)\]", r".\1", place[1])
    return f"body{path}" + (f".{missing[1]}" if missing else "")


def _refuse_chat_options(request: _Chat, *, both: bool) -> None:
    """both  whether the caller also requests a generation prompt"""
    if request.continue_final_message and both:
        raise FieldError("Cannot set both `continue_final_message` and `add_generation_prompt` to True.", None)
    if request.continue_final_message:
        raise FieldError("continue_final_message is not supported", "continue_final_message")
    if request.chat_template is not None:
        raise FieldError("Refused request with untrusted chat template: the model's own is used", None)
    if request.chat_template_kwargs:
        raise FieldError("chat_template_kwargs are not supported: leave them out", "chat_template_kwargs")


def _prompts(inputs: Any) -> Sequence[str | Sequence[int]]:
    if inputs is msgspec.UNSET:
        raise _missing("input", "messages")
    if isinstance(inputs, str):
        return [inputs]
    if isinstance(inputs, list):
        if not inputs:
            raise FieldError("You must pass at least one prompt", None)
        kinds = {*map(type, inputs)}  # there may be millions: bool is not accepted as int
        if kinds == {str}:
            return inputs
        if kinds == {int}:
            return [inputs]
        for place, entry in enumerate(inputs):
            if type(entry) is not list or not {*map(type, entry)} <= {int}:
                raise _schema(f"input[{place}] is {shown(entry)}; expected all texts, or all token ids", place)
        return inputs
    raise _schema(f"input is {shown(inputs)}; expected a text, token ids, or a list of either")


def conversation(value: Any, instead: Any) -> Sequence[Mapping[str, Any]] | None:
    """The messages, with contents given in parts joined to one text; None if there is something else."""
    if value is msgspec.UNSET or instead is not msgspec.UNSET:
        return None
    if not isinstance(value, list):
        raise FieldError(f"messages is {shown(value)}; expected a list", "body.messages", "invalid_request")
    if not value:
        raise FieldError("Cannot apply chat template to an empty conversation. Provide at least one message.", None)
    messages = []
    for place, message in enumerate(value):
        if not isinstance(message, dict) or not isinstance(message.get("role"), str):
            what = f"messages[{place}] is {shown(message)}; expected an object with role and content"
            raise FieldError(what, f"body.messages.{place}", "invalid_request")
        content = message.get("content")
        if isinstance(content, list):
            message = {**message, "content": "\n".join(_part(part, place) for part in content)}
        messages.append(message)
    return messages


def _part(part: Any, place: int) -> str:
    if isinstance(part, str):
        return part
    if isinstance(part, dict) and part.get("type") == "text" and isinstance(part.get("text"), str):
        return str(part["text"])
    kind = part.get("type") if isinstance(part, dict) else part
    raise FieldError(f"messages[{place}] has a part of type {shown(kind)}; the models here take text only", None)


def _pair_fields(request: Pairs, *, rerank: bool) -> tuple[str, str]:
    pairs = (
        [("query", "documents")]
        if rerank
        else [("queries", "documents"), ("queries", "items"), ("data_1", "data_2"), ("text_1", "text_2")]
    )
    for first, second in pairs:
        if getattr(request, first) is not msgspec.UNSET and getattr(request, second) is not msgspec.UNSET:
            return first, second
    lacking = next(name for name in pairs[0] if getattr(request, name) is msgspec.UNSET)
    forms = ", or ".join(f"{a} and {b}" for a, b in pairs)
    raise FieldError(f"{lacking} is missing; give {forms}", f"body.{lacking}", "invalid_request")


def _texts(request: Pairs, name: str) -> list[str]:
    texts = getattr(request, name)
    if isinstance(texts, list) and name != "query":
        for place, entry in enumerate(texts):
            _check_text(entry, f"{name}[{place}]", f"body.{name}.{place}")
        return texts
    _check_text(texts, name, f"body.{name}")
    return [texts]


def _check_text(value: Any, what: str, param: str) -> None:
    if isinstance(value, dict) and "content" in value:
        raise FieldError(f"{what}: MultiModalParam is not supported, the models here take text only", None)
    if not isinstance(value, str):
        raise FieldError(f"{what} is {shown(value)}; expected text", param, "invalid_request")


def _missing(*names: str) -> HttpError:
    return FieldError(f"{' or '.join(names)} is missing", f"body.{names[0]}", "invalid_request")


def _schema(message: str, place: int | None = None) -> HttpError:
    return FieldError(message, "body.input" if place is None else f"body.input.{place}", "invalid_request")


def shown(value: Any) -> str:
    if isinstance(value, str):
        return repr(value[:60])
    return str(value) if isinstance(value, bool | float | None) else f"of type {type(value).__name__}"


def classification(
    id: str, model: str, rows: Sequence[np.ndarray], labels: Sequence[str], tokens: int
) -> dict[str, Any]:
    data = [
        {"index": place, "label": labels[int(row.argmax())], "probs": row.tolist(), "num_classes": len(row)}
        for place, row in enumerate(rows)
    ]
    return {**_list(f"classify-{id}", model, data), "usage": _usage(tokens)}


def pooled(id: str, model: str, rows: Sequence[Any], tokens: int) -> dict[str, Any]:
    data = [{"index": place, "object": "pooling", "data": row} for place, row in enumerate(rows)]
    return {**_list(f"pooling-{id}", model, data), "usage": _usage(tokens)}


def embeddings(id: str, model: str, rows: Sequence[Any], tokens: int) -> dict[str, Any]:
    data = [{"index": place, "object": "embedding", "embedding": row} for place, row in enumerate(rows)]
    return {**_list(f"embd-{id}", model, data), "usage": _usage(tokens)}


def scores(id: str, model: str, values: Sequence[float], tokens: int) -> dict[str, Any]:
    data = [{"index": place, "object": "score", "score": value} for place, value in enumerate(values)]
    return {**_list(f"score-{id}", model, data), "usage": _usage(tokens)}


def reranked(
    id: str, model: str, documents: Sequence[str], values: Sequence[float], top: int, tokens: int
) -> dict[str, Any]:
    order = sorted(range(len(values)), key=lambda place: -values[place])[: top or len(values)]
    results = [
        {"index": i, "document": {"text": documents[i], "multi_modal": None}, "relevance_score": values[i]}
        for i in order
    ]
    usage = {"prompt_tokens": tokens, "total_tokens": tokens}
    return {"id": f"score-{id}", "model": model, "usage": usage, "results": results}


def tokenized(tokens: list[int], strings: list[str] | None, limit: int) -> dict[str, Any]:
    return {"count": len(tokens), "max_model_len": limit, "tokens": tokens, "token_strs": strings}


def model_card(name: str, root: str | None, limit: int | None, created: int) -> dict[str, Any]:
    """Fields of a model in /v1/models besides its name."""
    permission = {
        "id": f"modelperm-{name}", "object": "model_permission", "created": created, "allow_create_engine": False,
        "allow_sampling": True, "allow_logprobs": True, "allow_search_indices": False, "allow_view": True,
        "allow_fine_tuning": False, "organization": "*", "group": None, "is_blocking": False,
    }  # fmt: skip
    return {
        "created": created, "owned_by": "plaudit", "root": root, "parent": None, "max_model_len": limit,
        "permission": [permission],
    }  # fmt: skip


def _list(id: str, model: str, data: list[dict[str, Any]]) -> dict[str, Any]:
    return {"id": id, "object": "list", "created": int(time.time()), "model": model, "data": data}


def _usage(tokens: int) -> dict[str, Any]:
    return {
        "prompt_tokens": tokens, "total_tokens": tokens, "completion_tokens": 0, "prompt_tokens_details": None,
        "completion_tokens_details": None,
    }  # fmt: skip
