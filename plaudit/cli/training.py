"""`plaudit train`, `pairs`, `steps`: training, and creating training data."""

import sys
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from plaudit.cli.app import Out, Sets, app, resolve_model
from plaudit.cli.live import shown_live
from plaudit.cli.tracking import tracked

if TYPE_CHECKING:
    from plaudit.config import Recipe, RlRecipe
    from plaudit.train.supervised.model import SupervisedRecipe


@app.command()
def train(
    recipe: Annotated[
        Path | None, typer.Argument(help="A TOML file, or a name of `plaudit recipes` such as sums-sft.")
    ] = None,
    sets: Sets = [],  # noqa: B006 (typer copies it)
    out: Out = None,
    resume: Annotated[bool, typer.Option("--resume", help="Resume from the last checkpoint, if there is one.")] = False,
    fresh: Annotated[bool, typer.Option("--fresh", help="Delete the run directory's content and start over.")] = False,
    dry_run: Annotated[bool, typer.Option("--dry-run", help="Print the resolved recipe and exit.")] = False,
    rollout_only: Annotated[bool, typer.Option("--rollout-only", help="RL: sample and score, no update.")] = False,
    train_only: Annotated[
        Path | None, typer.Option(metavar="RUN", help="RL: train on the samples that a run dumped, generate none.")
    ] = None,
    replay: Annotated[
        Path | None, typer.Option(metavar="RUN", help="RL: repeat a run's training on its dump, compare with its log.")
    ] = None,
    track: Annotated[
        str | None, typer.Option(metavar="TRACKER", help="Send metrics during training: tensorboard, wandb or trackio.")
    ] = None,
    live: Annotated[
        bool, typer.Option("--live", help="Open a page of the run in the browser, with its curves, pause and stop.")
    ] = False,
) -> None:
    """Train a model: SFT, preferences, reward model, process reward model or RL, depending on the recipe."""
    from plaudit.config import RlRecipe, load_recipe, to_toml
    from plaudit.errors import ConfigError

    if replay is not None:
        if recipe is not None or sets or resume or rollout_only or train_only:
            raise ConfigError("--replay uses the run's own recipe and dump: remove the recipe and other options")
        _replay(replay, out or replay / "replay")
        return
    if recipe is None:
        raise ConfigError("the recipe is missing: give a file or a name such as sums-sft (`plaudit recipes`)")
    tree = load_recipe(recipe, sets)
    if dry_run:
        typer.echo(to_toml(tree), nl=False)
        return
    if resume and fresh:
        raise ConfigError("--resume and --fresh exclude each other: give one")
    directory = out or Path("runs") / recipe.stem
    if rollout_only or train_only is not None:
        _check_debugging(tree.task, directory, rollout_only, train_only)
    if track is not None:
        from plaudit.report.sinks import check_tracker

        check_tracker(track)
    from plaudit.train.run.launch import guard_rank, is_rank, launch

    if is_rank():
        guard_rank()
    else:
        _print_start(tree, directory, resume)
    if isinstance(tree, RlRecipe) and tree.resources.ray is not None and not is_rank():
        from plaudit.place.ray.launch import launch_on_ray

        raise typer.Exit(launch_on_ray(tree, sys.argv[1:], directory))
    if tree.resources.ranks > 1:
        if rollout_only:
            raise ConfigError(f"--rollout-only runs in one process, but resources has {tree.resources.ranks} ranks")
        if not is_rank():
            raise typer.Exit(launch(tree.resources.ranks, sys.argv[1:]))
    with tracked(directory, track) as begin_tracking, shown_live(directory, live, tree.resources.ranks) as begin_page:

        def begun() -> None:
            begin_tracking()
            begin_page()

        if isinstance(tree, RlRecipe):
            outcome = _train_rl(tree, directory, resume, fresh, rollout_only, train_only, _keys(sets), begun)
        else:
            outcome = _train_supervised(tree, directory, resume, fresh, _keys(sets), begun)
    if outcome is not None:
        _print_outcome(directory, *outcome)


