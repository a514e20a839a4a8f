"""`plaudit recipes`, `init`: recipes to start from."""

from pathlib import Path
from typing import Annotated

import typer

from plaudit.cli.app import app


@app.command("recipes")
def show_recipes(
    name: Annotated[str | None, typer.Argument(help="Print this one.")] = None,
    copy: Annotated[Path | None, typer.Option(metavar="FILE", help="Copy it to this file instead.")] = None,
) -> None:
    """List the recipes that come with Plaudit, print one, or copy it."""
    from plaudit.config.shipped.catalog import listings, recipe_text
    from plaudit.errors import ConfigError

    if name is not None:
        text = recipe_text(name)
        if copy is None:
            typer.echo(text, nl=False)
        else:
            _write_new(copy, text)
            typer.echo(f"copied {name} to {copy}")
        return
    if copy is not None:
        raise ConfigError(f"--copy {copy}: name the recipe, such as plaudit recipes sums-grpo --copy {copy}")
    rows = listings()
    width = max(len(row.name) for row in rows)
    for row in rows:
        typer.echo(f"{row.name:<{width}}  {row.task:<6}  {row.description}")


@app.command("init")
def write_recipe(
    file: Annotated[Path, typer.Argument(help="The recipe to write.")] = Path("recipe.toml"),
    task: Annotated[str, typer.Option(help="sft, preference, reward, prm, rl or search.")] = "sft",
    data: Annotated[str, typer.Option(metavar="FILE", help="Your data: a .jsonl or .parquet file.")] = "data.jsonl",
    model: Annotated[
        str, typer.Option(metavar="NAME_OR_DIR", help="The model to start from, or the policy of a search.")
    ] = "smollm2",
) -> None:
    """Write a commented recipe for your own data."""
    from plaudit.config.shipped.template import new_recipe

    _write_new(file, new_recipe(task, model, data))
    verb = "search" if task == "search" else "train"
    typer.echo(f"{file}: edit it, check it with plaudit {verb} {file} --dry-run, run it with plaudit {verb} {file}")


def _write_new(file: Path, text: str) -> None:
    from plaudit.errors import StorageError
    from plaudit.output import check_writable, written

    check_writable(file)
    if file.is_file():
        raise StorageError(f"{file} already exists: choose another file, or delete it first")
    with written(file) as stream:
        stream.write(text)
