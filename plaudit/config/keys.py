"""A server's API keys: a TOML file with one table per key, which stores the key's hash and never the key itself."""

from __future__ import annotations

import hashlib
import re
from collections.abc import Mapping
from datetime import UTC, date, datetime, time, timedelta
from pathlib import Path
from typing import Annotated, Any, Literal

from pydantic import BeforeValidator, Field, PositiveInt, TypeAdapter

from plaudit.config.table import Table, check, read_toml
from plaudit.errors import ConfigError

Role = Literal["score", "metrics", "admin"]
NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,99}")
RESERVED = ("admin", "anonymous")  # the client with --admin-key, and clients without a key
DURATION = re.compile(r"([1-9][0-9]{0,4})([dh])")


def _moment(value: Any) -> Any:
    """Convert a date to midnight of that day; a datetime without a time zone is UTC."""
    if isinstance(value, date) and not isinstance(value, datetime):
        value = datetime.combine(value, time())
    return value.replace(tzinfo=UTC) if isinstance(value, datetime) and value.tzinfo is None else value


class KeyTable(Table):
    sha256: Annotated[str, Field(pattern="^[0-9a-f]{64}$")]
    """Hash of the key, unsalted: a key is 32 random bytes, which cannot be guessed."""
    roles: Annotated[tuple[Role, ...], Field(min_length=1)] = ("score",)
    expires: Annotated[datetime, BeforeValidator(_moment)] | None = None
    requests_per_minute: PositiveInt | None = None
    tokens_per_minute: PositiveInt | None = None

    @property
    def expired(self) -> bool:
        return self.expires is not None and datetime.now(UTC) >= self.expires


_KEY: TypeAdapter[KeyTable] = TypeAdapter(KeyTable)


def hashed(key: str) -> str:
    return hashlib.sha256(key.encode()).hexdigest()


def read_keys(file: Path) -> dict[str, KeyTable]:
    tables = parse_keys(read_toml(file, "key file"), str(file))
    if not tables:
        raise ConfigError(f"{file} has no key; make one with: plaudit keys add NAME --file {file}")
    return tables


def parse_keys(tree: Mapping[str, Any], source: str) -> dict[str, KeyTable]:
    tables: dict[str, KeyTable] = {}
    holders: dict[str, str] = {}
    for name, entry in tree.items():
        if name in RESERVED:
            raise ConfigError(f"{source}: the name {name!r} is reserved by the server; choose another")
        if not NAME.fullmatch(name):
            raise ConfigError(f"{source}: {name!r} cannot be the name of a key: letters, digits, '.', '_' and '-'")
        if not isinstance(entry, dict):
            raise ConfigError(f"{source}: {name} = {entry!r}: expected a table, [{name}], with sha256 and roles")
        tables[name] = check(_KEY, entry, f"{source}: [{name}]", KeyTable)
        other = holders.setdefault(tables[name].sha256, name)
        if other != name:
            raise ConfigError(f"{source}: {other} and {name} have the same key; give each their own")
    return tables


def parse_expiry(text: str) -> datetime:
    """Parse a duration from now (90d, 12h) or an ISO date with an optional time."""
    if match := DURATION.fullmatch(text):
        hours = int(match[1]) * (24 if match[2] == "d" else 1)
        return datetime.now(UTC).replace(microsecond=0) + timedelta(hours=hours)
    try:
        moment: datetime = _moment(datetime.fromisoformat(text))
    except ValueError:
        raise ConfigError(f"--expires {text!r}: expected 90d, 12h, or a date such as 2027-01-31") from None
    return moment
