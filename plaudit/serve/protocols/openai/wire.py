"""OpenAI's chat completions and completions, with vLLM's additional options.

A field that would have no effect is refused by name, unless it has a value that changes nothing. A few fields change
nothing in any reply (`user`, `metadata`, `store`): they are ignored.
"""

from __future__ import annotations

import re
import secrets
from collections.abc import Mapping, Sequence
from typing import Annotated, Any, TypeVar

import msgspec
from msgspec import Meta

from plaudit.serve.http.message import HttpError, Reply, given
from plaudit.serve.protocols.vllm.wire import (
    ANY,
    MOST_PRIORITY,
    FieldError,
    Neutral,
    admitted,
    check_variables,
    conversation,
    shown,
)
from plaudit.serve.workers.frames import Sampling

MOST_SAMPLES = 128
MOST_STOPS = 64
MOST_LIKELY = 20
MOST = 2**31 - 1
SHORT = 16  # default max_tokens of a completion, as in OpenAI's API
CODES = {"unknown_model": "model_not_found", "too_long": "context_length_exceeded", "unauthorised": "invalid_api_key"}
# Fields that are not supported, and the values with which they change nothing.
NEUTRAL: Neutral = {
    **dict.fromkeys(
        (
            "user", "metadata", "store", "service_tier", "safety_identifier", "prompt_cache_key",
            "prompt_cache_retention", "session_id", "stream_interval", "spaces_between_special_tokens", "mm_payload",
            "return_mm_kwargs", "return_token_offsets", "routed_experts_prompt_start",
        ), ANY,
    ),
    "use_beam_search": (False,), "length_penalty": (1,), "bad_words": ([],), "skip_special_tokens": (True,),
    "detokenize": (True,), "watermarking": (False,), "thinking_token_budget": (-1,), "mm_processor_kwargs": ({},),
    "media_io_kwargs": ({},), "vllm_xargs": ({},), "kv_transfer_params": ({},), "ec_transfer_params": ({},),
}  # fmt: skip
NEUTRAL_CHAT: Neutral = {
    **NEUTRAL, "echo": (False,), "functions": ([],), "function_call": ("none", "auto"), "modalities": (["text"],),
    "parallel_tool_calls": (True,), "include_reasoning": (True,), "add_special_tokens": (False,), "audio": (),
    "verbosity": ("medium",), "return_prompt_text": (False,), "return_assistant_tokens_mask": (False,),
}  # fmt: skip
NEUTRAL_COMPLETION: Neutral = {**NEUTRAL, "suffix": ("",)}
# Constraints of `structured_outputs`, of which a request has one, and its options with the values that change nothing.
CONSTRAINTS = ("json", "regex", "choice", "json_object")
UNCONSTRAINED: dict[str, tuple[Any, ...]] = {
    "disable_any_whitespace": (False,), "disable_additional_properties": (False,), "whitespace_pattern": (),
    "json_object": (False,),
}  # fmt: skip
FORMS = {
    "json": "a JSON schema", "regex": "a regular expression", "choice": "a list of texts, not empty",
    "json_object": "true",
}  # fmt: skip
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
    structured_outputs: dict[str, Any] | None = None
    include_stop_str_in_output: bool = False
    return_token_ids: bool = False
    return_tokens_as_token_ids: bool = False
    priority: int = 0
    request_id: str | None = None
    cache_salt: Annotated[str, Meta(min_length=1, max_length=1024)] | None = None
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
            **self._constraint(), top_logprobs=self.top or 0, prompt_logprobs=self.prompt_top,
            include_stop=self.include_stop_str_in_output,
        )  # fmt: skip

    @property
    def prompt_top(self) -> int | None:
        """The number of likely tokens beside each log-prob of the prompt; None: no log-probs of it."""
        return self.prompt_logprobs

    @property
    def queue_priority(self) -> int:
        """vLLM serves lower numbers first, our queue higher ones."""
        return max(-MOST_PRIORITY, min(MOST_PRIORITY, -self.priority))

    def _constraint(self) -> dict[str, str | None]:
        """What the text must match: `response_format`, `structured_outputs`, or vLLM's former `guided_json` and
        `guided_regex`."""
        json, regex = _structured(self.structured_outputs)
        found = {
            "response_format": (self._formatted(), None), "structured_outputs": (json, regex),
            "guided_json": (_as_text(self.guided_json), None), "guided_regex": (None, self.guided_regex),
        }  # fmt: skip
        used = [name for name, pair in found.items() if pair != (None, None)]
        if len(used) > 1:
            raise FieldError(f"{' and '.join(used)} cannot be combined: leave one of them out", used[1])
        json, regex = found[used[0]] if used else (None, None)
        return {"json_schema": json, "regex": regex}

    def _formatted(self) -> str | None:
        """The JSON schema of OpenAI's `response_format`."""
        given = self.response_format or {"type": "text"}
        kind, table = given.get("type"), given.get("json_schema")
        schema: Any = None
        if kind == "json_object":
            schema = {"type": "object"}
        elif kind == "json_schema" and isinstance(table, dict) and isinstance(table.get("schema"), dict):
            schema = table["schema"]
        elif kind != "text":
            raise FieldError(
                f"response_format is {shown(given)}; expected a type of text, json_object or json_schema with a "
                "json_schema.schema", "response_format",
            )  # fmt: skip
        return _as_text(schema)

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
    add_generation_prompt: bool | None = None
    continue_final_message: bool = False
    chat_template_kwargs: dict[str, Any] | None = None
    documents: list[dict[str, Any]] | None = None
    reasoning_effort: str | None = None

    @property
    def most(self) -> int | None:
        return self.max_tokens if self.max_completion_tokens is None else self.max_completion_tokens

    @property
    def top(self) -> int | None:
        return (self.top_logprobs or 0) if self.logprobs else None

    @property
    def variables(self) -> dict[str, Any]:
        """Variables passed to the chat template besides the messages."""
        tools = self.tools if self.tool_choice != "none" else None
        own: dict[str, Any] = {"tools": tools, "documents": self.documents, "reasoning_effort": self.reasoning_effort}
        given = {**(self.chat_template_kwargs or {}), **{name: value for name, value in own.items() if value}}
        if self.reasoning_effort:
            given.setdefault("enable_thinking", self.reasoning_effort != "none")
        return given

    def check_template(self, template: str) -> None:
        """Refuses variables that the template does not use, which would have no effect."""
        readers = {"documents": ("documents",), "reasoning_effort": ("reasoning_effort", "enable_thinking")}
        for name, variables in readers.items():
            if getattr(self, name) and not any(each in template for each in variables):
                raise FieldError(f"{name}: the model's chat template does not use it; leave it out", name)

    @property
    def opening(self) -> bool:
        """Whether the template appends the assistant's generation prompt."""
        given = self.add_generation_prompt
        return not self.continue_final_message if given is None else given


