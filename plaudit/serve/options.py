"""Builds a server's table from a configuration file and flags."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from plaudit.config.reward import reward_by_kind
from plaudit.config.serve import ServeTable, parse_serve, read_serve
from plaudit.errors import ConfigError
from plaudit.reward.directory import complete, only_predicts

ENGINE_KINDS = ("outcome", "process", "logprobs")
DEFAULT_MODELS = ("sums", "sums-steps")


def serve_table(
    config: Path | None = None, models: Sequence[str] = (), host: str | None = None, port: int | None = None,
    api_keys: Sequence[str] = (), admin_key: str | None = None, allow_open: str | None = None,
    protocols: str | None = None, aliases: Sequence[str] = (), tensor_parallel: int | None = None,
    pipeline_parallel: int | None = None, replicas: int | None = None, ray: str | None = None,
    api_key_file: Path | None = None, drain_delay: float | None = None, **listening: Any,
) -> ServeTable:  # fmt: skip
    """Flags override the file. Without any model the embedded ones are served. `listening`: keys of the table; None if
    the flag was not given."""
    tree: dict[str, Any] = {} if config is None else read_serve(config)
    source = "plaudit serve" if config is None else str(config)
    entries: dict[str, Any] = dict(tree.get("models", {}))
    for option in models or (() if entries else DEFAULT_MODELS):
        name, path = _named(option)
        if name in entries:
            raise ConfigError(f"two models are named {name!r}; rename one: --model OTHER={path}")
        entries[name] = {"path": path}
    tree["models"] = {name: completed(entry, f"{source}: models.{name}") for name, entry in entries.items()}
    spread = {"tensor_parallel": tensor_parallel, "pipeline_parallel": pipeline_parallel, "replicas": replicas}
    flags = {key: value for key, value in spread.items() if value is not None}
    for name, entry in tree["models"].items():
        if isinstance(entry, dict) and entry.get("kind") in ENGINE_KINDS:
            entry.update(flags)
            entries[name] = {**entries[name], **flags}
    if api_keys:
        tree["api_keys"] = named_keys(api_keys)
    settings = {
        **listening, "ray": ray, "host": host, "port": port, "api_key_file": api_key_file, "drain_delay": drain_delay,
        "admin_key": admin_key,
    }  # fmt: skip
    tree |= {key: str(v) if isinstance(v, Path) else v for key, v in settings.items() if v is not None}
    if allow_open is not None:
        tree["allow_open"] = split_names(allow_open)
    if protocols is not None:
        tree["protocols"] = split_names(protocols)
    if aliases:
        tree["aliases"] = {**tree.get("aliases", {}), **dict(map(_alias, aliases))}
    return parse_serve(tree, source, entries)


def loading(table: ServeTable) -> str:
    """The line printed at start, because loading may take long."""
    models = ", ".join(f"{name} ({entry.kind})" for name, entry in table.models.items())
    place = table.address(table.port) if table.port or table.uds else f"a free port of {table.host}"
    return f"loading {models}; will listen on {place}"


def _named(option: str) -> tuple[str, str]:
    name, equals, path = option.partition("=")
    if equals and name and path and "/" not in name:
        return name, path
    directory = Path(option)
    # runs/x and runs/x/final are both the model x.
    return (directory.parent.name if directory.name == "final" else directory.name) or option, option


def completed(entry: Any, source: str) -> Any:
    """Completes an entry with what the model's directory says about how to read it."""
    if not isinstance(entry, dict) or reward_by_kind(entry) not in ("outcome", "process"):
        return entry
    if "path" not in entry:
        raise ConfigError(f"{source}: the key 'path' is missing")
    if not {"kind", "format"} & entry.keys() and only_predicts(str(entry["path"])):
        return {**entry, "kind": "logprobs"}
    return complete(entry, source).model_dump(exclude_none=True)


def split_names(text: str) -> list[str]:
    return [name.strip() for name in text.split(",") if name.strip()]


def _alias(option: str) -> tuple[str, str]:
    alias, equals, name = option.partition("=")
    if not (equals and alias and name):
        raise ConfigError(f"--alias {option!r} is invalid; expected NAME=MODEL")
    return alias, name


def named_keys(options: Sequence[str]) -> dict[str, str]:
    keys: dict[str, str] = {}
    for number, entry in enumerate(options, 1):
        holder, equals, key = entry.partition("=")
        name, key = (holder, key) if equals and key else (f"key-{number}", entry)
        if name in keys:
            raise ConfigError(f"two API keys are named {name!r}; rename one")
        keys[name] = key
    return keys
