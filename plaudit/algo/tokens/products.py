"""Products whose rows do not depend on how many rows there are.

On a GPU a library may split a product of few rows along its inner dimension, to have work for the whole card, and then
sums in another order: a token that is decoded with seven others would differ in its last bits from the same token in a
learner's batch. Each shape of a product is tried once on the device at hand, over a grid of row counts; where few rows
differ from many, they are padded to as many as no longer do. Nothing is assumed about a library's version.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.overrides import TorchFunctionMode

HALF = (torch.float16, torch.bfloat16)
ROWS = (1, 2, 3, 4, 8, 16, 24, 32, 48, 64, 96, 128, 192, 256, 320, 384, 448, 512, 640, 768, 1024, 2048, 4096)
MANY = 8192
MANY_ELEMENTS = 1 << 28  # of the result: of a wide product fewer rows count as many
MOST = 512  # rows that few are padded to: more would cost more than it is worth

Product = Callable[[Tensor], Tensor]
_LEAST: dict[tuple[Any, ...], int] = {}


class SteadyProducts(TorchFunctionMode):
    """Within it `F.linear` of half-precision rows on a GPU is steady."""

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if func is F.linear and _applies(args[0], args[1]):
            bias = args[2] if len(args) > 2 else kwargs.get("bias")
            return steady(args[0], args[1], lambda rows: F.linear(rows, args[1], bias), "linear", bias is not None)
        return func(*args, **kwargs)


def _applies(x: Any, weight: Any) -> bool:
    plain = type(x) is Tensor and type(weight) in (Tensor, torch.nn.Parameter)
    return plain and x.is_cuda and x.dtype in HALF and weight.dtype == x.dtype


def steady(x: Tensor, weight: Tensor, product: Product, *kind: object) -> Tensor:
    """`product` of x (..., K) with a weight (N, K); `kind` tells it from others with weights of that shape. Each row
    has the bits that it has among many rows."""
    key = (tuple(weight.shape), weight.dtype, str(weight.device), *kind)
    if key not in _LEAST:
        if torch.cuda.is_current_stream_capturing():
            raise RuntimeError(f"a product with a weight of {tuple(weight.shape)} was not tried before the capture")
        _LEAST[key] = _least_rows(weight, product)
    count = x.numel() // x.shape[-1]
    if count >= _LEAST[key]:
        return product(x)
    rows = F.pad(x.reshape(count, x.shape[-1]), (0, 0, 0, _LEAST[key] - count))
    out = product(rows)[:count]
    return out.reshape(*x.shape[:-1], out.shape[-1])


@torch.no_grad()
def _least_rows(weight: Tensor, product: Product) -> int:
    """From how many rows on each row has the bits that it has among many."""
    width, inner = weight.shape
    count = max(1024, min(MANY, MANY_ELEMENTS // width))
    generator = torch.Generator(weight.device).manual_seed(0)
    x = torch.randn(count, inner, generator=generator, device=weight.device).to(weight.dtype)
    many = product(x)
    differ = [rows for rows in ROWS if rows <= count and not torch.equal(product(x[:rows]), many[:rows])]
    least = next((rows for rows in ROWS if rows > differ[-1]), count) if differ else 1
    if least <= MOST:
        return least
    warnings.warn(
        f"rows of a product of {inner} by {width} change with their number, up to {differ[-1]} rows, on this device: "
        "log-probs of few rows are not those of many to the bit", stacklevel=2,
    )  # fmt: skip
    return 1
