"""Products whose rows do not depend on how many rows there are.

For few rows a library may take another kernel, or split the inner dimension to have work for a whole GPU, and then it
sums in another order: a token that is decoded with seven others would differ in its last bits from the same token in a
learner's batch. Each shape of a product is tried once on the device at hand, over a grid of row counts; where few rows
differ from many, they are padded to as many as no longer do. Nothing is assumed about a library's version.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterable, Sequence
from functools import cache
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode

HALF = (torch.float16, torch.bfloat16)
ROWS = (1, 2, 3, 4, 8, 16, 24, 32, 48, 64, 96, 128, 192, 256, 320, 384, 448, 512, 640, 768, 1024, 2048, 4096)
MANY = 8192
MANY_ELEMENTS = 1 << 28  # of the result: of a wide product fewer rows count as many
MOST = 512  # rows that few are padded to: more would cost more than it is worth
CPU_ROWS = (*range(1, 34), 48, 63, 64, 65, 100, 128, 200, 256)
CPU_MANY, CPU_MOST = 512, 24
CPU_WIDTH = 1024  # columns that are tried: a sum does not depend on how many there are beyond

Product = Callable[[Tensor], Tensor]
_LEAST: dict[tuple[Any, ...], int] = {}


class SteadyProducts(TorchFunctionMode):
    """Within it `F.linear` is steady: of half-precision rows on a GPU, and of float32 rows on a CPU."""

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if func is F.linear and _applies(args[0], args[1]):
            bias = args[2] if len(args) > 2 else kwargs.get("bias")
            return steady_linear(args[0], args[1], bias)
        return func(*args, **kwargs)


def needs_steadying(rows: int, device: torch.device) -> bool:
    """Whether products of so many rows may be another kernel's."""
    return device.type == "cuda" or rows < CPU_MOST


def _applies(x: Any, weight: Any) -> bool:
    plain = type(x) is Tensor and type(weight) in (Tensor, torch.nn.Parameter)
    return plain and x.dtype in (HALF if x.is_cuda else (torch.float32,)) and weight.dtype == x.dtype


def steady_linear(x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
    return steady(x, weight, lambda rows: F.linear(rows, weight, bias), "linear", bias is not None)


def steady(x: Tensor, weight: Tensor, product: Product, *kind: object) -> Tensor:
    """`product` of x (..., K) with a weight (N, K); `kind` tells it from others with weights of that shape. Each row
    has the bits that it has among many rows."""
    count = x.numel() // x.shape[-1]
    if not needs_steadying(count, x.device):
        return product(x)
    key = (weight.shape, weight.dtype, weight.device, *kind)
    if key not in _LEAST:
        if x.is_cuda and torch.cuda.is_current_stream_capturing():
            raise RuntimeError(f"a product with a weight of {tuple(weight.shape)} was not tried before the capture")
        _LEAST[key] = _least_rows(weight, product) if x.is_cuda else _least_rows_cpu(weight.shape, True in kind)
    if count >= _LEAST[key]:
        return product(x)
    rows = F.pad(x.reshape(count, x.shape[-1]), (0, 0, 0, _LEAST[key] - count))
    out = product(rows)[:count]
    return out.reshape(*x.shape[:-1], out.shape[-1])


def least_rows(parts: Iterable[nn.Module]) -> int:
    """From how many rows on those of all products among these parts have the bits of many; on a CPU, in float32."""
    shapes = {(part.weight.shape, part.bias is not None) for part in parts if isinstance(part, nn.Linear)}
    return max((_least_rows_cpu(shape, bias) for shape, bias in shapes), default=1)


def _least_rows(weight: Tensor, product: Product) -> int:
    """From how many rows on each row has the bits that it has among many; 1 where that would be too many."""
    width, inner = weight.shape
    last = _last_that_differs(weight, product, ROWS, max(1024, min(MANY, MANY_ELEMENTS // width)))
    least = next((rows for rows in ROWS if rows > last), MANY)
    if least <= MOST:
        return least
    warnings.warn(
        f"rows of a product of {inner} by {width} change with their number, up to {last} rows, on this device: "
        "log-probs of few rows are not those of many to the bit", stacklevel=2,
    )  # fmt: skip
    return 1


@cache
def _least_rows_cpu(shape: tuple[int, int], bias: bool) -> int:
    """The same with random weights: a bias or an adapter's matrix of zeros would prove nothing. Without a warning: a
    run's own comparison says which bits a CPU's library gives."""
    width, inner = min(CPU_WIDTH, shape[0]), shape[1]
    drawn = torch.randn(inner + 1, width, generator=torch.Generator().manual_seed(1))
    like, added = drawn[:inner].T.contiguous(), drawn[inner] if bias else None
    last = _last_that_differs(like, lambda rows: F.linear(rows, like, added), CPU_ROWS, CPU_MANY)
    return last + 1 if last < CPU_MOST else 1


@torch.no_grad()
def _last_that_differs(weight: Tensor, product: Product, grid: Sequence[int], count: int) -> int:
    """The last number of rows whose bits are not those that they have among `count`; 0 if there is none."""
    generator = torch.Generator(weight.device).manual_seed(0)
    x = torch.randn(count, weight.shape[1], generator=generator, device=weight.device).to(weight.dtype)
    many = product(x)
    return max((n for n in grid if n <= count and not torch.equal(product(x[:n]), many[:n])), default=0)
