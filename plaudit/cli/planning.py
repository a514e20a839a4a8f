"""`plaudit plan`."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from plaudit.cli.app import app, resolve_model


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
    from plaudit.plan.show.command import Options, run_plan

    run_plan(
        Options(
            model=model, hardware=hardware, algorithm=algorithm, prompt=prompt, response=response,
            max_response=max_response, batch=batch, samples=samples, updates=updates, epochs=epochs, steps=steps,
            reward=reward, critic=critic, dtype=dtype, generation_dtype=generation_dtype, kv_dtype=kv_dtype,
            placements=tuple(placement), channel=channel, staleness=staleness, generation_hardware=generation_hardware,
            compare=tuple(filter(None, (compare or "").split(","))), price=price, hardware_file=hardware_file,
            recipe=recipe, out=out, as_json=as_json, explain=explain, page=page, top=top, calibrate=calibrate,
        ),
        resolve=resolve_model, measure=_measure_machine,
    )  # fmt: skip


def _measure_machine() -> str:
    from plaudit.calibrate import measure

    return measure()
