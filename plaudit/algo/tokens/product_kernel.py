"""A product that never splits its inner dimension: a row's sums run over it in order, whatever rows lie beside it. For
shapes of which a library gives few rows other bits than many (products.py)."""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

ROWS, COLUMNS, INNER = 32, 64, 64


@triton.jit
def _unsplit(
    x, weight, bias, y, rows, columns, inner, BIAS: tl.constexpr, EVEN: tl.constexpr, ROWS: tl.constexpr,
    COLUMNS: tl.constexpr, INNER: tl.constexpr,
):  # fmt: skip
    row = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
    column = tl.program_id(1) * COLUMNS + tl.arange(0, COLUMNS)
    k = tl.arange(0, INNER)
    live, there = row < rows, column < columns
    x_at = x + row.to(tl.int64)[:, None] * inner + k[None, :]
    w_at = weight + column.to(tl.int64)[None, :] * inner + k[:, None]
    total = tl.zeros([ROWS, COLUMNS], dtype=tl.float32)
    for first in range(0, inner, INNER):
        if EVEN:
            a = tl.load(x_at, mask=live[:, None], other=0.0)
            b = tl.load(w_at, mask=there[None, :], other=0.0)
        else:
            a = tl.load(x_at, mask=live[:, None] & (first + k < inner)[None, :], other=0.0)
            b = tl.load(w_at, mask=there[None, :] & (first + k < inner)[:, None], other=0.0)
        total = tl.dot(a, b, total, input_precision="ieee")
        x_at += INNER
        w_at += INNER
    if BIAS:
        total += tl.load(bias + column, mask=there, other=0.0).to(tl.float32)[None, :]
    at = y + row.to(tl.int64)[:, None] * columns + column[None, :]
    tl.store(at, total.to(y.dtype.element_ty), mask=live[:, None] & there[None, :])


def unsplit_product(x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
    """x (rows, inner) times weight (columns, inner), plus the bias."""
    (rows, inner), columns = x.shape, weight.shape[0]
    x, weight = x.contiguous(), weight.contiguous()
    y = torch.empty(rows, columns, dtype=x.dtype, device=x.device)
    width = min(COLUMNS, max(16, triton.next_power_of_2(columns)))
    _unsplit[(triton.cdiv(rows, ROWS), triton.cdiv(columns, width))](
        x, weight, bias, y, rows, columns, inner, BIAS=bias is not None, EVEN=inner % INNER == 0, ROWS=ROWS,
        COLUMNS=width, INNER=INNER, num_warps=4, num_stages=4,
    )  # fmt: skip
    return y
