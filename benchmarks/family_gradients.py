"""Gradients of a packed row compared with transformers' own modules, one sequence at a time, for every verified family.

    python benchmarks/family_gradients.py

In three precisions: float64 throughout, float64 as the model is written (its softmax, norms and recurrences stay
float32), and float32. Besides the difference between the two, the table gives how far each is from float64 throughout,
which is the rounding error itself. Relative to the largest gradient of a parameter, as in tests/core/test_families.py.
"""

from __future__ import annotations

import copy
import sys
import tempfile
import warnings
from collections.abc import Callable
from contextlib import nullcontext
from pathlib import Path
from statistics import median
from typing import Any

import torch

from plaudit.core import Engine
from plaudit.core.model.packing import pack_tree
from plaudit.core.proof.stand_in import tokens_for
from plaudit.train.optim.sharding import packed_rows

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from tests.core.doubles import Doubles
from tests.core.families import MAPPINGS, PROVED, Case, cases, from_table, on_disk
from tests.core.test_families import PAGE, rows_of

WAYS = ("float64", "float64, parts float32", "float32")
Grads = dict[str, torch.Tensor]


def main() -> None:
    warnings.simplefilter("ignore")
    proved = from_table(PAGE.read_text())
    found = {
        case.name: _case(case) for case in cases() if case.kind == "causal" and proved["causal", case.name] == PROVED
    }
    print(f"{len(found)} families\n| | median | largest |\n| --- | --- | --- |")
    for name in next(iter(found.values())):
        each = sorted(((differences[name], family) for family, differences in found.items()), reverse=True)
        most = ", ".join(f"{family} {value:.1e}" for value, family in each[:4])
        print(f"| {name} | {median(value for value, _ in each):.1e} | {most} |")


def _case(case: Case) -> dict[str, float]:
    with tempfile.TemporaryDirectory() as temporary:
        directory = on_disk(case, Path(temporary) / "model")
        module = Engine.load(directory, device="cpu").decoder.module
        own = MAPPINGS["causal"][0].from_pretrained(directory, attn_implementation="eager", dtype=torch.float32)
    ids = [tokens_for(own, seed, length) for seed, length in enumerate((37, 9))]
    ids = sorted([*ids, [*ids[0][:20], *ids[1]], ids[0][:21]])
    pairs = {}
    for way in reversed(WAYS):  # float32 first: converting a model to float64 is not undone
        each = torch.float32 if way == "float32" else torch.float64
        pairs[way] = tuple(_grads(*what, ids, each, way == WAYS[0]) for what in ((module, _packed), (own, _alone)))
    true = pairs["float64"][1]
    differences = {}
    for way, (packed, alone) in pairs.items():
        differences[f"{way}: packed to module"] = _difference(packed, alone, true)
        if way != WAYS[0]:
            differences[f"{way}: module to float64"] = _difference(alone, true, true)
            differences[f"{way}: packed to float64"] = _difference(packed, true, true)
    print(case.name, *(f"{value:.1e}" for value in differences.values()), flush=True)
    return differences


def _packed(module: Any, ids: list[list[int]]) -> torch.Tensor:
    tree = pack_tree(ids, lone=False)
    rows = packed_rows(module, tree.packed)
    return torch.cat([rows[torch.from_numpy(at)] for at in tree.rows])


def _alone(module: Any, ids: list[list[int]]) -> torch.Tensor:
    return torch.cat([rows_of(module, each) for each in ids])


def _grads(
    module: Any, rows_of_all: Callable[[Any, list[list[int]]], torch.Tensor], ids: list[list[int]], dtype: torch.dtype,
    throughout: bool,
) -> Grads:  # fmt: skip
    module = copy.deepcopy(module).eval().to(dtype)
    module.set_experts_implementation("eager")  # torch's grouped product does not support float64
    with Doubles() if throughout else nullcontext():
        rows = rows_of_all(module, ids)
        weights = torch.randn(rows.shape, generator=torch.Generator().manual_seed(1))
        (rows * weights.to(rows.dtype)).sum().backward()
    return {name: p.grad.double() for name, p in module.named_parameters() if p.grad is not None}


def _difference(one: Grads, other: Grads, true: Grads) -> float:
    least = 1e-2 * max(float(grad.abs().max()) for grad in true.values())
    return max(float((one[n] - other[n]).abs().max()) / max(float(true[n].abs().max()), least) for n in true)


if __name__ == "__main__":
    main()
