"""Input forms of items to score; all are converted to Items."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import msgspec

from plaudit.errors import RequestError
from plaudit.records import Item

Prompt = str | Sequence[Mapping[str, Any]]
Entry = Item | tuple[Prompt, str | Sequence[str | Sequence[str]]] | Mapping[str, Any]
"""An Item; (prompt, responses); or the fields of a JSON line, such as {"prompt", "responses"} or {"messages"}."""


class _Fields(msgspec.Struct):
    prompt: str | list[dict[str, Any]] | None = None
    response: str | list[str] | None = None
    responses: list[str | list[str]] | None = None
    messages: list[dict[str, Any]] | None = None
    text: str | None = None
    tokens: list[int] | None = None
    truth: Any = None
    cut: bool = False


def all_items(entries: Iterable[Entry]) -> list[Item]:
    """One Item per response, in order."""
    items: list[Item] = []
    for number, entry in enumerate(entries):
        if isinstance(entry, Item):
            items.append(entry)
            continue
        try:
            items += items_of(_fields(entry))
        except RequestError as error:
            raise RequestError(f"items[{number}]: {error}") from None
    return items


def items_of(fields: Mapping[str, Any]) -> list[Item]:
    """The Items of one mapping. Unknown fields are ignored; a field that is None counts as missing."""
    try:
        row = msgspec.convert(fields, _Fields)
    except msgspec.ValidationError as error:
        raise RequestError(str(error)) from None
    if row.response is not None and row.responses is not None:
        raise RequestError("it has both response and responses; expected one of them")
    if row.responses is not None and not row.responses:
        raise RequestError("responses is empty; expected at least one")
    responses: list[str | list[str] | None] = [row.response] if row.responses is None else [*row.responses]
    prompt = tuple(row.prompt) if isinstance(row.prompt, list) else row.prompt
    messages = None if row.messages is None else tuple(row.messages)
    tokens = None if row.tokens is None else tuple(row.tokens)
    try:
        return [
            Item(prompt, tuple(r) if isinstance(r, list) else r, messages, row.text, tokens, row.truth, cut=row.cut)
            for r in responses
        ]
    except ValueError as error:
        raise RequestError(f"{error}; its fields are {sorted(fields)}") from None


def _fields(entry: Any) -> Mapping[str, Any]:
    if isinstance(entry, Mapping):
        return entry
    if isinstance(entry, tuple) and len(entry) == 2:
        prompt, responses = entry
        several = [responses] if isinstance(responses, str) else list(responses)
        return {"prompt": prompt, "responses": several}
    raise RequestError(f"expected an Item, (prompt, responses) or a mapping, got {type(entry).__name__}")
