"""Who may call what: decided from the route's access and the Authorization header alone, denied unless allowed."""

from __future__ import annotations

import hmac
import ipaddress
from collections.abc import Mapping

from plaudit.serve.http.message import NOBODY, Access, HttpError

LOOPBACK_NAMES = (b"localhost", b"ip6-localhost")


class Keys:
    """keys        API keys by the name of their holder
    admin       the key for routes that change something; without one they are closed
    keyless     whether callers without a key are let in (only ever on a loopback address)
    allow_open  protocols whose routes need no key though others do
    """

    def __init__(
        self, keys: Mapping[str, str], admin: str | None, *, keyless: bool, allow_open: frozenset[str]
    ) -> None:
        self._keys = {name: key.encode() for name, key in keys.items()}
        self._admin = None if admin is None else admin.encode()
        self._keyless = keyless and not keys
        self._allow_open = allow_open

    @property
    def several(self) -> bool:
        return len(self._keys) > 1

    def check_host(self, headers: Mapping[bytes, bytes]) -> None:
        """A page of the web may lead its own name to 127.0.0.1 and ask there as the visitor. Without keys only the
        names that this machine has for itself are answered, and only to its own pages."""
        if not self._keyless:
            return
        for header in (b"host", b"origin"):
            value = headers.get(header, b"")
            shown = value[:40].decode("latin-1")
            if value and not _is_local(value.rpartition(b"//")[2]):
                raise HttpError(
                    403, "bad_host", f"{header.decode()} {shown!r} is not this machine: without an API key only "
                    "127.0.0.1 and localhost are answered",
                )  # fmt: skip

    def tenant(self, access: Access, protocols: frozenset[str], authorization: bytes | None) -> str:
        """The name the caller's work is accounted to; raises HttpError 401 or 403. A path that several protocols share
        is open only if all of them are."""
        token = _bearer(authorization)
        if access == "admin":
            return self._check_admin(token)
        if access == "open":
            return NOBODY
        holder = self._holder(token)
        if holder is not None:
            return holder
        if protocols <= self._allow_open or (token is None and self._keyless):
            return NOBODY
        if not self._keys and not self._keyless:
            raise HttpError(401, "unauthorized", "this route is closed: the server was started without an API key")
        raise HttpError(401, "unauthorized", "send a valid key as 'Authorization: Bearer KEY'")

    def _check_admin(self, token: bytes | None) -> str:
        if self._admin is not None and token is not None and hmac.compare_digest(token, self._admin):
            return "admin"
        if self._admin is None:
            raise HttpError(403, "forbidden", "admin routes are closed: the server was started without --admin-key")
        if token is None:
            raise HttpError(401, "unauthorized", "send the admin key as 'Authorization: Bearer KEY'")
        raise HttpError(403, "forbidden", "this route needs the admin key")

    def _holder(self, token: bytes | None) -> str | None:
        if token is None:
            # Without keys a bearer token that some client always sends does no harm; with keys it must be one of them.
            return None
        holder = None
        for name, key in self._keys.items():  # all of them, so that the time does not tell which one matched
            if hmac.compare_digest(token, key):
                holder = name
        if holder is None and self._admin is not None and hmac.compare_digest(token, self._admin):
            holder = "admin"
        if holder is None and not self._keys and self._keyless:
            return NOBODY
        return holder


def _bearer(authorization: bytes | None) -> bytes | None:
    if authorization is None:
        return None
    scheme, _, key = authorization.partition(b" ")
    key = key.strip()
    return key if scheme.lower() == b"bearer" and key else b""


def _is_local(authority: bytes) -> bool:
    host = authority.rpartition(b"@")[2].lower()
    name = host.partition(b"]")[0][1:] if host.startswith(b"[") else host.partition(b":")[0]
    return name in LOOPBACK_NAMES or loopback(name.decode("latin-1"))


def loopback(host: str) -> bool:
    if host == "localhost":
        return True
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return False
