"""A product whose sums have one order, which the shape of the weight alone decides: a row has the same bits whatever
rows lie beside it. For shapes of which a library gives few rows other bits than many (products.py).

A weight with few columns, as an adapter's, would leave most of a GPU idle: its inner dimension is cut into segments of
one length, each summed by a program of its own, and the segments are added up in order.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

ROWS, COLUMNS, INNER = 32, 64, 64
NARROW = 128  # columns up to which the inner dimension is cut
SEGMENT = 512


@triton.jit
def _products(
    x, weight, parts, rows, columns, inner, SEGMENT: tl.constexpr, ROWS: tl.constexpr, COLUMNS: tl.constexpr,
    INNER: tl.constexpr,
):  # fmt: skip
    row = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
    column = tl.program_id(1) * COLUMNS + tl.arange(0, COLUMNS)
    segment = tl.program_id(2)
    live, there = row < rows, column < columns
    total = tl.zeros([ROWS, COLUMNS], dtype=tl.float32)
    for first in range(segment * SEGMENT, tl.minimum(inner, (segment + 1) * SEGMENT), INNER):
        k = first + tl.arange(0, INNER)
        a_at = x + row.to(tl.int64)[:, None] * inner + k[None, :]
        b_at = weight + column.to(tl.int64)[None, :] * inner + k[:, None]
        a = tl.load(a_at, mask=live[:, None] & (k < inner)[None, :], other=0.0)
        b = tl.load(b_at, mask=there[None, :] & (k < inner)[:, None], other=0.0)
        total = tl.dot(a, b, total, input_precision="ieee")
    at = parts + (segment * rows + row).to(tl.int64)[:, None] * columns + column[None, :]
    tl.store(at, total, mask=live[:, None] & there[None, :])


@triton.jit
def _joined(parts, bias, y, count, columns, segments, BIAS: tl.constexpr, BLOCK: tl.constexpr):
    at = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    inside = at < count
    total = tl.zeros([BLOCK], dtype=tl.float32)
    for segment in range(segments):
        total += tl.load(parts + segment * count + at, mask=inside, other=0.0)
    if BIAS:
        total += tl.load(bias + at % columns, mask=inside, other=0.0).to(tl.float32)
    tl.store(y + at, total.to(y.dtype.element_ty), mask=inside)


def fixed_order_product(x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
    """x (rows, inner) times weight (columns, inner), plus the bias."""
    (rows, inner), columns = x.shape, weight.shape[0]
    x, weight = x.contiguous(), weight.contiguous()
    length = SEGMENT if columns <= NARROW else triton.cdiv(inner, INNER) * INNER
    segments = triton.cdiv(inner, length)
    width = min(COLUMNS, max(16, triton.next_power_of_2(columns)))
    parts = torch.empty(segments, rows, columns, dtype=torch.float32, device=x.device)
    _products[(triton.cdiv(rows, ROWS), triton.cdiv(columns, width), segments)](
        x, weight, parts, rows, columns, inner, SEGMENT=length, ROWS=ROWS, COLUMNS=width, INNER=INNER, num_warps=4,
        num_stages=4,
    )  # fmt: skip
    y = torch.empty(rows, columns, dtype=x.dtype, device=x.device)
    _joined[(triton.cdiv(y.numel(), 1024),)](
        parts, bias, y, y.numel(), columns, segments, BIAS=bias is not None, BLOCK=1024, num_warps=4
    )
    return y
