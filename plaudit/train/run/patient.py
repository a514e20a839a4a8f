"""HTTP client for a server that a run depends on: requests are retried until the recipe's patience is exhausted."""

from __future__ import annotations

import os
import random
import time
from collections.abc import Callable, Mapping
from typing import Any

import httpx
import msgspec

from plaudit.errors import ConfigError, RunError
from plaudit.train.run.overdue import Warn, overdue
from plaudit.train.run.signals import leave_on_signal, patience_left

AGAIN = (408, 429, 503, 504)  # retryable
FIRST_PAUSE, LONGEST_PAUSE = 0.2, 5.0  # seconds between attempts


class PatientHttp:
    """`who` is the server's role in the run, `table` its table in the recipe, `cure` how to start it. `failed` is
    raised when patience is exhausted; `refused` makes the error for a response that is not retryable, from the
    response, its path and its reason."""

    def __init__(
        self, who: str, table: str, url: str, *, key_env: str | None, patience: float, cure: str, warn: Warn,
        failed: type[RunError], refused: Callable[[httpx.Response, str, str], RunError],
    ) -> None:  # fmt: skip
        self.who, self.table, self.url = who, table, url.rstrip("/")
        self.patience, self.cure, self.warn = patience, cure, warn
        self.failed, self.refused = failed, refused
        headers = {}
        if key_env is not None:
            key = os.environ.get(key_env)
            if key is None:
                raise ConfigError(f"{table}.key_env names {key_env}, which is not set: export {key_env}=…")
            headers["Authorization"] = f"Bearer {key}"
        # The recipe sets the address: redirects are not followed and proxies of the environment are ignored.
        self._http = httpx.Client(headers=headers, follow_redirects=False, trust_env=False)

    def close(self) -> None:
        self._http.close()

    def send(self, method: str, path: str, body: bytes, headers: Mapping[str, str]) -> httpx.Response:
        patience = patience_left(self.patience)
        with leave_on_signal(), overdue(self.who, [self.url], patience, f"{self.table}.patience", self.warn):
            return self._answered(method, path, body, headers, patience)

    def _answered(
        self, method: str, path: str, body: bytes, headers: Mapping[str, str], patience: float
    ) -> httpx.Response:
        until = time.monotonic() + patience
        pause = FIRST_PAUSE
        while True:
            left = until - time.monotonic()
            try:
                reply = self._http.request(
                    method, self.url + path, content=body, headers={**headers, "X-Deadline": f"{left:.3f}"},
                    timeout=httpx.Timeout(left, connect=min(left, 10.0)),
                )  # fmt: skip
                if reply.status_code == 200:
                    return reply
                why = _reason(reply)
                if reply.status_code not in AGAIN:
                    raise self.refused(reply, path, why)
            except httpx.TransportError as error:
                why = str(error) or type(error).__name__
            except httpx.InvalidURL as error:
                raise ConfigError(f"{self.table}.url {self.url!r} is not a valid URL: {error}") from None
            if time.monotonic() + pause >= until:
                raise self.failed(
                    f"{self.who} at {self.url} did not respond within {patience:g} s ({self.table}.patience): {why}; "
                    f"{self.cure}, then --resume"
                )
            time.sleep(pause * random.uniform(0.5, 1.0))
            pause = min(2 * pause, LONGEST_PAUSE)


def error_of(reply: httpx.Response) -> dict[str, Any]:
    """Return the body of an error response; empty if it is not a JSON object."""
    try:
        body = msgspec.json.decode(reply.content)
    except (msgspec.DecodeError, UnicodeDecodeError):
        return {}
    return body if isinstance(body, dict) else {}


def _reason(reply: httpx.Response) -> str:
    error = error_of(reply).get("error", f"HTTP status {reply.status_code}")
    return str(error.get("message")) if isinstance(error, dict) else str(error)
