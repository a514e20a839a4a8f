"""The connection of a training process to its reward servers, configured by environment variables.

        PLAUDIT_URL       the server's address; several servers of the same model are separated by commas
        PLAUDIT_MODEL     the model's name; default: the server's first
        PLAUDIT_API_KEY   the server's API key
        PLAUDIT_TRUNCATE  left or right: the side to truncate if too long; by default that is an error
        PLAUDIT_TIMEOUT   seconds for a reward, including retries; default: 300

Trainers call from threads, from temporary event loops, from forked workers and from actors to which a reward function
was pickled; so the client has its own thread in each process, for the lifetime of the process.
"""

from __future__ import annotations

import asyncio
import math
import os
from collections.abc import Sequence
from functools import cache
from typing import Literal

from plaudit.client.client import DEFAULT_URL, RewardClient
from plaudit.errors import ConfigError, ServerError
from plaudit.records import Item, Score

Side = Literal["left", "right"]


class Connection:
    """A client of a trainer's reward function. It can be pickled, and used after a fork, as the client itself."""

    def __init__(
        self, urls: str | Sequence[str], model: str | None = None, api_key: str | None = None,
        truncate: Side | None = None, timeout: float | None = 300.0,
    ) -> None:  # fmt: skip
        self.truncate = truncate
        self._client = RewardClient(urls, model=model, api_key=api_key, timeout=timeout)

    def scores(self, items: Sequence[Item]) -> list[Score]:
        """A score for each item, in order; those that the server could not score have an error. Raises ServerError if
        there is no answer at all."""
        return self._client.score(items, truncate=self.truncate)

    async def scores_soon(self, items: Sequence[Item]) -> list[Score]:
        """The same without blocking the event loop; cancelling the call cancels the request."""
        return await asyncio.wrap_future(self._client.submit(items, truncate=self.truncate))

    def close(self) -> None:
        self._client.close()


def values(scores: Sequence[Score], what: str) -> list[float]:
    """For trainers that need a number: an item without a score raises an exception, as no number would be correct."""
    found: list[float] = []
    for place, score in enumerate(scores):
        if score.value is None:
            assert score.error is not None
            raise ServerError(f"no reward for {what}[{place}]: {score.error.type}: {score.error.message}")
        found.append(score.value)
    return found


def from_environment(url: str | None = None, model: str | None = None) -> Connection:
    """The connection for these settings, shared by equal settings. Arguments override the environment."""
    read = os.environ.get
    settings = (
        url or read("PLAUDIT_URL") or DEFAULT_URL, model or read("PLAUDIT_MODEL") or None,
        read("PLAUDIT_API_KEY") or None, read("PLAUDIT_TRUNCATE") or None, read("PLAUDIT_TIMEOUT") or "300",
    )  # fmt: skip
    return _connection(*settings)


@cache  # without a lock of its own, which a fork could copy while another thread has it
def _connection(urls: str, model: str | None, api_key: str | None, truncate: str | None, timeout: str) -> Connection:
    if truncate not in (None, "left", "right"):
        raise ConfigError(f"PLAUDIT_TRUNCATE is {truncate!r}; expected left or right, or unset it")
    try:
        seconds = float(timeout)
    except ValueError:
        seconds = math.nan
    if not 0 < seconds < math.inf:
        raise ConfigError(f"PLAUDIT_TIMEOUT is {timeout!r}; expected seconds above 0, such as 300")
    given = [url.strip() for url in urls.split(",") if url.strip()]
    return Connection(given, model, api_key, truncate, seconds)  # type: ignore[arg-type]
