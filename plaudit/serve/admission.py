"""How much work is let in, counted in tokens: what would only wait is refused at once, with a time to come back."""

from __future__ import annotations

import math
from collections.abc import Iterator
from contextlib import contextmanager

from plaudit.serve.http import HttpError
from plaudit.serve.metrics import Metrics

PACE_SECONDS = 10.0  # over which the pace of answering is estimated
LONGEST_WAIT = 30


class Admission:
    """open_tokens are accepted and not yet answered; draining lets nothing more in."""

    def __init__(self, queued_tokens: int, buffered_bytes: int, overload_status: int, metrics: Metrics) -> None:
        self.most_tokens = queued_tokens
        self.most_bytes = buffered_bytes
        self.status = overload_status
        self.open_tokens = 0
        self.open_bytes = 0
        self.open_requests = 0
        self.draining = False
        self._metrics = metrics
        self._answered = 0
        self._pace = 0.0  # tokens answered in a second, while there is something to answer

    @contextmanager
    def request(self, content_length: int) -> Iterator[None]:
        """Before anything of the request is read."""
        if self.draining:
            self._metrics.rejected.labels("draining").inc()
            raise HttpError(503, "draining", "the server is shutting down; try another", retry_after=1)
        if self.open_bytes + content_length > self.most_bytes and self.open_bytes:
            raise self._overload(f"{self.open_bytes} bytes of requests are being handled, at most {self.most_bytes}")
        if self.open_tokens >= self.most_tokens:
            raise self._overload(f"{self.open_tokens} tokens wait, at most {self.most_tokens}")
        self.open_bytes += content_length
        self.open_requests += 1
        try:
            yield
        finally:
            self.open_bytes -= content_length
            self.open_requests -= 1

    @contextmanager
    def tokens(self, count: int) -> Iterator[None]:
        """Before the works of a request are queued."""
        if count > self.most_tokens:
            raise HttpError(
                422, "too_many_tokens", f"the request has {count} tokens, at most {self.most_tokens} fit; split it"
            )
        if self.open_tokens + count > self.most_tokens:
            raise self._overload(f"{self.open_tokens} tokens wait, and {count} more would pass {self.most_tokens}")
        self.open_tokens += count
        try:
            yield
        finally:
            self.open_tokens -= count
            self._answered += count

    def _overload(self, why: str) -> HttpError:
        self._metrics.rejected.labels("overload").inc()
        wait = self.retry_after()
        return HttpError(self.status, "overloaded", f"{why}; try again in {wait} s", retry_after=wait)

    def retry_after(self) -> int:
        """Seconds until about half of what waits is answered, at the present pace."""
        if self._pace <= 0:
            return 1
        return max(1, min(LONGEST_WAIT, math.ceil(self.open_tokens / 2 / self._pace)))

    def tick(self, seconds: float) -> None:
        """Called about every second, with the time since the last call."""
        answered, self._answered = self._answered, 0
        if answered or self.open_tokens:
            weight = min(1.0, seconds / PACE_SECONDS) if self._pace else 1.0
            self._pace += weight * (answered / seconds - self._pace)
