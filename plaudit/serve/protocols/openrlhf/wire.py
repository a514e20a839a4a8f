"""OpenRLHF's remote reward model: `POST /get_reward`.

    in    {"query": ["<whole text, rendered>", ...], "prompts": [...], "labels": [...]}   (the oldest: query alone)
    out   {"rewards": [0.7, ...], "scores": [0.7, ...], "extra_logs": {"helpfulness": [...]}}

A client with several URLs sends empty lists to all but one and wants 200 for them. There is no room for the error of a
single query: one that fails fails its request. Text that is too long is refused, where the original cuts the end of the
response off without a word; `/get_reward?truncate=left` (or `right`) asks for a cut.

A model reads the query. Rules, judges and blends read prompt and response: the query from where its prompt ends.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Literal

import msgspec

from plaudit.errors import one_line
from plaudit.records import Item, Score, StepScores
from plaudit.serve.http.message import HttpError

Truncate = Literal["left", "right"] | None


class _Body(msgspec.Struct):
    query: list[str]
    prompts: Any = None
    labels: Any = None


@dataclass(frozen=True, slots=True)
class OpenrlhfRequest:
    queries: list[str]
    prompts: list[Any]
    labels: list[Any]
    truncate: Truncate

    def item(self, place: int) -> Item:
        """Prompt and response apart."""
        query, prompt = self.queries[place], self.prompts[place]
        if not isinstance(prompt, str) or prompt not in query:
            raise HttpError(
                422, "unsupported_form", f"query[{place}] does not hold prompts[{place}], and a rule, judge or blend "
                "must know where the response begins",
            )  # fmt: skip
        response = query[query.index(prompt) + len(prompt) :]
        return Item(prompt=prompt, response=response, truth=self.labels[place], truncate=self.truncate)


def read(body: bytes, query: dict[str, str]) -> OpenrlhfRequest:
    try:
        request = msgspec.json.decode(body, type=_Body)
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
        raise HttpError(422, "invalid_request", f"query must be a list of texts: {one_line(error, 200)}") from None
    count = len(request.query)
    return OpenrlhfRequest(
        request.query, _beside(request.prompts, count), _beside(request.labels, count), read_truncate(query)
    )


def _beside(values: Any, count: int) -> list[Any]:
    """One for each query; the oldest clients send none."""
    return values if isinstance(values, list) and len(values) == count else [None] * count


def read_truncate(query: dict[str, str]) -> Truncate:
    side = query.get("truncate")
    if side is None or side == "left" or side == "right":
        return side  # type: ignore[return-value]
    raise HttpError(422, "invalid_request", f"truncate is {side[:20]!r}; expected left or right")


def write(results: Sequence[Score | StepScores], values: Sequence[float]) -> dict[str, Any]:
    logs: dict[str, list[float]] = {}
    attributes = [result.attributes if isinstance(result, Score) else {} for result in results]
    if attributes and all(attributes):
        logs = {name: [float(a[name]) for a in attributes] for name in attributes[0]}
    return {"rewards": list(values), "scores": list(values), "extra_logs": logs}
