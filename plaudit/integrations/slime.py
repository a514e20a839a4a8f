"""slime: `--custom-rm-path plaudit.integrations.slime.custom_rm`, also with `--group-rm`.

The server is set in the environment; see `connection.py`. The route `/remote_rm` needs no Python (`--rm-type
remote_rm`); this scores a group in one request, and adds an API key, several servers and a deadline.
"""

from __future__ import annotations

import os
from typing import Any

from plaudit.errors import ConfigError
from plaudit.integrations.connection import from_environment, values
from plaudit.records import Item


async def custom_rm(args: Any, sample: Any, **_: Any) -> float | list[float]:
    """A reward, or a list for a list of samples. Raises if one is missing."""
    samples = sample if isinstance(sample, list) else [sample]
    rendered = _rendered()
    rewards = values(await from_environment().scores_soon([_item(s, rendered) for s in samples]), "sample")
    return rewards if isinstance(sample, list) else rewards[0]


def _rendered() -> bool:
    """PLAUDIT_RENDERED=true: slime's --apply-chat-template has rendered prompts to text with control strings."""
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
        raise ConfigError(
            "PLAUDIT_RENDERED is true, but a prompt is a list of messages; unset it, or send rendered text"
        )
    return Item(prompt=tuple(prompt), response=sample.response, truth=sample.label)
