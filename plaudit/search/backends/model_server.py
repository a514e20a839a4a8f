"""A client for other servers, used by many threads: retries while the server is busy, and fails all requests if it is
down."""

from __future__ import annotations

import os
import random
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any, TypeVar

import httpx

from plaudit.errors import BadReply, ConfigError, RequestRefused, ServerError

A = TypeVar("A")
B = TypeVar("B")
FIRST_PAUSE, LONGEST_PAUSE = 0.1, 5.0
REJECTED_STATUSES = (400, 413, 422)  # status codes about a single request, such as a path that is too long


class ModelServer:
    """what     what is requested, for error messages
    table    of the recipe, for error messages
    """

    def __init__(
        self, url: str, what: str, table: str, *, key_env: str | None, timeout: float, concurrency: int
    ) -> None:  # fmt: skip
        self.url = url.rstrip("/")
        self.what, self.timeout = what, timeout
        headers = {}
        if key_env is not None:
            if not os.environ.get(key_env):
                raise ConfigError(f"{table}.key_env is {key_env}, but this environment variable is not set")
            headers["Authorization"] = f"Bearer {os.environ[key_env]}"
        limits = httpx.Limits(max_connections=concurrency)
        self._http = httpx.Client(headers=headers, limits=limits, follow_redirects=False, trust_env=False)
        self._threads = ThreadPoolExecutor(concurrency, thread_name_prefix="search")
        self._lost = threading.Event()
        self._served = False

    def each(self, call: Callable[[A], B], requests: Sequence[A]) -> list[B | RequestRefused]:
        """Sends all requests. If the server is down, the first request to give up ends the others' waiting. Rejected
        requests are returned as such, unless the server has rejected all so far."""
        self._lost.clear()

        def tried(request: A) -> B | RequestRefused:
            try:
                return call(request)
            except RequestRefused as error:
                if error.status not in REJECTED_STATUSES:
                    raise
                return error

        results = list(self._threads.map(tried, requests))
        refused = [result for result in results if isinstance(result, RequestRefused)]
        self._served = self._served or len(refused) < len(results)
        if refused and not self._served:
            raise refused[0]
        return results

    def post(self, path: str, body: Mapping[str, Any]) -> Any:
        url = self.url + path
        deadline, pause = time.monotonic() + self.timeout, FIRST_PAUSE
        cause = "the timeout expired before the first attempt"
        while (left := deadline - time.monotonic()) > 0 and not self._lost.is_set():
            try:
                reply = self._http.post(url, json=body, timeout=left)
            except httpx.HTTPError as error:
                cause = f"{type(error).__name__}: {error}"
            else:
                if reply.status_code == 200:
                    return self._decoded(url, reply)
                cause = f"it answered {reply.status_code}: {reply.text[:200]!r}"
                if reply.status_code < 500 and reply.status_code not in (408, 429):
                    raise RequestRefused(reply.status_code, "", f"{url} rejected the request: {cause}")
            # Jitter, so that requests rejected together are not retried together.
            self._lost.wait(min(pause * random.uniform(0.5, 1.5), max(0.0, deadline - time.monotonic())))
            pause = min(2 * pause, LONGEST_PAUSE)
        self._lost.set()
        raise ServerError(
            f"no {self.what} from {url} within {self.timeout:g} s ({cause}); check that the server is running"
        )

    def close(self) -> None:
        self._threads.shutdown(wait=False, cancel_futures=True)
        self._http.close()

    def _decoded(self, url: str, reply: httpx.Response) -> Any:
        try:
            return reply.json()
        except ValueError:
            raise BadReply(f"{url} did not return {self.what} but {reply.text[:80]!r}") from None
