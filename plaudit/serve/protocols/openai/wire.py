"""OpenAI's chat completions and completions, with vLLM's additional sampling options.

Fields without effect here (`user`, `metadata`, `store`) are ignored. Fields that would change the text but are not
supported are rejected by name, unless they have their neutral value.
"""

from __future__ import annotations

import secrets
from collections.abc import Mapping, Sequence
from typing import Annotated, Any, TypeVar

import msgspec
from msgspec import Meta

from plaudit.serve.http.message import HttpError, Reply
from plaudit.serve.protocols.vllm.wire import FieldError, blamed, conversation, shown
from plaudit.serve.workers.frames import Sampling

MOST_SAMPLES = 128
MOST_STOPS = 64
MOST_LIKELY = 20
MOST = 2**31 - 1
SHORT = 16  # default max_tokens of a completion, as in OpenAI's API
CODES = {"unknown_model": "model_not_found", "too_long": "context_length_exceeded", "unauthorised": "invalid_api_key"}
UNSUPPORTED: dict[str, tuple[Any, ...]] = {  # unsupported fields and their neutral values
    "echo": (False,), "suffix": ("",), "functions": ([],), "function_call": ("none", "auto"), "audio": (),
    "modalities": (["text"],), "prediction": (), "web_search_options": (), "use_beam_search": (False,),
    "length_penalty": (1,), "structured_outputs": (), "guided_choice": (), "guided_grammar": (),
    "chat_template": (), "continue_final_message": (False,),
    "tool_choice": ("none", "auto"), "add_special_tokens": (True,), "bad_words": ([],),
    "truncate_prompt_tokens": (),
}  # fmt: skip
RESERVED = ("messages", "tools", "add_generation_prompt")
T = TypeVar("T", bound="GenerationRequest")


class GenerationRequest(msgspec.Struct, kw_only=True):
    model: str | None = None
    n: Annotated[int, Meta(ge=1, le=MOST_SAMPLES)] | None = None
    max_tokens: Annotated[int, Meta(ge=1)] | None = None
    temperature: Annotated[float, Meta(ge=0, le=2)] | None = None
    top_p: Annotated[float, Meta(gt=0, le=1)] | None = None
    top_k: Annotated[int, Meta(ge=-1, le=MOST)] | None = None
    min_p: Annotated[float, Meta(ge=0, le=1)] | None = None
    min_tokens: Annotated[int, Meta(ge=0, le=MOST)] | None = None
    stop: str | Annotated[list[str], Meta(max_length=MOST_STOPS)] | None = None
    stop_token_ids: Annotated[list[Annotated[int, Meta(ge=0, le=MOST)]], Meta(max_length=MOST_STOPS)] | None = None
    ignore_eos: bool | None = None
    seed: int | None = None
    logit_bias: dict[str, float] | None = None
    presence_penalty: Annotated[float, Meta(ge=-2, le=2)] | None = None
    frequency_penalty: Annotated[float, Meta(ge=-2, le=2)] | None = None
    repetition_penalty: Annotated[float, Meta(gt=0)] | None = None
    allowed_token_ids: list[Annotated[int, Meta(ge=0, le=MOST)]] | None = None
    prompt_logprobs: Annotated[int, Meta(ge=0, le=MOST_LIKELY)] | None = None
    response_format: dict[str, Any] | None = None
    guided_json: str | dict[str, Any] | None = None
    guided_regex: str | None = None
    stream: bool | None = None
    stream_options: dict[str, Any] | None = None

    @property
    def top(self) -> int | None:
        """The number of likely tokens beside each log-prob; None: no log-probs. Chats and completions have different
        fields for it."""
        raise NotImplementedError

    @property
    def stops(self) -> tuple[str, ...]:
        return (self.stop,) if isinstance(self.stop, str) else tuple(self.stop or ())

    @property
    def with_usage(self) -> bool:
        """Whether a stream ends with token counts."""
        return bool((self.stream_options or {}).get("include_usage"))

    def sampling(self, max_tokens: int) -> Sampling:
        """Sampling parameters. A request without a seed gets one, so that it is sampled identically if its worker is
        restarted."""
        greedy = self.temperature == 0  # filters have no effect then, though many clients send them
        return Sampling(
            max_tokens=max_tokens, temperature=1.0 if self.temperature is None else self.temperature, n=self.n or 1,
            top_k=0 if greedy else max(0, self.top_k or 0), top_p=1.0 if greedy else self.top_p or 1.0,
            min_p=0.0 if greedy else self.min_p or 0.0, stop=self.stops,
            stop_token_ids=tuple(self.stop_token_ids or ()), min_tokens=self.min_tokens or 0, logit_bias=self._biases(),
            seed=secrets.randbits(62) if self.seed is None else self.seed % 2**63, ignore_eos=bool(self.ignore_eos),
            repetition_penalty=self.repetition_penalty or 1.0, presence_penalty=self.presence_penalty or 0.0,
            frequency_penalty=self.frequency_penalty or 0.0,
            allowed_token_ids=None if self.allowed_token_ids is None else tuple(self.allowed_token_ids),
            json_schema=self._schema(), regex=self.guided_regex, top_logprobs=self.top or 0,
            prompt_logprobs=self.prompt_logprobs,
        )  # fmt: skip

    def _schema(self) -> str | None:
        """The JSON schema of OpenAI's `response_format`, or of vLLM's `guided_json`."""
        given = self.response_format or {"type": "text"}
        kind, table = given.get("type"), given.get("json_schema")
        schema: Any = self.guided_json
        if kind == "json_object":
            schema = {"type": "object"}
        elif kind == "json_schema" and isinstance(table, dict) and isinstance(table.get("schema"), dict):
            schema = table["schema"]
        elif kind != "text":
            raise FieldError(
                f"response_format is {shown(given)}; expected a type of text, json_object or json_schema with a "
                "json_schema.schema", "response_format",
            )  # fmt: skip
        return schema if schema is None or isinstance(schema, str) else msgspec.json.encode(schema).decode()

    def _biases(self) -> dict[int, float]:
        try:
            return {_token(key): bias for key, bias in (self.logit_bias or {}).items()}
        except ValueError:
            problem = f"logit_bias has the keys {list(self.logit_bias or ())[:3]}; expected token ids"
            raise FieldError(problem, "logit_bias") from None


