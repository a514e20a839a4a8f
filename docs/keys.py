"""Writes docs/reference/keys.md: every key of every recipe, from the types, defaults and docstrings of plaudit/config.

python docs/keys.py          write the page
python docs/keys.py --check  exit 1 if the page is out of date
"""

from __future__ import annotations

import ast
import inspect
import re
import sys
import textwrap
from collections.abc import Iterator
from pathlib import Path
from typing import Any, get_args

from plaudit.config import PreferenceRecipe, PrmRecipe, RewardRecipe, RlRecipe, SftRecipe, Table
from plaudit.config.search import SearchRecipe

ROOT = Path(__file__).parent.parent
PAGE = ROOT / "docs" / "reference" / "keys.md"
RECIPES = {"sft": SftRecipe, "reward": RewardRecipe, "prm": PrmRecipe, "preference": PreferenceRecipe, "rl": RlRecipe,
           "search": SearchRecipe}  # fmt: skip
HEAD = """# Keys of recipes

Every key of every recipe, made from `plaudit/config` by `python docs/keys.py`. The heading of a table says for which
tasks it is; where tasks differ in it, it is there more than once. [recipes.md](../recipes.md) explains the commonest,
and `plaudit init` writes a commented recipe.
"""


def tables_of(model: type[Table], path: str = "") -> Iterator[tuple[str, type[Table]]]:
    """The tables of a recipe with their paths, the top level as ""."""
    yield path, model
    for name, field in model.model_fields.items():
        for table in inner(field.annotation):
            yield from tables_of(table, f"{path}.{name}" if path else name)


def inner(annotation: Any) -> Iterator[type[Table]]:
    if isinstance(annotation, type) and issubclass(annotation, Table):
        yield annotation
    for part in get_args(annotation):
        yield from inner(part)


def rows_of(model: type[Table]) -> dict[str, str]:
    """A line of the page for each key; a subclass overrides inherited keys."""
    rows: dict[str, str] = {}
    for each in reversed(model.__mro__):
        if not issubclass(each, Table) or each is Table:
            continue
        body = ast.parse(textwrap.dedent(inspect.getsource(each))).body[0].body  # type: ignore[attr-defined]
        for statement, after in zip(body, [*body[1:], None], strict=True):
            if not isinstance(statement, ast.AnnAssign) or statement.target.id not in model.model_fields:  # type: ignore[union-attr]
                continue
            key, said = statement.target.id, ""  # type: ignore[union-attr]
            match after:
                case ast.Expr(ast.Constant(str(text))):
                    said = " ".join(text.split())
            default = "required" if statement.value is None else f"`{shown(statement.value)}`"
            kind, said = shown(statement.annotation), said.replace("|", "\\|")
            rows[key] = f"| `{key}` | `{kind}` | {default} | {said} |"
    return rows


def shown(node: ast.expr) -> str:
    words = re.sub(r"\s+", " ", ast.unparse(node))
    return re.sub(r"Annotated\[([^][]+), Field\(([^()]*)\)\]", r"\1 (\2)", words).replace("|", "\\|")


def page() -> str:
    sections: dict[tuple[str, type[Table]], list[str]] = {}
    for task, recipe in RECIPES.items():
        for path, model in dict.fromkeys(tables_of(recipe)):
            sections.setdefault((path, model), []).append(task)
    parts = [HEAD]
    for (path, model), tasks in sections.items():
        heading = f"[{path}]" if path else "top level"
        first = (inspect.getdoc(model) or "").split("\n\n")[0] if model.__doc__ != Table.__doc__ else ""
        parts.append(f"## {heading}, {', '.join(tasks)}\n")
        if first:
            parts.append(f"{' '.join(first.split())}\n")
        rows = "\n".join(rows_of(model).values())
        parts.append(f"| key | type | default | what it does |\n| --- | --- | --- | --- |\n{rows}\n")
    return "\n".join(parts)


if __name__ == "__main__":
    text = page()
    if "--check" in sys.argv:
        sys.exit(0 if PAGE.read_text() == text else "docs/reference/keys.md is out of date: run python docs/keys.py")
    PAGE.write_text(text)
