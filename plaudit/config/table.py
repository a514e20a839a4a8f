"""Typed configuration tables, TOML reading and writing, and error messages that name the key and the fix.

An error for an unknown key suggests the nearest valid one; an error for a wrong value names the key, the value and what
is expected.
"""

from __future__ import annotations

import re
import tomllib
from collections.abc import Collection, Iterator, Mapping, Sequence
from datetime import date
from pathlib import Path
from typing import Annotated, Any

from pydantic import BaseModel, BeforeValidator, ConfigDict, Field, TypeAdapter, ValidationError
from pydantic_core import ErrorDetails, PydanticUndefined

from plaudit.errors import ConfigError, nearest

NonNegative = Annotated[float, Field(ge=0)]
Positive = Annotated[float, Field(gt=0)]
Share = Annotated[float, Field(ge=0, le=1)]


# TOML has no null: where an omitted key has a default other than None, None is written "none".
NoneByName = BeforeValidator(lambda value: None if value == "none" else value)


class Table(BaseModel):
    model_config = ConfigDict(extra="forbid", frozen=True, strict=True)

    def filled_in(self) -> set[str]:
        """Return the keys whose default is not None."""
        return {
            name for name, field in type(self).model_fields.items() if field.default not in (None, PydanticUndefined)
        }

    def without_meaning(self) -> set[str]:
        """Return the keys that have no effect given the others, such as a world's keys when the data is a file. They
        are not written when they have their default values."""
        return set()


def read_toml(path: Path, what: str = "recipe") -> dict[str, Any]:
    try:
        return tomllib.loads(path.read_text(encoding="utf-8"))
    except FileNotFoundError:
        candidates = sorted(str(file) for file in path.parent.glob("*.toml"))
        raise ConfigError(f"no {what} at {path}; {nearest(str(path), candidates)}") from None
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(f"cannot read the {what} {path}: {error}") from None
    except tomllib.TOMLDecodeError as error:
        raise ConfigError(f"{path} is not valid TOML: {error}") from None


def check(
    adapter: TypeAdapter[Any], tree: Mapping[str, Any], source: str, root: type[BaseModel], tags: Collection[str] = ()
) -> Any:
    """Validate `tree` and return it typed. `root` is the table whose keys error messages suggest; `tags` are the
    discriminator values of table unions, which appear in pydantic's error locations and are not keys."""
    try:
        return adapter.validate_python(_tuples(tree))
    except ValidationError as error:
        raise ConfigError(f"{source}: {_explain(error.errors()[0], root, tags)}") from None


def _tuples(value: Any) -> Any:
    """Convert TOML's lists to tuples, which the frozen tree has."""
    if isinstance(value, Mapping):
        return {key: _tuples(item) for key, item in value.items()}
    return tuple(_tuples(item) for item in value) if isinstance(value, list) else value


def apply(tree: dict[str, Any], override: str) -> None:
    key, equals, text = override.partition("=")
    if not equals:
        raise ConfigError(f"--set {override!r} is not of the form table.key=value")
    try:
        value = tomllib.loads(f"value = {text}")["value"]
    except tomllib.TOMLDecodeError as error:
        value = text.strip()
        if value[:1] in ('"', "'"):  # intended as TOML: the quotes would become part of the text
            raise ConfigError(
                f"--set {override!r}: {value} is not valid TOML ({error}); leave the quotes out, or double backslashes"
            ) from None
    put(tree, key.strip(), value, f"--set {override!r}")


def put(tree: dict[str, Any], key: str, value: Any, source: str) -> None:
    """Set one key of a tree by its dotted name."""
    parts = key.split(".")
    if not all(parts):
        raise ConfigError(f"{source} is not of the form table.key=value")
    for depth, part in enumerate(parts[:-1]):
        tree = tree.setdefault(part, {})
        if not isinstance(tree, dict):
            raise ConfigError(f"{source}: {'.'.join(parts[: depth + 1])} is a value, not a table")
    tree[parts[-1]] = value


def _explain(error: ErrorDetails, root: type[BaseModel], tags: Collection[str]) -> str:
    location = [str(part) for part in error["loc"] if part not in tags]
    key = ".".join(location)
    if error["type"] == "extra_forbidden":
        elsewhere = sorted({dotted for dotted in _dotted_keys(root) if dotted.split(".")[-1] == location[-1]})
        if elsewhere:
            return f"unknown key {key!r}; did you mean {' or '.join(map(repr, elsewhere[:3]))}?"
        return f"unknown key {key!r}; {nearest(location[-1], _keys_beside(root, location))}"
    if error["type"] == "missing":
        return f"the key {key!r} is missing"
    tagless = error["type"] in ("union_tag_not_found", "union_tag_invalid")
    if error["type"] == "model_type" or (tagless and not isinstance(error["input"], Mapping)):
        return f"{key} = {error['input']!r}: expected a table"
    if tagless:
        by = _discriminator(error)
        expected = str(error.get("ctx", {}).get("expected_tags", "")) or "one of the known names"
        return f"{key}.{by} = {error['input'].get(by)!r}: expected {expected.replace(', ', ' or ')}"
    if error["type"] == "value_error":
        message = error["msg"].removeprefix("Value error, ")
        return f"[{key}] {message}" if key else message
    return f"{key} = {error['input']!r}: {error['msg'][0].lower()}{error['msg'][1:]}"