class CompletionRequest(GenerationRequest, kw_only=True):
    """prompt   after parsing: texts or token lists"""

    prompt: Any = msgspec.UNSET
    logprobs: Annotated[int, Meta(ge=0, le=MOST_LIKELY)] | None = None
    best_of: int | None = None
    echo: bool = False
    max_tokens: Annotated[int, Meta(ge=0)] | None = None
    add_special_tokens: bool = True

    @property
    def top(self) -> int | None:
        return self.logprobs

    @property
    def prompt_top(self) -> int | None:
        return self.logprobs if self.echo and self.prompt_logprobs is None else self.prompt_logprobs

    @property
    def only_prompt(self) -> bool:
        """Whether the reply has only the prompt: one token is sampled and left out."""
        return self.max_tokens == 0


def read_chat(fields: Mapping[str, Any]) -> ChatRequest:
    request = _decoded(fields, ChatRequest, NEUTRAL_CHAT)
    messages = conversation(request.messages, msgspec.UNSET)
    if messages is None:
        raise FieldError("messages is missing", "messages", "invalid_request")
    request.messages = messages
    if request.top_logprobs and not request.logprobs:
        raise FieldError("top_logprobs needs logprobs = true; set it, or leave both out", "top_logprobs")
    if request.tool_choice not in (None, "none", "auto"):
        problem = f"tool_choice is {shown(request.tool_choice)}, which is not supported; expected none or auto"
        raise FieldError(problem, "tool_choice")
    if request.continue_final_message and request.add_generation_prompt:
        raise FieldError("Cannot set both `continue_final_message` and `add_generation_prompt` to True.", None)
    check_variables(request.chat_template_kwargs)
    return request