class ChatRequest(GenerationRequest, kw_only=True):
    """messages   after parsing: contents given in parts are joined to one text"""

    messages: Any = msgspec.UNSET
    max_completion_tokens: Annotated[int, Meta(ge=1)] | None = None
    logprobs: bool | None = None
    top_logprobs: Annotated[int, Meta(ge=0, le=MOST_LIKELY)] | None = None
    tools: list[dict[str, Any]] | None = None
    tool_choice: Any = None
    add_generation_prompt: bool = True
    chat_template_kwargs: dict[str, Any] | None = None

    @property
    def most(self) -> int | None:
        return self.max_tokens if self.max_completion_tokens is None else self.max_completion_tokens

    @property
    def top(self) -> int | None:
        return (self.top_logprobs or 0) if self.logprobs else None

    @property
    def variables(self) -> dict[str, Any]:
        """Variables passed to the chat template besides the messages."""
        tools = self.tools if self.tools and self.tool_choice != "none" else None
        return {**(self.chat_template_kwargs or {}), **({"tools": tools} if tools else {})}


class CompletionRequest(GenerationRequest, kw_only=True):
    """prompt   after parsing: texts or token lists"""

    prompt: Any = msgspec.UNSET
    logprobs: Annotated[int, Meta(ge=0, le=5)] | None = None
    best_of: int | None = None

    @property
    def top(self) -> int | None:
        return self.logprobs


def read_chat(fields: Mapping[str, Any]) -> ChatRequest:
    request = _decoded(fields, ChatRequest)
    messages = conversation(request.messages, msgspec.UNSET)
    if messages is None:
        raise FieldError("messages is missing", "messages", "invalid_request")
    request.messages = messages
    if request.top_logprobs and not request.logprobs:
        raise FieldError("top_logprobs needs logprobs = true; set it, or leave both out", "top_logprobs")
    for name in set(request.chat_template_kwargs or ()) & set(RESERVED):
        raise FieldError(
            f"chat_template_kwargs has {name!r}; send it as a field of the request", "chat_template_kwargs"
        )
    return request


