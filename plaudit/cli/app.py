"""The application that commands register with, and options that several of them have."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

app = typer.Typer(
    help="Serve reward models, train policies against them, search with them, plan the hardware.",
    no_args_is_help=True, pretty_exceptions_enable=False, rich_markup_mode=None,
    context_settings={"help_option_names": ["-h", "--help"]},
)  # fmt: skip
bench = typer.Typer(help="Measure this machine, each figure beside its limit.", no_args_is_help=True)
app.add_typer(bench, name="bench")

Sets = Annotated[list[str], typer.Option("--set", metavar="A.B=C", help="Override one key of the recipe; repeatable.")]
Out = Annotated[Path | None, typer.Option(help="Run directory. Default: runs/<recipe stem>.")]


def resolve_model(name: str) -> Path:
    """A model's directory. Says that a name is wrong before torch is imported, which takes seconds."""
    from plaudit.models import resolve

    return resolve(name)
