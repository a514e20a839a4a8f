"""Weights of a narrow trunk in the layout that is fastest for few rows: transposed, and query, key and value joined.

For tens of rows a product of a small model takes as little as half the time with a transposed weight, and the overhead
of a call is as large as a product. So for several decode steps a lean trunk on a CPU uses a copy of weights that are
small. The copy lives only for these steps, because nothing signals a changed weight (torch's fused optimizers do not
increment its version). It is used only for shapes for which a trial gave the bits of `F.linear`.
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

SMALL = 1 << 20  # weights of all layers: copying more costs as much as it saves
WORTH = 4  # minimum number of steps that makes the copy pay off
FEWEST, MOST = CPU_MOST, max(CPU_ROWS)  # rows: MKL uses other kernels for fewer, and packs weights itself for more
MEASURED = platform.machine() == "x86_64"  # measured with MKL, with no other library
PARTS = ("q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj")


def columns_of(lean: LeanTrunk, rows: int, steps: int) -> list[Columns] | None:
    """The joined weights for `steps` steps of `rows` rows; None if the modules' own products are to be used."""
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
    """Whether few rows times joined and transposed weights of these shapes have the same bits as many rows times each
    weight."""
    generator = torch.Generator().manual_seed(1)
    weights = [torch.randn(shape, generator=generator) for shape in shapes]
    x = torch.randn(CPU_MANY, shapes[0][1], generator=generator)
    many, joined = torch.cat([F.linear(x, weight) for weight in weights], dim=1), _joined(weights)
    return all(torch.equal(torch.mm(x[:n], joined), many[:n]) for n in CPU_ROWS if n >= FEWEST)
