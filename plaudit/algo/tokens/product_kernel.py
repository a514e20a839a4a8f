"""Products for shapes of which a library gives few rows other bits than many (products.py).

`fixed_order_product`: its sums have one order, which the shape of the weight alone decides, so a row has the same bits
whatever rows lie beside it. `few_rows_product`: for few rows, by sums over the inner dimension from beginning to end,
which is the order of most libraries where they do not split it; it costs what reading the weight does.

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
FEW = 64  # rows of a product that is bound by reading its weight
PROGRAMS = 128  # about as many as a large GPU has multiprocessors
SHARED = 96 * 1024  # bytes of shared memory that every GPU since Ampere gives a program


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


@triton.jit(do_not_specialize=["rows"])
def _few_rows(
    x, weight, bias, y, rows, columns, inner, BIAS: tl.constexpr, ROWS: tl.constexpr, COLUMNS: tl.constexpr,
    INNER: tl.constexpr,
):  # fmt: skip
    row, column = tl.arange(0, ROWS), tl.program_id(0) * COLUMNS + tl.arange(0, COLUMNS)
    live, there = row < rows, column < columns
    total = tl.zeros([ROWS, COLUMNS], dtype=tl.float32)
    for first in range(0, inner, INNER):
        k = first + tl.arange(0, INNER)
        a_at = x + row[:, None] * inner + k[None, :]
        b_at = weight + column.to(tl.int64)[None, :] * inner + k[:, None]
        a = tl.load(a_at, mask=live[:, None] & (k < inner)[None, :], other=0.0)
        b = tl.load(b_at, mask=there[None, :] & (k < inner)[:, None], other=0.0)
        total = tl.dot(a, b, total, input_precision="ieee")
    if BIAS:
        total += tl.load(bias + column, mask=there, other=0.0).to(tl.float32)[None, :]
    at = y + row[:, None].to(tl.int64) * columns + column[None, :]
    tl.store(at, total.to(y.dtype.element_ty), mask=live[:, None] & there[None, :])


def few_rows_product(x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
    """x (at most FEW rows, inner) times weight (columns, inner), plus the bias, in half precision. Narrow strips of the
    weight, each read in long pieces: so all of a GPU reads at once."""
    (rows, inner), columns = x.shape, weight.shape[0]
    strip = min(64, max(16, triton.next_power_of_2(triton.cdiv(columns, PROGRAMS))))
    height = 16 if rows <= 16 else FEW
    piece = 128 if height + strip > 48 else 256
    stages = min(5, SHARED // ((height + strip) * piece * x.element_size()))
    y = torch.empty(rows, columns, dtype=x.dtype, device=x.device)
    _few_rows[(triton.cdiv(columns, strip),)](
        x.contiguous(), weight.contiguous(), bias, y, rows, columns, inner, BIAS=bias is not None, ROWS=height,
        COLUMNS=strip, INNER=piece, num_warps=2 if height == 16 else 4, num_stages=stages,
    )  # fmt: skip
    return y
