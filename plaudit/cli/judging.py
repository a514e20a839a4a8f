"""`plaudit judge-check`."""

import json
from pathlib import Path
from typing import Annotated

import typer

from plaudit.cli.app import app


@app.command("judge-check")
def judge_check(
    data: Annotated[
        Path,
        typer.Argument(
            help='A .jsonl or .parquet file of {"prompt", "chosen", "rejected"} or {"prompt", "response", "label"}.'
        ),
    ],
    model: Annotated[
        str | None,
        typer.Option(
            metavar="NAME_OR_DIR_OR_TOML",
            help="The judge: a reward model, a file with a reward's or a comparison's table, or a name at --url.",
        ),
    ] = None,
    url: Annotated[list[str], typer.Option(help="A server of plaudit serve; repeatable.")] = [],  # noqa: B006
    api_key: Annotated[str | None, typer.Option(envvar="PLAUDIT_API_KEY", help="API key of the server.")] = None,
    repeats: Annotated[
        int | None,
        typer.Option(min=1, help="Requests per question. Default: 3 if the judge samples, else 1."),
    ] = None,
    threshold: Annotated[
        float | None, typer.Option(help="Rows with labels: the score from which a response counts as good.")
    ] = None,
    limit: Annotated[int | None, typer.Option(min=1, help="Use only the first N rows.")] = None,
    batch: Annotated[int, typer.Option(min=2, help="Responses judged in one batch.")] = 256,
    wait: Annotated[
        float, typer.Option(min=0, metavar="SECONDS", help="How long to wait for a server to start.")
    ] = 0.0,
    as_json: Annotated[bool, typer.Option("--json", help="Print the figures as JSON.")] = False,
) -> None:
    """Evaluate a judge on labelled data: agreement, order and length bias, self-consistency. Exit code 1: some rows
    have no verdict."""
    from rich.console import Console

    from plaudit.judge_check import show
    from plaudit.judge_check.check import check_judge
    from plaudit.judge_check.judge import open_judge
    from plaudit.judge_check.rows import read_labelled

    rows = read_labelled(data, limit)
    waiting = Console(stderr=True)
    with open_judge(model, url, api_key, wait) as judge, waiting.status("querying the judge") as status:
        result = check_judge(
            judge, rows, repeats=repeats, threshold=threshold, batch=batch,
            on_batch=lambda done, of: status.update(f"{done} of {of} answers"),
        )  # fmt: skip
    if as_json:
        typer.echo(json.dumps(show.as_json(result), indent=2, ensure_ascii=False))
    else:
        show.show(result, Console())
    raise typer.Exit(1 if result.failed else 0)
