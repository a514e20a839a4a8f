"""`plaudit search`."""

from pathlib import Path
from typing import Annotated

import typer

from plaudit.cli.app import Sets, app


@app.command("search")
def search_questions(
    recipe: Annotated[
        Path | None, typer.Argument(help="A TOML file, or a name of `plaudit recipes` such as search-ets.")
    ] = None,
    world: Annotated[str | None, typer.Option(help="A built-in task: sums, sums-hard.")] = None,
    input: Annotated[Path | None, typer.Option(help='A .jsonl or .parquet file of {"prompt"} or {"messages"}.')] = None,
    methods: Annotated[
        list[str],
        typer.Option(
            "--method",
            help="best-of-n, beam, dvts, rebase, ets, best-first, mcts, particles or auto; repeatable. Default: ets.",
        ),
    ] = [],  # noqa: B006
    width: Annotated[int | None, typer.Option(help="Paths searched at once. Default: 16.")] = None,
    questions: Annotated[int | None, typer.Option(help="Number of questions. Default: 200 of a world.")] = None,
    sets: Sets = [],  # noqa: B006
    out: Annotated[
        Path | None,
        typer.Option(help="Run directory. Default: runs/search-<method>. With several methods each gets OUT-<method>."),
    ] = None,
    resume: Annotated[bool, typer.Option("--resume", help="Search only the questions that are missing.")] = False,
    fresh: Annotated[bool, typer.Option("--fresh", help="Delete the run directory's content and start over.")] = False,
    dry_run: Annotated[bool, typer.Option("--dry-run", help="Print the resolved recipe and exit.")] = False,
) -> None:
    """Search for answers with step rewards. Without a recipe: the embedded world and its models."""
    from plaudit.config import to_toml
    from plaudit.config.search import load_search
    from plaudit.errors import ConfigError

    if resume and fresh:
        raise ConfigError("--resume and --fresh exclude each other: give one")
    flags = {
        "data.world": world, "data.path": None if input is None else str(input), "search.width": width,
        "data.limit": questions,
    }  # fmt: skip
    overrides = {key: value for key, value in flags.items() if value is not None}
    trees = [load_search(recipe, overrides | {"search.method": method}, sets) for method in methods]
    trees = trees or [load_search(recipe, overrides, sets)]
    if dry_run:
        typer.echo("\n".join(map(to_toml, trees)), nl=False)
        return
    base = out or Path("runs") / (recipe.stem if recipe is not None else "search")
    named = len(trees) > 1 or (out is None and recipe is None)
    directories = [base.with_name(f"{base.name}-{tree.search.method}") if named else base for tree in trees]
    from plaudit.search.search import run_searches
    from plaudit.search.summary import progress_bar, refuse_empty, summary_text

    searches = {}
    together = dict(zip(directories, trees, strict=True))
    for directory, figures in run_searches(together, progress_bar, resume=resume, fresh=fresh):
        searches[directory] = figures
        typer.echo(summary_text(figures))
        typer.echo(f"results: {directory / 'results.jsonl'}; summary: {directory / 'summary.json'}")
    refuse_empty(searches)
