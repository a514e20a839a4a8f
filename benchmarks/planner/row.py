"""A row of published measurements: parses its columns, and resolves the model and machine it names."""

from __future__ import annotations

import math
import re
from collections.abc import Mapping
from dataclasses import dataclass

from plaudit.errors import PlauditError
from plaudit.plan import ModelShape, cluster
from plaudit.plan.shape.hardware import DTYPE_BYTES, Cluster, accelerator

Row = Mapping[str, str]
PROMPT = 256.0


class Unplannable(Exception):
    """The row lacks something that a plan needs."""


@dataclass(frozen=True, slots=True)
class Answer:
    predicted: float
    measured: float
    target: str
    """Which of the targets the row counts for; empty for none."""


COLUMNS = (
    "source", "system", "model", "params_b", "gpu", "n_gpus", "algorithm", "architecture", "prompt_len", "response_len",
    "batch", "metric", "value", "unit", "notes", "group", "gen_tp", "gen_pp", "train_layout", "dtype", "response_kind",
    "usable",
)  # fmt: skip


def whole(found: Mapping[str, str | None]) -> Row:
    """The row with every column, empty where the file has none, and with a group."""
    row = {name: (found.get(name) or "").strip() for name in COLUMNS}
    return {**row, "group": row["group"] or f"{row['system']} {row['model']}", "usable": row["usable"] or "1"}


def number(row: Row, key: str) -> float | None:
    text = row[key].replace(",", "")
    return float(text) if re.fullmatch(r"\d+\.?\d*(e[+-]?\d+)?|\.\d+", text, re.IGNORECASE) else None


def count(row: Row, key: str) -> int | None:
    """An integer of at least one."""
    found = number(row, key)
    if found is not None and (found < 1 or found != int(found)):
        raise Unplannable(f"{key} = {row[key]!r}: expected a whole number of one or more")
    return None if found is None else int(found)


def required(row: Row, key: str, what: str) -> float:
    found = number(row, key)
    if found is None:
        raise Unplannable(f"no {what}" + (f" ({row[key]!r})" if row[key].strip() else ""))
    if not found:
        raise Unplannable(f"{what} = {row[key]}: expected more than zero")
    return found


def copies(devices: int, *cuts: int) -> int:
    """Data-parallel copies of a model with this layout."""
    if min(cuts) < 1 or devices < math.prod(cuts):
        raise Unplannable(f"cuts of {' × '.join(map(str, cuts))} take more than {devices} devices")
    return devices // math.prod(cuts)


def shape(row: Row) -> ModelShape:
    try:
        return ModelShape.named(row["model"])
    except PlauditError:
        raise Unplannable(f"no shape known for {row['model']!r}") from None


CHIP = re.compile(
    r"(?<![A-Z])(GB300|GB200|B300|B200|H100 PCIe|H100|H200|H800|H20|A800|MI300X|MI325X|MI355X|L40S|RTX 4090|"
    r"RTX PRO 6000|TPU v5p|TPU v6e)(?!\d)", re.IGNORECASE,
)  # fmt: skip


def gpu_name(row: Row) -> str:
    """The catalogue's name; sources write H100-SXM5-80GB, NVIDIA H100 80GB HBM3, 96GB-class (H20) ..."""
    text = row["gpu"].replace("_", " ")
    if not text:
        raise Unplannable("no accelerator named")
    try:
        return accelerator(text).name
    except PlauditError as error:
        if named := CHIP.search(text):
            return accelerator(named[1]).name
        if re.search(r"A100", text):
            return accelerator("A100-40G" if re.search(r"40 ?G", text) else "A100-80G").name
        raise Unplannable(str(error)) from None


def machine(row: Row, devices: int | None = None) -> Cluster:
    devices = devices or count(row, "n_gpus")
    if devices is None:
        raise Unplannable("no number of accelerators" + (f" ({row['n_gpus']!r})" if row["n_gpus"] else ""))
    name = gpu_name(row)
    if devices % 8 == 0:
        return cluster(f"{devices}x{name}")
    each = max(size for size in range(1, 9) if devices % size == 0)
    return cluster(f"{devices // each}x{each}x{name}")


def price_of(where: Cluster, level: str) -> float:
    price = where.accelerator.price.at(level)
    if price is None:
        raise Unplannable(f"no {level} price of {where.accelerator.name} is public")
    return price


FORMATS = {
    "fp4": r"fp4|w4a|int4|awq|gptq", "fp8": r"fp8|int8|w8a|^sq$|e4m3", "bf16": r"bf16|fp16|float16|half",
    "fp32": r"fp32|float32",
}  # fmt: skip
"""How sources write the formats of weights, the narrowest first: w4a16_mxfp4, fp8_block, int8_wo ..."""


def dtype(row: Row, model: ModelShape) -> str:
    stated = row["dtype"].lower() or ("fp8" if "fp8" in row["model"].lower() else "bf16")
    found = next((name for name, written in FORMATS.items() if re.search(written, stated)), stated)
    if found not in DTYPE_BYTES:
        raise Unplannable(f"the planner knows no format {row['dtype']!r}")
    # Published in four bits; formats that a chip cannot multiply in are unpacked.
    return "fp4" if model.name.startswith("gpt-oss") and row["architecture"].startswith("serving") else found
