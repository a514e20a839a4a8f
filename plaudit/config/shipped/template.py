"""Commented recipe templates for the user's own data: the output of `plaudit init`. Imports no torch."""

from __future__ import annotations

import tomllib

from plaudit.config.recipe import parse_recipe
from plaudit.config.search import parse_search
from plaudit.config.shipped.catalog import RECIPES
from plaudit.config.table import to_toml
from plaudit.errors import ConfigError, nearest

TEMPLATES = RECIPES / "templates"
# Placeholders for the user's model and data; with them each template is a valid recipe itself.
MODEL, DATA = 'path = "smollm2"', 'path = "data.jsonl"'


def template_tasks() -> tuple[str, ...]:
    return tuple(sorted(path.stem for path in TEMPLATES.glob("*.toml")))


def new_recipe(task: str, model: str, data: str) -> str:
    """Return the recipe as TOML, validated: an invalid data path or model is rejected here."""
    if task not in template_tasks():
        raise ConfigError(f"unknown task {task!r}; {nearest(task, template_tasks())}")
    text = (TEMPLATES / f"{task}.toml").read_text(encoding="utf-8")
    for placeholder, value in ((MODEL, model), (DATA, data)):
        text = text.replace(placeholder, to_toml({"path": value}).strip(), 1)
    parse = parse_search if task == "search" else parse_recipe
    parse(tomllib.loads(text), "plaudit init")
    return text
