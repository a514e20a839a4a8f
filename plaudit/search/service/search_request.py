"""Parses the body of a search request, and builds its recipe within the server's limits."""

from __future__ import annotations

import re
import secrets
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import msgspec

from plaudit.config.search import SearchRecipe, SearchServiceTable, parse_search
from plaudit.errors import ConfigError, nearest
from plaudit.serve.http.message import HttpError
from plaudit.serve.protocols.openai import wire

FIELDS = ("model", "prm", "prompt", "messages", "seed", "stream", "search")
RULE = (
    "method", "width", "keep", "lookahead", "branch", "temperature", "branch_weight", "cluster_weight", "cost",
    "kv_budget", "aggregate", "vote", "max_depth", "ground",
)  # fmt: skip
STEPS = ("stop", "answer_after", "temperature", "top_p", "max_step_tokens", "max_tokens")
BUDGET = ("generated", "kv_tokens", "calls", "seconds", "lead")
# Fields of a chat that a search uses.
SEARCHED = (
    "model", "messages", "n", "seed", "stream", "stream_options", "temperature", "top_p", "max_tokens",
    "max_completion_tokens", "tools", "tool_choice", "add_generation_prompt", "continue_final_message",
    "chat_template_kwargs", "documents", "reasoning_effort",
)  # fmt: skip
LONGEST_MARK = 100  # characters
MOST_SEEDS = 2**63


@dataclass(frozen=True, slots=True)
class SearchRequest:
    """prompt    a text; None if `chat` has messages
    options   the object `search`: keys of a recipe's [search], with `steps` and `budget` for these tables
    """

    model: str | None
    prm: str | None
    prompt: str | None
    chat: wire.ChatRequest | None
    options: Mapping[str, Any]
    seed: int
    stream: bool


def read_search(fields: Mapping[str, Any]) -> SearchRequest:
    """Parses the body of /v1/search."""
    _known(fields, FIELDS, "")
    prompt, messages = fields.get("prompt"), fields.get("messages")
    if (prompt is None) == (messages is None):
        raise _wrong("expected either prompt, a text, or messages")
    if prompt is not None and not isinstance(prompt, str):
        raise _wrong(f"prompt is a {type(prompt).__name__}; expected one text")
    stream = fields.get("stream")
    if stream is not None and not isinstance(stream, bool):
        raise _wrong(f"stream is {stream!r}; expected true or false"[:200])
    chat = None if messages is None else wire.read_chat({"messages": messages})
    return SearchRequest(
        _name(fields, "model"), _name(fields, "prm"), prompt, chat, _object(fields, "search"),
        _seed(fields.get("seed")), bool(stream),
    )  # fmt: skip


def read_searched_chat(fields: Mapping[str, Any]) -> SearchRequest:
    """Parses a chat completion with a search. Its sampling fields apply to the steps."""
    chat = wire.read_chat({name: value for name, value in fields.items() if name != "search"})
    if chat.n not in (None, 1):
        raise _wrong(f"n is {chat.n}, but a search returns one answer; remove n, search.width is the number of paths")
    if chat.stops:
        raise _wrong("stop is not supported in a search; search.steps.stop ends a step")
    for each in msgspec.structs.fields(chat):
        if each.name not in SEARCHED and getattr(chat, each.name) not in (each.default, None, False, [], {}, 0):
            raise _wrong(f"{each.name} is not supported in a search; remove it")
    options = dict(_object(fields, "search"))
    prm = _name(options, "prm")
    options.pop("prm", None)
    sampling = {"temperature": chat.temperature, "top_p": chat.top_p, "max_tokens": chat.most}
    steps = {name: value for name, value in sampling.items() if value is not None}
    options["steps"] = {**steps, **_object(options, "steps")}
    return SearchRequest(chat.model, prm, None, chat, options, _seed(chat.seed), bool(chat.stream))


def recipe_of(wanted: SearchRequest, table: SearchServiceTable, stop: str, most_tokens: int) -> SearchRecipe:
    """stop   the text that ends a step in the process model's format
    room   tokens of the policy's positions left by the prompt
    """
    options = wanted.options
    _known(options, (*RULE, "steps", "budget"), "search.")
    steps, budget = dict(_object(options, "steps", "search.")), dict(_object(options, "budget", "search."))
    _known(steps, STEPS, "search.steps.")
    _known(budget, BUDGET, "search.budget.")
    defaults = table.steps.model_dump()
    if "stop" not in table.steps.model_fields_set:
        defaults["stop"] = stop
    if "max_tokens" not in steps:
        defaults["max_tokens"] = max(1, min(defaults["max_tokens"], most_tokens))
    if (mark := steps.pop("answer_after", None)) is not None:
        steps["answer"] = _after(mark)
    rule = {name: value for name, value in options.items() if name in RULE}
    defaults_of_rule = table.rule.model_dump()
    if rule.get("method", table.rule.method) != "auto":
        defaults_of_rule["ground"] = None
    elif rule.get("ground", table.rule.ground) is None:
        raise _wrong(
            'search.method is "auto", but a server has no correct answers to measure with: set search.ground, '
            '{"steps", "accuracy", "auc"} as measured by `plaudit search --method auto`, or set a method'
        )
    tree = {
        "seed": wanted.seed, "model": {"path": "policy"}, "data": {"path": "request"}, "prm": {"path": "prm"},
        "search": {**defaults_of_rule, **rule, "clusters": "text", "encoder": None},
        "steps": {**defaults, **steps}, "budget": budget,
    }  # fmt: skip
    try:
        recipe = parse_search(tree, "search")
    except ConfigError as error:
        raise _wrong(str(error)) from None
    if recipe.search.width > table.max_width:
        raise _wrong(f"search.width is {recipe.search.width}; the limit of this server is {table.max_width}")
    most = min(recipe.budget.generated or table.max_generated, table.max_generated)
    return recipe.model_copy(update={"budget": recipe.budget.model_copy(update={"generated": most})})


def _after(mark: Any) -> str:
    """A pattern for the rest of the line after a mark. A mark is plain text: a client's regex might run forever."""
    if not isinstance(mark, str) or not 0 < len(mark) <= LONGEST_MARK:
        raise _wrong(f"search.steps.answer_after must be a text of 1 to {LONGEST_MARK} characters")
    return re.escape(mark) + r"[^\S\n]*([^\n]*[^\s])"


def _known(fields: Mapping[str, Any], names: Sequence[str], place: str) -> None:
    for name in fields:
        if name not in names:
            raise _wrong(f"unknown field {place}{name[:60]}; {nearest(name[:60], names)}")


def _object(fields: Mapping[str, Any], name: str, place: str = "") -> Mapping[str, Any]:
    value = fields.get(name)
    if value is not None and not isinstance(value, dict):
        raise _wrong(f"{place}{name} is a {type(value).__name__}; expected an object")
    return value or {}


def _name(fields: Mapping[str, Any], key: str) -> str | None:
    value = fields.get(key)
    if value is not None and not isinstance(value, str):
        raise _wrong(f"{key} is a {type(value).__name__}; expected a model's name")
    return value


def _seed(value: Any) -> int:
    """A missing seed is drawn at random, and returned in the reply."""
    if value is None:
        return secrets.randbits(31)
    if type(value) is not int or not 0 <= value < MOST_SEEDS:
        raise _wrong(f"seed is {str(value)[:40]}; expected an integer from 0 to 2^63 - 1")
    return value


def _wrong(message: str) -> HttpError:
    return HttpError(422, "invalid_request", message)
