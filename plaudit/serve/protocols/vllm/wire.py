"""vLLM's pooling API (0.32), and the OpenAI embeddings format in which SGLang's reward models answer.

vLLM ignores fields that it does not know. Here every field that would have no effect is refused by name, unless it has
a value that changes nothing: a misspelt or unsupported option never passes in silence.
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

from plaudit.errors import nearest
from plaudit.serve.http.message import HttpError, Reply, Request, given

T = TypeVar("T", bound="VllmRequest")
S = TypeVar("S", bound=msgspec.Struct)
RESERVED = ("messages", "tools", "add_generation_prompt")  # variables of a chat template that are fields of a request
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
ANY = None  # in place of the values that change nothing: no value does
Neutral = Mapping[str, tuple[Any, ...] | None]
# Fields without a meaning here, and the values with which they change nothing.
NEUTRAL: Neutral = {
    "encoding_format": ("float",), "embed_dtype": ("float32",), "endianness": ("native",), "media_io_kwargs": ({},),
    "mm_processor_kwargs": ({},), "session_id": ANY, "rid": ANY,
}  # fmt: skip
NEUTRAL_PAIRS: Neutral = {**NEUTRAL, "rank_fields": ([],), "return_embeddings": (False,), "truncation": (False,)}


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


class _Pooled(VllmRequest, kw_only=True):
    truncate_prompt_tokens: Annotated[int, Meta(ge=-1)] | None = None
    truncation_side: Literal["left", "right"] | None = None
    padding: Literal["max_length", "do_not_pad"] | None = None
    request_id: str | None = None
    priority: int = 0
    cache_salt: str | None = None
    use_activation: bool | None = None
    activation: bool | None = None

    @property
    def activate(self) -> bool | None:
        """None: the route's default."""
        return self.activation if self.use_activation is None else self.use_activation

    @property
    def queue_priority(self) -> int:
        """vLLM serves lower numbers first, our queue higher ones."""
        return max(-MOST_PRIORITY, min(MOST_PRIORITY, -self.priority))


class VllmInputs(_Pooled, kw_only=True):
    """messages  after parsing: a conversation, or None
    input     after parsing: texts and token lists; empty if there are messages
    """

    input: Any = msgspec.UNSET
    messages: Any = msgspec.UNSET
    add_special_tokens: bool = True
    add_generation_prompt: bool = False
    continue_final_message: bool = False
    chat_template: str | None = None
    chat_template_kwargs: dict[str, Any] | None = None

    @property
    def variables(self) -> dict[str, Any]:
        """Variables passed to the chat template besides the messages."""
        return self.chat_template_kwargs or {}


class VllmVectors(VllmInputs, kw_only=True):
    data: Any = msgspec.UNSET
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


class Pairs(_Pooled, kw_only=True):
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
    return_documents: bool = True


class Tokenize(VllmRequest, kw_only=True):
    """prompt, or messages and their options, as in VllmInputs"""

    prompt: str | None = None
    messages: Any = msgspec.UNSET
    add_special_tokens: bool = True
    add_generation_prompt: bool | None = None
    continue_final_message: bool = False
    chat_template: str | None = None
    chat_template_kwargs: dict[str, Any] | None = None
    tools: list[dict[str, Any]] | None = None
    return_token_strs: bool = False

    @property
    def variables(self) -> dict[str, Any]:
        return {**(self.chat_template_kwargs or {}), **({"tools": self.tools} if self.tools else {})}


class Detokenize(VllmRequest, kw_only=True):
    tokens: list[Annotated[int, Meta(ge=0)]]


def read_inputs(fields: Mapping[str, Any]) -> VllmInputs:
    return _checked(decoded(fields, VllmInputs), fields)


def read_vectors(fields: Mapping[str, Any]) -> VllmVectors:
    request = _checked(decoded(fields, VllmVectors), fields)
    if request.data is not msgspec.UNSET:
        raise FieldError("`data` is for IO processor plugins, which this server does not have", "task")
    if request.task in ("score", "encode"):
        cure = "`classify`" if request.task == "score" else "`token_classify`"
        raise FieldError(f"`{request.task}` task was removed; use {cure} instead.", "task")
    if request.task is not None and request.task not in TASKS:
        raise FieldError(f"Unsupported task: {request.task!r} Supported tasks: {list(TASKS)}", "task")
    request.check_encoding()
    return request


In = TypeVar("In", bound=VllmInputs)


