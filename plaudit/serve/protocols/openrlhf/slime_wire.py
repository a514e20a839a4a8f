"""slime's `--rm-type remote_rm --rm-url http://host:5555/remote_rm`: one sample a request.

    in    {"prompt": "..." or [messages], "response": "...", "label": "..."}
    out   0.73, or with ?key=reward (and slime's --reward-key reward) {"reward": 0.73}

With `?rendered=true` prompt and response are taken as one rendered text, as `--apply-chat-template` makes them: control
strings in them are control tokens. Without it nothing in them is.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import msgspec

from plaudit.errors import one_line
from plaudit.records import Item
from plaudit.serve.http.message import HttpError
from plaudit.serve.protocols.openrlhf.wire import read_truncate


class _Body(msgspec.Struct):
    prompt: str | list[dict[str, Any]]
    response: str
    label: Any = None


@dataclass(frozen=True, slots=True)
class SlimeRequest:
    item: Item
    key: str | None


def read(body: bytes, query: dict[str, str]) -> SlimeRequest:
    try:
        sample = msgspec.json.decode(body, type=_Body)
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
        why = one_line(error, 200)
        raise HttpError(422, "invalid_request", f"expected prompt, response and label: {why}") from None
    truncate = read_truncate(query)
    rendered = query.get("rendered", "false")
    if rendered not in ("true", "false"):
        raise HttpError(422, "invalid_request", f"rendered is {rendered[:20]!r}; expected true or false")
    if rendered == "true":
        if not isinstance(sample.prompt, str):
            raise HttpError(422, "invalid_request", "rendered=true, and the prompt is a list of messages")
        item = Item(text=sample.prompt + sample.response, truth=sample.label, truncate=truncate)
    else:
        prompt = sample.prompt if isinstance(sample.prompt, str) else tuple(sample.prompt)
        item = Item(prompt=prompt, response=sample.response, truth=sample.label, truncate=truncate)
    return SlimeRequest(item, query.get("key"))


def write(value: float, key: str | None) -> Any:
    return value if key is None else {key: value}
