"""Converts items to request bodies, and replies to validated results.

The wire format is that of `protocols/native`. Results are matched to items by position, so every count must agree; a
reply with any error is discarded entirely.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field, replace
from hashlib import blake2b
from typing import Any

import msgspec

from plaudit.errors import BadReply
from plaudit.records import Item, ItemError, Score, StepScores

Result = Score | StepScores

# Of one request. The server batches across requests, so that large ones gain nothing; small ones can be spread over
# servers, and lose little where one of these dies.
REQUEST_ITEMS = 64
REQUEST_BYTES = 1 << 20


@dataclass(frozen=True, slots=True)
class Options:
    """Options of all requests of one call."""

    model: str | None = None
    steps: bool = False
    truncate: str | None = None
    priority: int = 0


@dataclass(slots=True)
class _Group:
    """Consecutive responses of one prompt; or one item of another form, which has no responses."""

    key: bytes
    fields: dict[str, msgspec.Raw]
    responses: list[msgspec.Raw]
    places: list[int]
    bytes: int

    def wire(self) -> dict[str, Any]:
        return {**self.fields, "responses": self.responses} if self.responses else self.fields


@dataclass(slots=True)
class Exchange:
    """One request: `places` are the positions of its items in the call, a list per group. `route` is the same for all
    requests of a call: if a server has two versions, one of them answers the whole call."""

    options: Options
    groups: list[_Group] = field(default_factory=list)
    route: str = ""

    @property
    def places(self) -> list[int]:
        return [place for group in self.groups for place in group.places]

    def body(self) -> bytes:
        fields = {"model": self.options.model, "steps": self.options.steps, "priority": self.options.priority}
        if self.options.truncate is not None:
            fields["truncate"] = self.options.truncate
        return msgspec.json.encode({**fields, "items": [group.wire() for group in self.groups]})

    def read(self, content: bytes) -> tuple[str, list[Result]]:
        """The version of the model and a result for every position."""
        try:
            reply = _REPLY.decode(content)
        except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
            raise BadReply(f"the reply does not match the request: {' '.join(str(error).split())[:200]}") from None
        if not reply.version:
            raise BadReply("its version is empty; expected the version of the model")
        if self.options.model is not None and reply.model != self.options.model:
            raise BadReply(f"the request was for {self.options.model!r}, but {reply.model[:100]!r} answered")
        if len(reply.items) != len(self.groups):
            raise BadReply(f"{len(self.groups)} items were sent, but the reply has {len(reply.items)}")
        results: list[Result] = []
        for number, (group, item) in enumerate(zip(self.groups, reply.items, strict=True)):
            try:
                results += _results(item, len(group.places), reply.version, self.options.steps)
            except BadReply as error:
                raise BadReply(f"items[{number}] of its reply: {error}") from None
        return reply.version, results


def exchanges(items: Sequence[Item], options: Options) -> tuple[list[Exchange], dict[int, Result]]:
    """The requests that score these items, and error results of items that cannot be sent."""
    unsent: dict[int, Result] = {}
    requests: list[Exchange] = []
    count = size = 0
    for group, truncate in _groups(items, options, unsent):
        full = count + len(group.places) > REQUEST_ITEMS or size + group.bytes > REQUEST_BYTES
        if not requests or full or requests[-1].options.truncate != truncate:
            requests.append(Exchange(replace(options, truncate=truncate)))
            count = size = 0
        requests[-1].groups.append(group)
        count += len(group.places)
        size += group.bytes
    if len(requests) > 1:
        route = blake2b(requests[0].body(), digest_size=16).hexdigest()
        for request in requests:
            request.route = route
    return requests, unsent


def _groups(items: Sequence[Item], options: Options, unsent: dict[int, Result]) -> Iterator[tuple[_Group, str | None]]:
    last: tuple[_Group, str | None] | None = None
    for place, item in enumerate(items):
        truncate = item.truncate or options.truncate
        try:
            group = _group(item, place)
        except (TypeError, ValueError, OverflowError, RecursionError) as error:
            # Invalid Unicode in a sampled text, or a truth that is not JSON, fails only its item.
            reason = ItemError("invalid_item", f"it cannot be sent as JSON: {' '.join(str(error).split())[:200]}")
            unsent[place] = StepScores(error=reason) if options.steps else Score(error=reason)
            continue
        if last is not None and _joins(group, last[0]) and truncate == last[1]:
            last[0].responses += group.responses
            last[0].places += group.places
            last[0].bytes += len(bytes(group.responses[0]))
            continue
        if last is not None:
            yield last
        last = (group, truncate)
    if last is not None:
        yield last


def _group(item: Item, place: int) -> _Group:
    encode = msgspec.json.encode
    forms = {"prompt": item.prompt, "messages": item.messages, "text": item.text, "tokens": item.tokens}
    encoded = {name: encode(value) for name, value in forms.items() if value is not None}
    if item.truth is not None:
        encoded["truth"] = encode(item.truth)
    if item.cut:
        encoded["cut"] = encode(True)
    responses = [] if item.response is None else [encode(item.response)]
    return _Group(
        b"\0".join(encoded.values()), {name: msgspec.Raw(value) for name, value in encoded.items()},
        [msgspec.Raw(response) for response in responses], [place], sum(map(len, [*encoded.values(), *responses])),
    )  # fmt: skip


def _joins(group: _Group, last: _Group) -> bool:
    """Whether both have the same prompt (and truth): one group, whose prefix the server computes once."""
    if not group.responses or not last.responses:
        return False
    small = len(last.places) < REQUEST_ITEMS and last.bytes + len(bytes(group.responses[0])) <= REQUEST_BYTES
    return small and group.key == last.key


# Replies


class _Error(msgspec.Struct):
    type: str
    message: str = ""


class _Item(msgspec.Struct):
    scores: list[float | None] | None = None
    steps: list[list[float] | None] | None = None
    attributes: list[dict[str, float]] | None = None
    truncated: list[bool] | None = None
    errors: list[_Error | None] | None = None
    error: _Error | None = None


class _Reply(msgspec.Struct):
    model: str
    version: str
    items: list[_Item]


_REPLY = msgspec.json.Decoder(_Reply)


def _results(item: _Item, count: int, version: str, steps: bool) -> list[Result]:
    if item.error is not None:
        if item.scores is not None:
            raise BadReply("it has both scores and an error")
        return [_failed(item.error, version, steps)] * count
    for name in ("scores", "steps", "attributes", "truncated", "errors"):
        values = getattr(item, name)
        if values is not None and len(values) != count:
            raise BadReply(f"{count} responses were sent, but the reply has {len(values)} {name}")
    if item.scores is None:
        raise BadReply("it has neither scores nor an error")
    if steps and item.steps is None:
        raise BadReply("step scores were requested, but the reply has none")
    return [_result(item, at, version, steps) for at in range(count)]


def _result(item: _Item, at: int, version: str, steps: bool) -> Result:
    assert item.scores is not None
    value = item.scores[at]
    error = item.errors[at] if item.errors is not None else None
    if (value is None) == (error is None):
        raise BadReply(f"response {at} has {'neither a score nor' if error is None else 'both a score and'} an error")
    attributes = item.attributes[at] if item.attributes is not None else {}
    for part in attributes.values():
        _finite(part, at)
    if error is not None:
        failed = _failed(error, version, steps)  # several labels without weights have a score each
        return replace(failed, attributes=attributes) if isinstance(failed, Score) else failed
    assert value is not None
    truncated = item.truncated is not None and item.truncated[at]
    if steps:
        values = item.steps[at] if item.steps is not None else None
        if not values:
            raise BadReply(f"response {at} has a score but no step scores")
        return StepScores(
            tuple(_finite(v, at) for v in values), _finite(value, at), version=version, truncated=truncated
        )
    return Score(_finite(value, at), attributes=attributes, version=version, truncated=truncated)


def _finite(value: float, at: int) -> float:
    if not math.isfinite(value):
        raise BadReply(f"response {at} has the score {value}, which is not finite")
    return value


def _failed(error: _Error, version: str, steps: bool) -> Result:
    reason = ItemError(error.type, error.message)
    return StepScores(error=reason, version=version) if steps else Score(error=reason, version=version)
