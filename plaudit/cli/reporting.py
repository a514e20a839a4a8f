"""`plaudit report`, `bench`: reports about runs, benchmarks of this machine."""

from pathlib import Path
from typing import Annotated

import typer

from plaudit.cli.app import Sets, app, bench


@app.command()
def report(
    runs: Annotated[list[Path], typer.Argument(help="Run directories.")],
    out: Annotated[Path | None, typer.Option(help="The page to write. Default: report.html in the first run.")] = None,
    follow: Annotated[bool, typer.Option("--follow", help="Watch a run until it ends.")] = False,
    to: Annotated[str | None, typer.Option(help="Forward metrics to tensorboard, wandb or trackio instead.")] = None,
) -> None:
    """Show what runs did: tables and a diagnosis here, curves and samples on one HTML page."""
    from plaudit.errors import ConfigError

    if to is not None:
        from plaudit.report.sinks import follow as send_on
        from plaudit.report.sinks import forward

        if follow:
            from plaudit.cli.tracking import run_is_over

            if len(runs) > 1 or out is not None:
                raise ConfigError("--follow sends one run and writes no page: expected one run directory and no --out")
            typer.echo(f"{runs[0]}: {send_on(runs[0], to, run_is_over())} steps sent to {to}")
            return
        for run in runs:
            typer.echo(f"{run}: {forward(run, to)} steps sent to {to}")
        return
    if follow:
        from plaudit.report.following import Following

        if len(runs) > 1 or out is not None:
            raise ConfigError("--follow watches one run and writes no page: expected one run directory and no --out")
        Following(runs[0]).show()
        return
    from plaudit.output import check_writable, written
    from plaudit.report.searches.searches import is_search, read_searches
    from plaudit.report.terminal import print_report, print_searches

    page = out or runs[0] / "report.html"
    if any(is_search(run) for run in runs):
        from plaudit.report.searches.search_page import render_search_page

        searches = read_searches(runs)
        check_writable(page)
        print_searches(searches)
        text = render_search_page(searches)
    else:
        from plaudit.report.history import read_history
        from plaudit.report.page import render_page

        histories = [read_history(run) for run in runs]
        check_writable(page)
        print_report(histories)
        text = render_page(histories)
    with written(page) as file:
        file.write(text)
    typer.echo(f"page: {page}")


@bench.command("weights")
def bench_weight_channels(
    parameters: Annotated[str, typer.Option(help="Size of the model: 100M, 1B.")] = "100M",
    device: Annotated[str, typer.Option(help="cpu, cuda, or auto: the GPU if there is one.")] = "auto",
    dtype: Annotated[str | None, typer.Option(help="Default: float32 on a CPU, bfloat16 on a GPU.")] = None,
    disk: Annotated[
        Path | None, typer.Option(help="A directory on the disk to measure. Default: the directory of temporary files.")
    ] = None,
    repeats: Annotated[int, typer.Option(min=1, help="Transfers with each channel; the fastest counts.")] = 5,
    json: Annotated[bool, typer.Option("--json", help="Print JSON, not a table.")] = False,
    out: Annotated[Path, typer.Option(help="Directory for weights.json and weights.svg.")] = Path("runs/bench"),
) -> None:
    """Transfer a model's weights to another process through every channel, and compare with the machine's limits."""
    from plaudit.bench.command import run_bench_weights

    run_bench_weights(parameters, device, dtype, disk, repeats, as_json=json, out=out)


@bench.command("memory")
def bench_memory_of_placements(
    recipe: Annotated[Path, typer.Argument(help="An RL recipe: a file or a name, such as sums-grpo.")],
    placements: Annotated[str, typer.Option(metavar="A,B,C", help="Placements to run. Default: all.")] = "",
    steps: Annotated[int, typer.Option(min=1, help="Steps in each.")] = 2,
    sets: Sets = [],  # noqa: B006 (typer copies it)
    timeout: Annotated[float, typer.Option(help="Timeout of one placement, in seconds.")] = 1800.0,
    json: Annotated[bool, typer.Option("--json", help="Print JSON, not tables.")] = False,
    out: Annotated[Path, typer.Option(help="Directory for memory.json, memory.html and the runs.")] = Path(
        "runs/bench"
    ),
) -> None:
    """Run a recipe for a few steps in every placement, and show the memory used in each. Exit code 1: some failed."""
    from json import dump, dumps

    from plaudit.bench.memory import bench_memory, chosen
    from plaudit.output import check_writable, written
    from plaudit.report.history import read_history
    from plaudit.report.page import render_page
    from plaudit.report.terminal import print_memory

    names = chosen(placements)
    (out / "memory").mkdir(parents=True, exist_ok=True)
    table, page = out / "memory.json", out / "memory.html"
    check_writable(table)
    result = bench_memory(recipe, names, steps, sets, out / "memory", timeout)
    histories = [read_history(Path(placed.directory)) for placed in result.placements if placed.error is None]
    with written(table) as file:
        dump(result.as_dict(), file, indent=2)
    with written(page) as file:
        file.write(render_page(histories))
    if json:
        typer.echo(dumps(result.as_dict()))
    else:
        print_memory(histories)
        for placed in result.placements:
            typer.echo(placed.summary_line())
        typer.echo(f"figures: {table}; page: {page}")
    raise typer.Exit(int(any(placed.error is not None for placed in result.placements)))
