"""The documentation site: the navigation leads to pages, the command reference is complete, symptom pages name existing
keys and metrics."""

from __future__ import annotations

import importlib
import re
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import yaml
from pydantic import BaseModel

from plaudit.config import RlRecipe
from plaudit.metrics import undescribed

ROOT = Path(__file__).parent.parent
DOCS = ROOT / "docs"
SYMPTOMS = sorted((DOCS / "symptoms").glob("*.md"))


class Loader(yaml.SafeLoader):
    """Accepts the Python tags in mkdocs.yml."""


Loader.add_multi_constructor("tag:yaml.org,2002:python/", lambda loader, suffix, node: suffix)


def leaves(tree: Any) -> Iterator[str]:
    if isinstance(tree, str):
        yield tree
    else:
        for each in tree.values() if isinstance(tree, dict) else tree:
            yield from leaves(each)


def test_navigation_leads_to_pages() -> None:
    nav = yaml.load((ROOT / "mkdocs.yml").read_text(), Loader)["nav"]
    assert [name for part in nav for name in part] == [
        "Start",
        "Guides",
        "Reference",
        "Benchmarks",
        "Proof",
        "Symptoms",
    ]
    named = list(leaves(nav))
    assert len(named) == len(set(named))
    pages = {page.relative_to(DOCS).as_posix() for page in DOCS.rglob("*.md")}
    assert set(named) <= pages
    assert {page for page in pages if page.startswith(("symptoms/", "reference/", "benchmarks/"))} <= set(named)


def test_command_reference_has_every_command(monkeypatch: pytest.MonkeyPatch) -> None:
    """`make docs` regenerates the page with the current options."""
    monkeypatch.syspath_prepend(str(DOCS))
    commands = importlib.import_module("commands")
    monkeypatch.delitem(sys.modules, "commands")
    heads = [re.findall(r"^## .*", text, re.MULTILINE) for text in (commands.PAGE.read_text(), commands.page())]
    assert len(heads[0]) > 10
    assert heads[0] == heads[1], "run python docs/commands.py"
    assert "| `--track` | Send metrics during training: tensorboard, wandb or trackio. |  |" in commands.page()


def keys(model: type[BaseModel], prefix: str = "") -> Iterator[str]:
    for name, field in model.model_fields.items():
        yield f"{prefix}{name}"
        for kind in (field.annotation, *getattr(field.annotation, "__args__", ())):
            if isinstance(kind, type) and issubclass(kind, BaseModel) and not issubclass(kind, model):
                yield from keys(kind, f"{prefix}{name}.")


@pytest.mark.parametrize("page", SYMPTOMS, ids=lambda page: page.stem)
def test_symptom_pages_name_existing_keys_and_metrics(page: Path) -> None:
    known = set(keys(RlRecipe))
    tables = {key.split(".")[0] for key in known}
    named = re.findall(r"`([^`\n]+)`", page.read_text())
    metrics = [
        each for each in named if re.fullmatch(r"(reward|policy|length|mismatch|staleness|perf|kl|value)/\w+", each)
    ]
    used = [each.partition(" ")[0] for each in named if each.split(".")[0] in tables and re.match(r"\w+\.\w", each)]
    assert metrics or used
    assert not undescribed(metrics)
    assert not [each for each in used if each not in known and not each.startswith("reward.members")]
