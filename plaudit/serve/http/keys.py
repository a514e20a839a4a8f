"""Authorization: decides access from the route and the Authorization header alone; denied unless allowed."""

from __future__ import annotations

import hashlib
import hmac
import math
import time
from collections.abc import Mapping
from functools import lru_cache

from plaudit.config.keys import KeyTable
from plaudit.config.serve import loopback
from plaudit.serve.http.message import NOBODY, Endpoint, HttpError

LOOPBACK_NAMES = (b"localhost", b"ip6-localhost")


class Meter:
    """A rate limit per minute (token bucket): stores one minute's worth and refills steadily. Usage may make it
    negative, for costs known only afterwards."""

    __slots__ = ("_at", "_level", "per_minute")

    def __init__(self, per_minute: int, now: float) -> None:
        self.per_minute = per_minute
        self._level = float(per_minute)
        self._at = now

    def wait(self, now: float) -> float:
        """Seconds until there is capacity."""
        self._level = min(self.per_minute, self._level + (now - self._at) * self.per_minute / 60)
        self._at = now
        return max(0.0, (1 - self._level) * 60 / self.per_minute)

    def take(self, count: int) -> None:
        self._level -= count


class ApiKey:
    """An API key's name, roles and remaining quotas."""

    def __init__(self, name: str, table: KeyTable) -> None:
        now = time.monotonic()
        self.name = name
        self.table = table
        self.roles = frozenset(table.roles)
        self.requests = None if table.requests_per_minute is None else Meter(table.requests_per_minute, now)
        self.tokens = None if table.tokens_per_minute is None else Meter(table.tokens_per_minute, now)
        self.metered = self.requests is not None or self.tokens is not None

    def check_quotas(self, work: bool) -> None:
        """Counts a request; raises HttpError 429 if it exceeds the quota of requests, or if earlier ones used up the
        tokens."""
        now = time.monotonic()
        if work and self.tokens is not None and (wait := self.tokens.wait(now)):
            raise self._over(f"{self.tokens.per_minute} tokens", wait)
        if self.requests is not None:
            if wait := self.requests.wait(now):
                raise self._over(f"{self.requests.per_minute} requests", wait)
            self.requests.take(1)

    def _over(self, quota: str, wait: float) -> HttpError:
        seconds = math.ceil(wait)
        message = f"the key {self.name!r} has used up its {quota} per minute; try again in {seconds} s"
        return HttpError(429, "quota", message, retry_after=seconds)


ANYBODY = ApiKey(NOBODY, KeyTable(sha256="0" * 64, roles=("score", "metrics")))


class Keys:
    """tables      hashes, roles and quotas of the keys, by name
    keyless     whether callers without a key are admitted (only on a loopback address)
    allow_open  protocols whose routes need no key although others do
    """

    def __init__(self, tables: Mapping[str, KeyTable], *, keyless: bool, allow_open: frozenset[str]) -> None:
        self._keyless = keyless
        self._allow_open = allow_open
        self._holders: dict[bytes, ApiKey] = {}
        self.replace(tables)

    def replace(self, tables: Mapping[str, KeyTable]) -> None:
        """Replace the keys. An unchanged key keeps its remaining quotas."""
        before = {(each.name, each.table): each for each in self._holders.values()}
        holders = [before.get((name, table)) or ApiKey(name, table) for name, table in tables.items()]
        self._holders = {bytes.fromhex(each.table.sha256): each for each in holders}
        self._seen: dict[bytes, ApiKey] = {}
        self._administered = any("admin" in each.roles for each in holders)
        self.meters = {each.name: each.tokens for each in holders if each.tokens is not None}

    def check_host(self, headers: Mapping[bytes, bytes]) -> None:
        """Protects against DNS rebinding, where a web page resolves its own name to 127.0.0.1 and sends requests as the
        visitor. Without keys only this machine's loopback names are accepted, and only from its own pages."""
        if not self._keyless:
            return
        for header in (b"host", b"origin"):
            value = headers.get(header, b"")
            shown = value[:40].decode("latin-1")
            if value and not _is_local(value.rpartition(b"//")[2]):
                raise HttpError(
                    403, "bad_host", f"{header.decode()} {shown!r} is not allowed: a server without API keys accepts "
                    "only 127.0.0.1 and localhost",
                )  # fmt: skip

    def admit(self, place: Endpoint, authorization: bytes | None) -> ApiKey:
        """Returns the key that the caller's work is accounted to; raises HttpError 401, 403 or 429. A path shared by
        several protocols is open only if all of them are."""
        if place.access == "open":
            return ANYBODY
        token = _bearer(authorization)
        # A dict lookup leaks nothing useful: a key is compared only if its keyed 64-bit hash is equal.
        holder = None if token is None else self._seen.get(token) or self._match(token)
        if (
            holder is not None
            and (place.role == "key" or place.role in holder.roles)
            and (holder.table.expires is None or not holder.table.expired)
        ):
            if holder.metered:
                holder.check_quotas(place.last.work)
            return holder
        # Without keys a bearer token that a client always sends is ignored; with keys it must be valid.
        if place.access != "admin" and (self._keyless or place.protocols <= self._allow_open):
            return ANYBODY
        raise self._refusal(place, token, holder)

    def _refusal(self, place: Endpoint, token: bytes | None, holder: ApiKey | None) -> HttpError:
        if holder is not None and holder.table.expired:
            until = holder.table.expires
            return HttpError(401, "unauthorized", f"the key {holder.name!r} expired at {until}; request a new one")
        if holder is not None:
            return HttpError(
                403, "forbidden", f"this route needs a key with the role {place.role}, and {holder.name!r} has "
                f"{', '.join(sorted(holder.roles))}",
            )  # fmt: skip
        if place.access == "admin" and not self._administered:
            return HttpError(403, "forbidden", "admin routes are closed: the server was started without --admin-key")
        if place.access == "admin" and token is not None:
            return HttpError(403, "forbidden", "this route needs a key with the role admin")
        if not self._holders:
            return HttpError(401, "unauthorized", "this route is closed: the server was started without an API key")
        return HttpError(401, "unauthorized", "send a valid key as 'Authorization: Bearer KEY'")

    def _match(self, token: bytes) -> ApiKey | None:
        digest, found = hashlib.sha256(token).digest(), None
        for known, holder in self._holders.items():  # compares with all keys, so that timing does not reveal the match
            if hmac.compare_digest(digest, known):
                found = self._seen[token] = holder
        return found


def _bearer(authorization: bytes | None) -> bytes | None:
    if authorization is None:
        return None
    scheme, _, key = authorization.partition(b" ")
    key = key.strip()
    return key if scheme.lower() == b"bearer" and key else b""


@lru_cache(256)  # clients send the same few values with every request
def _is_local(authority: bytes) -> bool:
    host = authority.rpartition(b"@")[2].lower()
    name = host.partition(b"]")[0][1:] if host.startswith(b"[") else host.partition(b":")[0]
    return name in LOOPBACK_NAMES or loopback(name.decode("latin-1"))