@app.command("rollouts")
def generate_for_run(
    run: Annotated[
        Path, typer.Argument(help="Directory of an RL run that trains on other machines, on a shared file system.")
    ],
    wait: Annotated[float, typer.Option(min=1, help="Timeout for waiting for a trainer, in seconds.")] = 600.0,
) -> None:
    """Generate on this machine for a run with resources.rollout.nodes, until the run is finished."""
    from plaudit.place.machines.machine import Leave, generate_for
    from plaudit.process.guard import guard_this_process

    guard_this_process("plaudit rollouts")
    leave = Leave()
    leave.listen()
    if not generate_for(run, wait, leave):
        raise typer.Exit(128 + 15)


def _print_start(tree: "Recipe", directory: Path, resume: bool) -> None:
    """Checks that the model exists and prints what is about to happen, before torch is imported, which takes
    seconds."""
    from plaudit.models.catalog import PACKAGED

    if tree.model.path not in (None, PACKAGED) and not resume:
        resolve_model(tree.model.path)
    if sys.stderr.isatty():  # otherwise an error stays the only line printed
        typer.echo(f"plaudit train: {tree.task}, {tree.train.steps} steps, into {directory}", err=True)


def _train_rl(
    tree: "RlRecipe",
    directory: Path,
    resume: bool,
    fresh: bool,
    rollout_only: bool,
    train_only: Path | None,
    chosen: list[str],
    begun: Callable[[], None],
) -> tuple[dict[str, Any], Path] | None:
    """The run's summary and the path of its model; None on ranks other than the first, or if nothing was trained."""
    from plaudit.place.build import hosting
    from plaudit.report.live import LiveView
    from plaudit.rl.follower import NoViewer, joined_run
    from plaudit.rl.loop import RlTraining
    from plaudit.rl.rollout_only import roll_out
    from plaudit.train.rollouts.dump import Dump

    dumped = None if train_only is None else Dump.find(train_only)
    with (
        joined_run(directory, tree, resume=resume, fresh=fresh, chosen=chosen) as (run, ranks),
        hosting(tree, directory, ranks) as host,
    ):
        viewer = LiveView(directory.name) if ranks.main else NoViewer()
        if ranks.main:
            begun()
        training = RlTraining(tree, run, viewer, dumped, ranks, host)
        if rollout_only:
            made = roll_out(training)
            typer.echo(f"{made['samples']} samples of {made['steps']} steps in {made['rollouts']}")
            return None
        summary = training.fit()
    return (summary, run.final) if ranks.main else None


def _train_supervised(
    tree: "SupervisedRecipe",
    directory: Path,
    resume: bool,
    fresh: bool,
    chosen: list[str],
    begun: Callable[[], None],
) -> tuple[dict[str, Any], Path] | None:
    from plaudit.rl.follower import NoViewer, joined_run
    from plaudit.train.run.progress import Progress
    from plaudit.train.supervised.supervised import SupervisedTraining

    with joined_run(directory, tree, resume=resume, fresh=fresh, chosen=chosen) as (run, ranks):
        viewer = Progress(directory.name) if ranks.main else NoViewer()
        if ranks.main:
            begun()
        summary = SupervisedTraining(tree, run, viewer, ranks).fit()
    return (summary, run.final) if ranks.main else None


def _keys(sets: list[str]) -> list[str]:
    return [each.partition("=")[0].strip() for each in sets]


def _print_outcome(directory: Path, summary: dict[str, Any], model: Path) -> None:
    parts = [f"{summary['steps']} steps in {summary['seconds']} s"]
    for name in ("accuracy", "truth", "reward"):
        if f"{name}_after" in summary:
            before = summary[f"{name}_before"]  # missing if the first evaluation got no rewards
            parts.append(f"{name} {'?' if before is None else f'{before:.3f}'} -> {summary[f'{name}_after']:.3f}")
    typer.echo(f"{directory.name}: {'; '.join(parts)}; model in {model}")