def _checked(request: In, fields: Mapping[str, Any]) -> In:
    _refuse_chat_options(request, fields)
    data = getattr(request, "data", msgspec.UNSET)
    request.messages = conversation(request.messages, request.input)
    request.input = _prompts(request.input) if request.messages is None and data is msgspec.UNSET else []
    return request


def read_pairs(fields: Mapping[str, Any], *, rerank: bool) -> Pairs:
    request = decoded(fields, Pairs, NEUTRAL_PAIRS)
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
    _refuse_chat_options(request, fields)
    if request.add_generation_prompt is None:
        request.add_generation_prompt = not request.continue_final_message
    prompt = msgspec.UNSET if request.prompt is None else request.prompt
    request.messages = conversation(request.messages, prompt)
    if request.messages is None and request.prompt is None:
        raise _missing("prompt", "messages")
    return request


def decoded(fields: Mapping[str, Any], kind: type[T], neutral: Neutral = NEUTRAL) -> T:
    if "normalize" in fields:
        raise FieldError("Parameter `normalize` was removed; use `use_activation` instead.", "normalize")
    request = admitted(fields, kind, neutral)
    if isinstance(request, _Pooled) and request.cache_salt == "":
        raise FieldError("Parameter 'cache_salt' must be a non-empty string if provided.", "cache_salt")
    if isinstance(request, _Pooled) and request.padding == "max_length":
        raise FieldError("padding: a reward model's prompts are not padded", "padding")
    return request


def admitted(fields: Mapping[str, Any], kind: type[S], neutral: Neutral) -> S:
    """The request of these fields, without nulls. A field that this kind of request does not have is refused, unless it
    has a value that changes nothing."""
    names = [each.name for each in msgspec.structs.fields(kind)]
    values = {}
    for name, value in given(fields).items():
        if name in names:
            values[name] = value
        elif name == "extra_body" and isinstance(value, dict):  # an argument of the SDK, which some clients send
            for inner, each in value.items():
                if fields.get(inner) != each:
                    raise FieldError(f"extra_body has {inner[:60]!r}: send it as a field of the request", "extra_body")
        elif name not in neutral:
            raise FieldError(f"unknown field {name[:60]!r}; {nearest(name[:60], names)}", name[:60])
        elif (harmless := neutral[name]) is not ANY and value not in harmless:
            what = value if isinstance(value, int) else shown(value)
            raise FieldError(f"{name} is {what}, which is not supported; leave it out", name)
    try:
        return msgspec.convert(values, kind)
    except msgspec.ValidationError as error:
        raise FieldError(str(error), blamed(str(error)), "invalid_request") from None


def blamed(message: str) -> str:
    """The field named in msgspec's error, in vLLM's notation."""
    place = re.search(r"at `\$([^`]*)`", message)
    missing = re.search(r"missing required field `([^`]*)`", message)
    path = "" if place is None else re.sub(r"\[(\d+|\.\.\.)\]", r".\1", place[1])
    return f"body{path}" + (f".{missing[1]}" if missing else "")


def _refuse_chat_options(request: VllmInputs | Tokenize, fields: Mapping[str, Any]) -> None:
    if request.continue_final_message and request.add_generation_prompt:
        raise FieldError("Cannot set both `continue_final_message` and `add_generation_prompt` to True.", None)
    if request.chat_template is not None:
        raise FieldError("Refused request with untrusted chat template: the model's own is used", None)
    if request.messages is not msgspec.UNSET and fields.get("add_special_tokens"):
        raise FieldError("add_special_tokens: the chat template writes them already", "add_special_tokens")
    check_variables(request.chat_template_kwargs)


def check_variables(variables: Mapping[str, Any] | None) -> None:
    for name in set(variables or ()) & set(RESERVED):
        problem = f"chat_template_kwargs has {name!r}; send it as a field of the request"
        raise FieldError(problem, "chat_template_kwargs")


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


def reply_id(request: Request, given: str | None) -> str:
    """The request's id from its header or body, or a generated one."""
    return request.id if b"x-request-id" in request.headers or given is None else given


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


def reranked(id: str, model: str, request: Pairs, values: Sequence[float], tokens: int) -> dict[str, Any]:
    order = sorted(range(len(values)), key=lambda place: -values[place])[: request.top_n or len(values)]
    results: list[dict[str, Any]] = [{"index": i, "relevance_score": values[i]} for i in order]
    if request.return_documents:
        for result in results:
            result["document"] = {"text": request.documents[result["index"]], "multi_modal": None}
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
