"""The labelled data for evaluating a judge: pairs, or single responses with a label."""

from __future__ import annotations

from dataclasses import dataclass, replace
from itertools import islice
from pathlib import Path

from plaudit.client.items import items_of
from plaudit.errors import DataError, RequestError
from plaudit.records import Item
from plaudit.train.data.rows import Row, stream_rows

FORMS = 'rows are {"prompt", "chosen", "rejected"} or {"prompt", "response", "label": true or false}'
OWN = ("prompt", "response", "chosen", "rejected", "label")


@dataclass(frozen=True, slots=True)
class Pair:
    """Two responses to a prompt; humans prefer `chosen`."""

    chosen: Item
    rejected: Item


@dataclass(frozen=True, slots=True)
class Labelled:
    item: Item
    label: bool


def read_labelled(path: Path, limit: int | None = None) -> list[Pair] | list[Labelled]:
    """Reads the rows, which must all have the form of the first one."""
    rows = list(islice(stream_rows(path), limit))
    if rows[0].fields.get("chosen") is not None:
        return [_pair(row) for row in rows]
    labelled = [_labelled(row) for row in rows]
    if len({each.label for each in labelled}) < 2:
        raise DataError(f"{path}: every label is {labelled[0].label}; expected rows of both labels")
    return labelled


def _pair(row: Row) -> Pair:
    chosen, rejected = row.text("chosen"), row.text("rejected")
    if chosen == rejected:
        raise DataError(
            f"{row.origin}: chosen and rejected are the same text, so no verdict can be right; remove the row"
        )
    return Pair(_item(row, chosen), _item(row, rejected))


def _labelled(row: Row) -> Labelled:
    label = row.fields.get("label")
    if "chosen" in row.fields or label not in (0, 1):  # includes True and False
        columns = sorted(row.fields) if label is None else f"label = {label!r}"
        raise DataError(f"{row.origin}: found {columns}; {FORMS}, with one form per file")
    return Labelled(_item(row, row.text("response")), bool(label))


def _item(row: Row, response: str) -> Item:
    others = {name: value for name, value in row.fields.items() if name not in OWN}
    try:
        (item,) = items_of({"prompt": row.fields.get("prompt"), "response": response, "truth": others.get("truth")})
    except RequestError as error:
        raise DataError(f"{row.origin}: {error}") from None
    return replace(item, columns=others)


def text_length(item: Item) -> int:
    """The number of characters of the response."""
    return len(str(item.response))
