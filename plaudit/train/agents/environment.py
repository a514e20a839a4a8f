"""Environments, which respond between the policy's turns, and how they are loaded by name."""

from __future__ import annotations

import importlib
import importlib.util
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any, Protocol

from plaudit.config.rl import EnvironmentTable
from plaudit.errors import ConfigError, nearest, one_line
from plaudit.records import Prompt, Turn
from plaudit.train.agents.parallel_calls import close_all

BUILT_IN = {"calculator": "plaudit.worlds.calculator:Calculator", "openenv": "plaudit.train.agents.openenv:OpenEnv"}


class Environment(Protocol):
    """One for each sample. Its methods are called one after the other, from whichever thread is free. An optional
    method `close` is called last and once, even after a call that failed or timed out."""

    def reset(self, prompt: Prompt) -> None:
        """Begin a response to this prompt."""

    def step(self, response: str) -> Turn:
        """Respond to the policy's turn, stop string included."""


def load_environment(table: EnvironmentTable) -> Callable[[], Environment]:
    """Return a factory of environments, and report now, not during a rollout, if one cannot be created."""
    path = BUILT_IN.get(table.name, table.name)
    if ":" not in path:
        raise ConfigError(
            f"environment.name = {table.name!r} is neither built in ({nearest(table.name, BUILT_IN)}) nor of the form "
            "file.py:Class or package.module:Class"
        )
    factory = load_named(path, "environment.name", "file.py:Class or package.module:Class")
    options = dict(table.options)
    try:
        first = factory(**options)
    except Exception as error:
        name = path.rpartition(":")[2]
        raise ConfigError(f"environment.options: {name}(**{options}) fails: {_summary(error)}") from error
    for method in ("reset", "step"):
        if not callable(getattr(first, method, None)):
            raise ConfigError(f"environment.name = {table.name!r} has no method {method!r}; see docs/environments.md")
    if callable(close := getattr(first, "close", None)):
        close_all([close], table.timeout)
    return lambda: factory(**options)


def load_named(path: str, key: str, form: str) -> Any:
    """Load an object by its file or module. `form` is the expected form of the recipe's `key`."""
    home, _, name = path.rpartition(":")
    if not (home and name):
        raise ConfigError(f"{key} = {path!r} is not of the form {form}")
    try:
        return getattr(_module(home), name)
    except Exception as error:  # user code may raise anything
        raise ConfigError(f"{key} = {path!r} cannot be loaded: {_summary(error)}") from error


def _module(home: str) -> Any:
    if not home.endswith(".py"):
        return importlib.import_module(home)
    path = Path(home)
    if not path.is_file():
        raise FileNotFoundError(f"no file {home}")
    spec = importlib.util.spec_from_file_location(f"plaudit_environment_{path.stem}", path.resolve())
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module
    spec.loader.exec_module(module)
    return module


def _summary(error: Exception) -> str:
    return f"{type(error).__name__}: {one_line(error)}"