def _discriminator(error: ErrorDetails) -> str:
    """Return the key that discriminates a union; a discriminator function's name ends with the key's name."""
    discriminator = str(error.get("ctx", {}).get("discriminator", "name")).strip("'()")
    return discriminator.rpartition("_by_")[2]


def _keys_beside(root: type[BaseModel], location: list[str]) -> Iterator[str]:
    tables: list[type[BaseModel]] = [root]
    for part in location[:-1]:
        fields = [table.model_fields[part].annotation for table in tables if part in table.model_fields]
        tables = [nested for annotation in fields for nested in _tables_in(annotation)]
    for table in tables:
        yield from table.model_fields


def _dotted_keys(table: type[BaseModel], before: str = "") -> Iterator[str]:
    """Yield all keys of a table and its subtables: candidates for a key whose table name was omitted."""
    for name, field in table.model_fields.items():
        yield before + name
        for nested in _tables_in(field.annotation):
            if not issubclass(nested, table):  # a recursive table has the same keys
                yield from _dotted_keys(nested, f"{before}{name}.")


def _tables_in(annotation: Any) -> Iterator[type[BaseModel]]:
    if isinstance(annotation, type) and issubclass(annotation, BaseModel):
        yield annotation
    for argument in getattr(annotation, "__args__", ()):
        yield from _tables_in(argument)


def to_toml(table: BaseModel | Mapping[str, Any]) -> str:
    """Return the resolved configuration as TOML that parses to the same tree."""
    tree = _written(table) if isinstance(table, BaseModel) else table
    return "\n".join(_toml_lines(tree, ())).lstrip("\n") + "\n"


def _written(table: BaseModel) -> dict[str, Any]:
    tree = table.model_dump(exclude_none=True)
    for name, field in type(table).model_fields.items():
        value = getattr(table, name)
        if isinstance(table, Table) and name in table.without_meaning() and value == field.get_default():
            tree.pop(name, None)
        elif isinstance(value, BaseModel):
            tree[name] = _written(value)
        elif value is None and isinstance(table, Table) and name in table.filled_in():
            tree[name] = "none"
    return tree


def _toml_lines(tree: Mapping[str, Any], path: tuple[str, ...]) -> Iterator[str]:
    values = {key: value for key, value in tree.items() if not isinstance(value, Mapping)}
    if path and (values or not tree):
        yield ""
        yield f"[{'.'.join(map(_toml_key, path))}]"
    for key, value in values.items():
        yield f"{_toml_key(key)} = {_toml_value(value)}"
    for key, value in tree.items():
        if isinstance(value, Mapping):
            yield from _toml_lines(value, (*path, key))


def _toml_key(key: str) -> str:
    return key if re.fullmatch(r"[A-Za-z0-9_-]+", key) else _toml_value(key)


def _toml_value(value: Any) -> str:
    if isinstance(value, bool):
        return str(value).lower()
    if isinstance(value, str):
        escaped = value.replace("\\", "\\\\").replace('"', '\\"')
        return '"' + "".join(c if c.isprintable() else f"\\U{ord(c):08x}" for c in escaped) + '"'
    if isinstance(value, list | tuple):
        return f"[{', '.join(_toml_value(item) for item in value)}]"
    return value.isoformat() if isinstance(value, date) else repr(value)


def differences(old: BaseModel, new: BaseModel, ignore: Sequence[str] = ()) -> dict[str, tuple[Any, Any]]:
    """Return the keys whose values differ, as {"a.b": (old, new)}."""
    before, after = dict(_flat(old.model_dump())), dict(_flat(new.model_dump()))
    return {
        key: (before.get(key), after.get(key))
        for key in sorted({*before, *after})
        if before.get(key) != after.get(key) and not any(key == i or key.startswith(i + ".") for i in ignore)
    }


def _flat(tree: Mapping[str, Any], prefix: str = "") -> Iterator[tuple[str, Any]]:
    for key, value in tree.items():
        if isinstance(value, Mapping):
            yield from _flat(value, f"{prefix}{key}.")
        else:
            yield f"{prefix}{key}", value