def _check_debugging(task: str, directory: Path, rollout_only: bool, train_only: Path | None) -> None:
    from plaudit.errors import ConfigError

    if task != "rl":
        raise ConfigError(f"--rollout-only and --train-only need an RL recipe, but the recipe has task = {task!r}")
    if rollout_only and train_only is not None:
        raise ConfigError("--rollout-only and --train-only exclude each other: give one")
    if train_only is not None and train_only.resolve().is_relative_to(directory.resolve()):
        raise ConfigError(f"{train_only} is in the run directory {directory}: set another one with --out")


def _replay(run: Path, out: Path) -> None:
    from plaudit.report.live import LiveView
    from plaudit.rl.replay import replay

    verdict = replay(run, out, LiveView(run.name))
    typer.echo(f"{run.name}: {verdict.text}")
    raise typer.Exit(0 if verdict.equal else 1)


@app.command()
def verify(
    run: Annotated[Path, typer.Argument(help="An RL run's directory; with --manifest also a copy of its final model.")],
    step: Annotated[int | None, typer.Option(help="The last step to recompute. Default: the run's last.")] = None,
    from_start: Annotated[
        bool, typer.Option("--from-start", help="Recompute all steps, not only those since the last checkpoint.")
    ] = False,
    manifest: Annotated[
        Path | None, typer.Option(metavar="FILE", help="Recompute nothing: compare files with a run's manifest.json.")
    ] = None,
) -> None:
    """Recompute steps of a run, and compare its log, checkpoints and final model with them, bit by bit. Exit status:
    0 equal; 1 different, damaged or missing; 2 intact, but not all of it was recomputed."""
    from tempfile import TemporaryDirectory

    from plaudit.errors import ConfigError
    from plaudit.rl.verify import check_delivered, keep
    from plaudit.rl.verify import verify as run_verify

    if manifest is not None:
        if from_start or step is not None:
            raise ConfigError("--manifest recomputes nothing: remove --from-start and --step")
        verdict = check_delivered(run, manifest)
    else:
        if from_start and step is not None:
            raise ConfigError("--from-start recomputes all steps: remove --step")
        with TemporaryDirectory(prefix="plaudit-verify-") as scratch:
            verdict = run_verify(run, Path(scratch), step, from_start)
    typer.echo(f"{run.name}: {verdict.text}")
    if manifest is None:
        try:
            keep(verdict, run)
        except OSError as error:  # the verdict stands
            typer.echo(f"{run} cannot keep the verdict for its report: {error.strerror}", err=True)
    raise typer.Exit(verdict.code)


@app.command("pairs")
def make_pairs(
    run: Annotated[Path, typer.Argument(help="A run with rollouts: from --rollout-only, or with train.dump = true.")],
    out: Annotated[Path, typer.Argument(help="The .jsonl file to write.")],
    most: Annotated[int, typer.Option(min=1, help="Maximum number of pairs per prompt.")] = 4,
) -> None:
    """Create preference pairs from a run's rollouts: the response with the higher reward over that with the lower."""
    from plaudit.train.rollouts.pairs import write_pairs

    typer.echo(f"{out}: {write_pairs(run, out, most)}")


@app.command("steps")
def value_steps(
    run: Annotated[Path, typer.Argument(help="A run with rollouts: from --rollout-only, or with train.dump = true.")],
    out: Annotated[Path, typer.Argument(help="The .jsonl file to write.")],
    split: Annotated[str, typer.Option(help=r"The text that ends a step; \n stands for a new line.")] = r"\n\n",
    completions: Annotated[int, typer.Option(min=1, help="Completions sampled from the end of each step.")] = 8,
    limit: Annotated[int | None, typer.Option(min=1, help="Use only the first N solutions.")] = None,
) -> None:
    """Estimate step values from a run's rollouts: the share of right completions from the end of each step."""
    from plaudit.train.rollouts.step_values import write_step_values

    ends = split.replace(r"\n", "\n")
    typer.echo(f"{out}: {write_step_values(run, out, split=ends, completions=completions, limit=limit)}")
