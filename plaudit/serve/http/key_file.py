"""Sources of API keys: flags, which are fixed, and a file, which may change while the server runs."""

from __future__ import annotations

import secrets
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from plaudit.config.keys import KeyTable, hashed, parse_keys, read_keys
from plaudit.config.serve import ListenTable
from plaudit.config.table import read_toml, to_toml
from plaudit.errors import ConfigError
from plaudit.output import write_atomically
from plaudit.serve.http.watch import Watch


class KeySource:
    def __init__(self, table: ListenTable) -> None:
        self.file = None if table.api_key_file is None else Path(table.api_key_file)
        self._flags = {
            name: KeyTable(sha256=hashed(key), roles=("score", "metrics")) for name, key in table.api_keys.items()
        }
        if table.admin_key is not None:
            self._flags["admin"] = KeyTable(sha256=hashed(table.admin_key), roles=("score", "metrics", "admin"))
        self.watch = Watch([] if self.file is None else [self.file])
        self.tables = self.read()

    def read(self) -> dict[str, KeyTable]:
        self.watch.read()
        filed = {} if self.file is None else read_keys(self.file)
        if both := sorted(self._flags.keys() & filed.keys()):
            raise ConfigError(f"{self.file}: a key named {both[0]!r} is also set outside the file; rename one of them")
        known = {each.sha256: name for name, each in self._flags.items()}
        if same := [(known[each.sha256], name) for name, each in filed.items() if each.sha256 in known]:
            raise ConfigError(f"{self.file}: {same[0][0]} and {same[0][1]} have the same key; give each its own")
        return {**self._flags, **filed}


def add_key(file: Path, name: str, fields: Mapping[str, Any]) -> str:
    """Adds a new key to the file, which stores its hash; other entries and comments are kept. Returns the key."""
    text, known = "", {}
    if file.exists():
        known = parse_keys(read_toml(file, "key file"), str(file))
        text = file.read_text(encoding="utf-8").rstrip() + "\n\n"
    if name in known:
        raise ConfigError(f"{file} already has a key named {name!r}; choose another name, or delete that entry first")
    key = secrets.token_urlsafe(32)
    entry = {"sha256": hashed(key), **{field: value for field, value in fields.items() if value is not None}}
    parse_keys({name: entry}, str(file))
    write_atomically(file, text.lstrip() + to_toml({name: entry}))
    return key