def read_completion(fields: Mapping[str, Any]) -> CompletionRequest:
    request = _decoded(fields, CompletionRequest)
    if request.best_of not in (None, request.n or 1):
        raise FieldError(
            f"best_of is {request.best_of} and n is {request.n or 1}; expected equal values: choosing "
            "among samples is not supported",
            "best_of",
        )
    request.prompt = _prompts(request.prompt)
    return request


def _decoded(fields: Mapping[str, Any], kind: type[T]) -> T:
    for name, harmless in UNSUPPORTED.items():
        value = fields.get(name)
        if value is not None and value not in harmless:
            what = shown(value) if not isinstance(value, int) else value
            raise FieldError(f"{name} is {what}, which is not supported; leave it out", name)
    try:
        request = msgspec.convert(fields, kind)
    except msgspec.ValidationError as error:
        raise FieldError(str(error), blamed(str(error)).removeprefix("body.") or None, "invalid_request") from None
    if request.stream and request.prompt_logprobs is not None:
        raise FieldError("prompt_logprobs are not supported with stream: leave one of them out", "prompt_logprobs")
    return request


def _token(key: str) -> int:
    if not key.isdecimal() or len(key) > len(str(MOST)) or int(key) > MOST:
        raise ValueError(key)
    return int(key)


def _prompts(prompt: Any) -> list[str | list[int]]:
    if prompt is msgspec.UNSET or prompt is None:
        raise FieldError("prompt is missing", "prompt", "invalid_request")
    if isinstance(prompt, str):
        return [prompt]
    if isinstance(prompt, list) and prompt:
        if {*map(type, prompt)} == {int}:
            return [prompt]
        if all(isinstance(each, str) or (isinstance(each, list) and {*map(type, each)} == {int}) for each in prompt):
            return prompt
    raise FieldError("prompt must be a text, token ids, or a list of either, and not empty", "prompt")


def write_error(error: HttpError, request_id: str) -> Reply:
    return error.shaped(error_body(error), request_id, _status(error))


def error_body(error: HttpError) -> dict[str, Any]:
    status = _status(error)
    kind = "server_error" if status >= 500 else "rate_limit_error" if status == 429 else "invalid_request_error"
    param = error.param if isinstance(error, FieldError) else None
    code = "invalid_api_key" if status == 401 else CODES.get(error.type, error.type)
    return {"error": {"message": str(error), "type": kind, "param": param, "code": code}}


def _status(error: HttpError) -> int:
    return 400 if error.status in (415, 422) else error.status


def usage(prompt: int, completion: int) -> dict[str, int]:
    return {"prompt_tokens": prompt, "completion_tokens": completion, "total_tokens": prompt + completion}


def event(content: Any) -> bytes:
    return b"data: " + msgspec.json.encode(content) + b"\n\n"


DONE = b"data: [DONE]\n\n"


Tops = Sequence[Sequence[tuple[str, float]]]


def chat_logprobs(tokens: Sequence[str], logprobs: Sequence[float], tops: Tops) -> dict[str, Any]:
    def row(token: str, logprob: float) -> dict[str, Any]:
        return {"token": token, "logprob": logprob, "bytes": list(token.encode())}

    rows = map(row, tokens, logprobs)
    content = [{**each, "top_logprobs": [row(*pair) for pair in top]} for each, top in zip(rows, tops, strict=True)]
    return {"content": content, "refusal": None}


def completion_logprobs(
    tokens: Sequence[str], logprobs: Sequence[float], tops: Tops | None, offset: int
) -> dict[str, Any]:
    """offset  of the first token's text"""
    offsets = []
    for token in tokens:
        offsets.append(offset)
        offset += len(token)
    drawn = zip(tokens, logprobs, strict=True)
    # The sampled token is included, as in OpenAI's API; of two tokens with the same text the likelier is returned.
    likely: list[dict[str, float]] | None = None
    if tops is not None:
        likely = [{**dict([*reversed(top)]), token: logprob} for top, (token, logprob) in zip(tops, drawn, strict=True)]
    return {
        "tokens": list(tokens), "token_logprobs": list(logprobs), "top_logprobs": likely, "text_offset": offsets,
    }  # fmt: skip
