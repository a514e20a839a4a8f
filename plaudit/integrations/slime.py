"""slime: `--custom-rm-path plaudit.integrations.slime.custom_rm`, also with `--group-rm`.

The server is the environment's; see `connection.py`. The route `/remote_rm` needs no Python (`--rm-type remote_rm`);
this scores a group in one request, and adds a key, several servers and a deadline.
"""

from __future__ import annotations

import os
from typing import Any

from plaudit.errors import ConfigError
from plaudit.integrations.connection import from_environment, values
from plaudit.records import Item


async def custom_rm(args: Any, sample: Any, **_: Any) -> float | list[float]:
    """A reward, or for a list of samples a list. Raises where there is none."""
    samples = sample if isinstance(sample, list) else [sample]
    rendered = _rendered()
    rewards = values(await from_environment().scores_soon([_item(s, rendered) for s in samples]), "sample")
    return rewards if isinstance(sample, list) else rewards[0]


def _rendered() -> bool:
    """PLAUDIT_RENDERED=true: slime's --apply-chat-template has made prompts into text with control strings in it."""
    given = os.environ.get("PLAUDIT_RENDERED", "false")
    if given not in ("true", "false"):
        raise ConfigError(f"PLAUDIT_RENDERED is {given!r}; expected true or false")
    return given == "true"


def _item(sample: Any, rendered: bool) -> Item:
    prompt: Any = sample.prompt
    if isinstance(prompt, str):
        if rendered:
            return Item(text=prompt + sample.response, truth=sample.label)
        return Item(prompt=prompt, response=sample.response, truth=sample.label)
    if rendered:
        raise ConfigError("PLAUDIT_RENDERED is true, and a prompt is a list of messages; leave one of them out")
    return Item(prompt=tuple(prompt), response=sample.response, truth=sample.label)
