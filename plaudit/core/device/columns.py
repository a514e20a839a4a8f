"""Weights of a narrow trunk as products of few rows want them: transposed, and those of query, key and value as one.

For some tens of rows a product of a small model takes down to half as long with a weight whose rows are its inputs, and
a call costs as much as a product. So for a number of decode steps a lean trunk on a CPU takes a copy of weights that
are small. It does not outlast them: nothing tells when a weight changes (torch's fused optimizers do not count it). It
is used only where a trial of its shapes gave the bits of `F.linear`.
"""

from __future__ import annotations

import platform
from collections.abc import Sequence
from functools import cache

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from plaudit.algo.tokens.products import CPU_MANY, CPU_MOST, CPU_ROWS
from plaudit.core.model.lean import Columns, LeanTrunk

SMALL = 1 << 20  # numbers of all layers: the copy of more costs as much as it saves
WORTH = 4  # steps that pay for it
FEWEST, MOST = CPU_MOST, max(CPU_ROWS)  # rows: with fewer a library has other kernels, with more it packs by itself
MEASURED = platform.machine() == "x86_64"  # by MKL; no other library was measured
PARTS = ("q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj")


def columns_of(lean: LeanTrunk, rows: int, steps: int) -> list[Columns] | None:
    """For so many steps of so many rows with the weights of now; None where the parts' own products are to be taken."""
    if not MEASURED or steps < WORTH or not FEWEST <= rows <= MOST or lean.normed:
        return None
    tables = [layer.attention | layer.mlp for layer in lean.layers]
    parts = [[table[name] for name in PARTS] for table in tables]
    if not all(type(part) is nn.Linear and part.bias is None for layer in parts for part in layer):
        return None
    weights: list[list[Tensor]] = [[part._parameters["weight"] for part in layer] for layer in parts]  # type: ignore[misc]
    flat = [weight for layer in weights for weight in layer]
    if sum(weight.numel() for weight in flat) > SMALL or any(weight.dtype != torch.float32 for weight in flat):
        return None
    if any(weight.device.type != "cpu" for weight in flat):
        return None
    products = [(layer[:3], *([weight] for weight in layer[3:])) for layer in weights]
    shapes = {tuple(weight.shape for weight in product) for layer in products for product in layer}
    return [Columns(*map(_joined, layer)) for layer in products] if all(map(_same_bits, shapes)) else None


def _joined(weights: Sequence[Tensor]) -> Tensor:
    return torch.cat([weight.detach() for weight in weights]).T.contiguous()


@cache
@torch.no_grad()
def _same_bits(shapes: tuple[torch.Size, ...]) -> bool:
    """Whether rows of a product with weights of these shapes, as one and transposed, have the bits that they have among
    many with each weight by itself."""
    generator = torch.Generator().manual_seed(1)
    weights = [torch.randn(shape, generator=generator) for shape in shapes]
    x = torch.randn(CPU_MANY, shapes[0][1], generator=generator)
    many, joined = torch.cat([F.linear(x, weight) for weight in weights], dim=1), _joined(weights)
    return all(torch.equal(torch.mm(x[:n], joined), many[:n]) for n in CPU_ROWS if n >= FEWEST)
