"""The connection of a training process to its reward servers, set up by the environment.

    PLAUDIT_URL       the server's address; several, of the same model, with commas between them
    PLAUDIT_MODEL     the model's name; the server's first if it is not set
    PLAUDIT_API_KEY   the server's key
    PLAUDIT_TRUNCATE  left or right: the side that may be cut off what is too long; without it that is an error
    PLAUDIT_TIMEOUT   seconds that a reward may take, retries included; 300 if it is not set

Trainers call from threads, from event loops that come and go, and from forked workers; so the client has a thread of
its own in each process, and lives as long as that.
"""

from __future__ import annotations

import asyncio
import math
import os
import threading
from collections.abc import Sequence
from typing import Literal, cast

from plaudit.client.client import DEFAULT_URL, RewardClient
from plaudit.errors import ConfigError, ServerError
from plaudit.records import Item, Score

Side = Literal["left", "right"]


class Connection:
    """A client that is started by the first call, and again in a process that was forked since."""

    def __init__(
        self, urls: str | Sequence[str], model: str | None = None, api_key: str | None = None,
        truncate: Side | None = None, timeout: float | None = 300.0,
    ) -> None:  # fmt: skip
        self.urls = urls
        self.model = model
        self.truncate = truncate
        self._api_key = api_key
        self._timeout = timeout
        self._lock = threading.Lock()
        self._client: RewardClient | None = None
        self._process = 0

    def scores(self, items: Sequence[Item]) -> list[Score]:
        """One for each, in order; those that the server could not score have an error. Raises ServerError if there is
        no answer at all."""
        return cast(list[Score], self._start().score(items, truncate=self.truncate))

    async def scores_soon(self, items: Sequence[Item]) -> list[Score]:
        """The same, without holding up the event loop; a call that is cancelled is withdrawn from the server."""
        return cast(list[Score], await asyncio.wrap_future(self._start().submit(items, truncate=self.truncate)))

    def close(self) -> None:
        with self._lock:
            if self._client is not None and self._process == os.getpid():
                self._client.close()
            self._client = None

    def _start(self) -> RewardClient:
        with self._lock:
            if self._client is None or self._process != os.getpid():
                self._client = RewardClient(self.urls, model=self.model, api_key=self._api_key, timeout=self._timeout)
                self._process = os.getpid()
            return self._client


def values(scores: Sequence[Score], what: str) -> list[float]:
    """For trainers that take a number or nothing: what has no score is an exception, for no number would be right."""
    found: list[float] = []
    for place, score in enumerate(scores):
        if score.value is None:
            assert score.error is not None
            raise ServerError(f"no reward for {what}[{place}]: {score.error.type}: {score.error.message}")
        found.append(score.value)
    return found


_connections: dict[tuple[str | None, ...], Connection] = {}
_connections_lock = threading.Lock()


def from_environment(url: str | None = None, model: str | None = None) -> Connection:
    """The same one for the same settings. What is given here wins over the environment."""
    read = os.environ.get
    settings = (
        url or read("PLAUDIT_URL") or DEFAULT_URL, model or read("PLAUDIT_MODEL") or None,
        read("PLAUDIT_API_KEY") or None, read("PLAUDIT_TRUNCATE") or None, read("PLAUDIT_TIMEOUT") or "300",
    )  # fmt: skip
    with _connections_lock:
        if settings not in _connections:
            _connections[settings] = _new(*settings)
        return _connections[settings]


def _new(urls: str, model: str | None, api_key: str | None, truncate: str | None, timeout: str) -> Connection:
    if truncate not in (None, "left", "right"):
        raise ConfigError(f"PLAUDIT_TRUNCATE is {truncate!r}; expected left or right, or leave it out")
    try:
        seconds = float(timeout)
    except ValueError:
        seconds = math.nan
    if not 0 < seconds < math.inf:
        raise ConfigError(f"PLAUDIT_TIMEOUT is {timeout!r}; expected seconds above 0, such as 300")
    given = [url.strip() for url in urls.split(",") if url.strip()]
    return Connection(given, model, api_key, truncate, seconds)  # type: ignore[arg-type]
