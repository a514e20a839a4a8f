"""Resolves recipes: a file, or the name of a recipe shipped with the package. Imports no torch."""

from __future__ import annotations

import difflib
import tomllib
from dataclasses import dataclass
from pathlib import Path

from plaudit.errors import ConfigError

RECIPES = Path(__file__).resolve().parents[2] / "recipes"


@dataclass(frozen=True)
class Listing:
    """A shipped recipe as `plaudit recipes` lists it."""

    name: str
    task: str
    description: str
    """Its first comment line."""


def recipe_names() -> tuple[str, ...]:
    return tuple(sorted(path.stem for path in RECIPES.glob("*.toml")))


def find_recipe(name_or_path: Path, what: str = "recipe") -> Path:
    """Return the recipe's file. An existing file takes precedence over a shipped recipe's name."""
    if name_or_path.exists() and not name_or_path.is_dir():
        return name_or_path
    if str(name_or_path) in recipe_names():
        return RECIPES / f"{name_or_path}.toml"
    if name_or_path.is_dir():
        raise ConfigError(f"{name_or_path} is a directory, not a {what} file; {_near(name_or_path)}")
    raise ConfigError(f"no {what} at {name_or_path}, and none of that name; {_near(name_or_path)}")


def _near(path: Path) -> str:
    """Return the end of an error message: shipped names and files in the same directory with similar names."""
    files = {file.stem: str(file) for file in sorted(path.parent.glob("*.toml"))} if path.parent.is_dir() else {}
    candidates = {name: name for name in recipe_names()} | files
    close = difflib.get_close_matches(path.stem, candidates, n=3, cutoff=0.6)
    if not close:
        return "`plaudit recipes` lists those that come with Plaudit"
    *others, last = (repr(candidates[name]) for name in close)
    return f"did you mean {', '.join(others)}{' or ' if others else ''}{last}?"


def listings() -> tuple[Listing, ...]:
    return tuple(_listing(name) for name in recipe_names())


def _listing(name: str) -> Listing:
    text = (RECIPES / f"{name}.toml").read_text(encoding="utf-8")
    # A server configuration has no task.
    task = tomllib.loads(text).get("task", "serve")
    return Listing(name, task, text.partition("\n")[0].removeprefix("# "))


def recipe_text(name: str) -> str:
    """Return the TOML of a shipped recipe, comments included."""
    if name not in recipe_names():
        raise ConfigError(f"no recipe {name!r}; {_near(Path(name))}")
    return (RECIPES / f"{name}.toml").read_text(encoding="utf-8")
