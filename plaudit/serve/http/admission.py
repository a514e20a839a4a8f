"""How much work is let in, counted in tokens and bytes: what would only wait is refused at once, with a time to come
back. The last share is kept for API keys that hold less than theirs, so that one key cannot shut out the others."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager

from plaudit.serve.http.message import HttpError
from plaudit.serve.metrics import Metrics

PACE_SECONDS = 10.0  # over which the pace of answering is estimated
LONGEST_WAIT = 30


class Quota:
    """`limit` of something, shared by a number of API keys."""

    def __init__(self, limit: int, keys: int) -> None:
        self.limit = limit
        self.in_use = 0
        self._share = limit // max(1, keys)
        self._by_tenant: Counter[str] = Counter()

    @property
    def most(self) -> int:
        """That one key can have at a time, when nobody else has any."""
        return max(self._share, self.limit - self._share)

    def fits(self, tenant: str, count: int) -> bool:
        within_share = self._by_tenant[tenant] + count <= self._share
        return self.in_use + count <= (self.limit if within_share else self.limit - self._share)

    @contextmanager
    def holding(self, tenant: str, count: int) -> Iterator[None]:
        self.in_use += count
        self._by_tenant[tenant] += count
        try:
            yield
        finally:
            self.in_use -= count
            self._by_tenant[tenant] -= count


class Admission:
    """draining lets nothing more in."""

    def __init__(
        self, queued_tokens: int, buffered_bytes: int, keys: int, overload_status: int, metrics: Metrics
    ) -> None:
        self.open_requests = 0
        self.draining = False
        self._tokens = Quota(queued_tokens, keys)
        self._bytes = Quota(buffered_bytes, keys)
        self._status = overload_status
        self._metrics = metrics
        self._answered = 0
        self._pace = 0.0  # tokens answered in a second, while there is something to answer

    @property
    def open_tokens(self) -> int:
        """Accepted and not yet answered."""
        return self._tokens.in_use

    @property
    def most_tokens(self) -> int:
        return self._tokens.limit

    @contextmanager
    def request(self, tenant: str, content_length: int) -> Iterator[None]:
        """Before anything of the request is read."""
        if self.draining:
            self._metrics.rejected.labels("draining").inc()
            raise HttpError(503, "draining", "the server is shutting down; try another", retry_after=1)
        # A single request is held to the limit of its own size, and is let in when there is no other.
        if not self._bytes.fits(tenant, content_length) and self._bytes.in_use:
            raise self._overload(f"{self._bytes.in_use} bytes of requests are handled, at most {self._bytes.limit}")
        if not self._tokens.fits(tenant, 1):
            raise self._overload(f"{self.open_tokens} tokens wait, at most {self.most_tokens}")
        self.open_requests += 1
        try:
            with self._bytes.holding(tenant, content_length):
                yield
        finally:
            self.open_requests -= 1

    @contextmanager
    def tokens(self, tenant: str, count: int) -> Iterator[None]:
        """Before the works of a request are queued."""
        if count > self._tokens.most:
            raise HttpError(
                422, "too_many_tokens", f"the request has {count} tokens, at most {self._tokens.most} fit; split it"
            )
        if not self._tokens.fits(tenant, count):
            raise self._overload(f"{self.open_tokens} tokens wait, and {count} more would pass {self.most_tokens}")
        try:
            with self._tokens.holding(tenant, count):
                yield
        finally:
            self._answered += count

    def _overload(self, why: str) -> HttpError:
        self._metrics.rejected.labels("overload").inc()
        wait = self.retry_after()
        return HttpError(self._status, "overloaded", f"{why}; try again in {wait} s", retry_after=wait)

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
