"""Writes docs/reference/commands.md: every command with its arguments and options, as `--help` prints them.

python docs/commands.py          write the page
python docs/commands.py --check  exit 1 if the page is out of date
"""

from __future__ import annotations

import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import typer.main

from plaudit.cli import app

PAGE = Path(__file__).parent / "reference" / "commands.md"
HEAD = """# Command line

Every command, as `plaudit COMMAND --help` has it. Made by `python docs/commands.py`.
"""


def page() -> str:
    return "\n".join([HEAD, *_commands("plaudit", typer.main.get_command(app))])


def _commands(name: str, command: Any) -> Iterator[str]:
    if hasattr(command, "commands"):
        for child in sorted(command.commands):
            yield from _commands(f"{name} {child}", command.commands[child])
        return
    yield f"## {name}\n\n{' '.join((command.help or '').split())}\n"
    rows = [_row(each) for each in command.params if each.name != "help"]
    if rows:
        yield "| | what it is | default |\n| --- | --- | --- |\n" + "\n".join(rows) + "\n"


def _row(parameter: Any) -> str:
    option = parameter.param_type_name == "option"
    names = (
        ", ".join(f"`{name}`" for name in parameter.opts)
        if option
        else f"`{(parameter.metavar or parameter.name).upper()}`"
    )
    default = parameter.default
    shown = "" if default in (None, False, (), [], "") or callable(default) or parameter.required else f"`{default}`"
    return f"| {names} | {_cell(parameter.help or '')} | {_cell(shown)} |"


def _cell(text: str) -> str:
    return " ".join(text.split()).replace("|", "\\|").replace("<", "&lt;")


if __name__ == "__main__":
    if "--check" in sys.argv:
        sys.exit(PAGE.read_text(encoding="utf-8") != page())
    PAGE.write_text(page(), encoding="utf-8")
