"""Implements `plaudit bench weights`."""

from __future__ import annotations

import json
from pathlib import Path

import torch
import typer

from plaudit.bench.shape import count_of
from plaudit.bench.weights import bench_weights
from plaudit.bench.weights_view import draw_weights, print_weights
from plaudit.errors import ConfigError, nearest
from plaudit.output import check_writable, written

DTYPES = ("float32", "bfloat16", "float16")


def run_bench_weights(
    parameters: str, device: str, dtype: str | None, disk: Path | None, repeats: int, *, as_json: bool, out: Path
) -> None:
    device = ("cuda" if torch.cuda.is_available() else "cpu") if device == "auto" else device
    dtype = dtype or ("bfloat16" if device.startswith("cuda") else "float32")
    if dtype not in DTYPES:
        raise ConfigError(f"unknown dtype {dtype!r}; {nearest(dtype, DTYPES)}")
    if disk is not None and not disk.is_dir():
        raise ConfigError(f"--disk {disk} is not a directory; create it first")
    out.mkdir(parents=True, exist_ok=True)
    table, picture = out / "weights.json", out / "weights.svg"
    check_writable(table)
    result = bench_weights(count_of(parameters), device=device, dtype=dtype, directory=disk, repeats=repeats)
    with written(table) as file:
        json.dump(result.as_dict(), file, indent=2)
    with written(picture) as file:
        file.write(draw_weights(result))
    if as_json:
        typer.echo(json.dumps(result.as_dict()))
        return
    print_weights(result)
    typer.echo(f"figures: {table}; picture: {picture}")