def read_completion(fields: Mapping[str, Any]) -> CompletionRequest:
    request = _decoded(fields, CompletionRequest, NEUTRAL_COMPLETION)
    if request.best_of not in (None, request.n or 1):
        raise FieldError(
            f"best_of is {request.best_of} and n is {request.n or 1}; expected equal values: choosing "
            "among samples is not supported",
            "best_of",
        )
    request.prompt = _prompts(request.prompt)
    if request.only_prompt and not request.echo:
        raise FieldError("max_tokens is 0, which needs echo = true; expected at least 1", "max_tokens")
    if request.stream and request.echo and request.logprobs is not None:
        raise FieldError("echo with logprobs is not supported with stream: leave one of them out", "echo")
    return request


def _decoded(fields: Mapping[str, Any], kind: type[T], neutral: Neutral) -> T:
    if "chat_template" in given(fields):
        raise FieldError("chat_template is not supported: the model's own is used; leave it out", "chat_template")
    try:
        request = admitted(fields, kind, neutral)
    except FieldError as error:
        error.param = (error.param or "").removeprefix("body").removeprefix(".") or None
        raise
    if request.stream and request.prompt_logprobs is not None:
        raise FieldError("prompt_logprobs are not supported with stream: leave one of them out", "prompt_logprobs")
    if request.stream_options and not request.stream:
        raise FieldError("Stream options can only be defined when `stream=True`.", "stream_options")
    return request


def _structured(options: Mapping[str, Any] | None) -> tuple[str | None, str | None]:
    """vLLM's `structured_outputs` as a JSON schema or a regular expression."""
    if options is None:
        return None, None
    field, options = "structured_outputs", given(options)
    wanted = {name: value for name, value in options.items() if name in CONSTRAINTS and value is not False}
    for name, value in options.items():
        if name not in wanted and value not in UNCONSTRAINED.get(name, ()):
            raise FieldError(f"{field}.{name} is not supported; expected one of {', '.join(CONSTRAINTS)}", field)
    if len(wanted) != 1:
        what = f"has {' and '.join(wanted)}" if wanted else "has no constraint"
        raise FieldError(f"{field} {what}; expected one of {', '.join(CONSTRAINTS)}", field)
    match *wanted.keys(), *wanted.values():
        case ["json", str() | dict() as schema]:
            return _as_text(schema), None
        case ["json_object", True]:
            return _as_text({"type": "object"}), None
        case ["regex", str() as pattern]:
            return None, pattern
        case ["choice", [*choices]] if choices and all(isinstance(each, str) for each in choices):
            return None, "|".join(f"(?:{re.escape(each)})" for each in choices)
    ((name, value),) = wanted.items()
    raise FieldError(f"{field}.{name} is {shown(value)}; expected {FORMS[name]}", field)


def _as_text(schema: Any) -> str | None:
    return schema if schema is None or isinstance(schema, str) else msgspec.json.encode(schema).decode()


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
Named = tuple[str, str, float]


def chat_logprobs(rows: Sequence[tuple[Named, Sequence[Named]]]) -> dict[str, Any]:
    """For each token itself and the likeliest ones: their names, texts and log-probs."""
    content = [{**_logprob(*own), "top_logprobs": [_logprob(*each) for each in top]} for own, top in rows]
    return {"content": content, "refusal": None}


def _logprob(name: str, text: str, logprob: float) -> dict[str, Any]:
    return {"token": name, "logprob": logprob, "bytes": list(text.encode())}


def completion_logprobs(
    tokens: Sequence[str], logprobs: Sequence[float | None], tops: Tops | None, texts: Sequence[str], offset: int
) -> dict[str, Any]:
    """texts   of the tokens, which `tokens` may name by their ids; `offset` is that of the first
    logprobs   None for the first token of a prompt
    """
    offsets = []
    for text in texts:
        offsets.append(offset)
        offset += len(text)
    drawn = zip(tokens, logprobs, strict=True)
    # The sampled token is included, as in OpenAI's API; of two tokens with the same text the likelier is returned.
    likely: list[dict[str, float] | None] | None = None
    if tops is not None:
        likely = [
            None if logprob is None else {**dict([*reversed(top)]), token: logprob}
            for top, (token, logprob) in zip(tops, drawn, strict=True)
        ]
    return {
        "tokens": list(tokens), "token_logprobs": list(logprobs), "top_logprobs": likely, "text_offset": offsets,
    }  # fmt: skip
