"""Matrix products for shapes where a library gives few rows other bits than many (products.py).

`fixed_order_product`: the order of its sums depends only on the shape of the weight, so a row has the same bits
whatever rows are computed with it. `few_rows_product`: for few rows, sums over the inner dimension from beginning to
end, which is the order of most libraries where they do not split it; it takes the time of reading the weight.

A weight with few columns, such as an adapter's, would leave most of a GPU idle: its inner dimension is split into
segments of equal length, each summed by its own program, and the segments are added in order.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import cache
from typing import NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from plaudit.algo.tokens.early_launch import after_previous, early

ROWS, COLUMNS, INNER = 32, 64, 64
NARROW = 128  # columns up to which the inner dimension is split
SEGMENT = 512
FEW = 64  # rows up to which a product is bound by reading its weight
SOME = 128  # rows up to which this is faster than a library padded to equal bits
WIDE = 4608  # columns from which the narrowest strips are more than a large GPU runs at once
RESERVED = 4096  # maximum bytes of shared memory that a program uses besides its tiles


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
    x, w0, w1, w2, b0, b1, b2, y0, y1, y2, n0, n1, n2, rows, inner, GATED: tl.constexpr,
    BIAS: tl.constexpr, ROWS: tl.constexpr, COLUMNS: tl.constexpr, INNER: tl.constexpr, EVEN: tl.constexpr,
    EARLY: tl.constexpr,
):  # fmt: skip
    strip = tl.program_id(0)
    weight, bias, y, columns = w0, b0, y0, n0
    if strip >= tl.cdiv(n0, COLUMNS):
        strip -= tl.cdiv(n0, COLUMNS)
        weight, bias, y, columns = w1, b1, y1, n1
        if strip >= tl.cdiv(n1, COLUMNS):
            strip -= tl.cdiv(n1, COLUMNS)
            weight, bias, y, columns = w2, b2, y2, n2
    row = tl.program_id(1) * ROWS + tl.arange(0, ROWS)
    column = strip * COLUMNS + tl.arange(0, COLUMNS)
    live, there = row < rows, column < columns
    after_previous(EARLY)
    k = tl.arange(0, INNER)
    a_at = x + row[:, None] * inner + k[None, :]
    place = column.to(tl.int64)[None, :] * inner + k[:, None]
    total = tl.zeros([ROWS, COLUMNS], dtype=tl.float32)
    other = tl.zeros([ROWS, COLUMNS], dtype=tl.float32)
    for first in range(0, inner, INNER):
        within = live[:, None] if EVEN else live[:, None] & (first + k < inner)[None, :]
        reached = there[None, :] if EVEN else there[None, :] & (first + k < inner)[:, None]
        a = tl.load(a_at, mask=within, other=0.0)
        total = tl.dot(a, tl.load(weight + place, mask=reached, other=0.0), total, input_precision="ieee")
        if GATED:
            other = tl.dot(a, tl.load(w1 + place, mask=reached, other=0.0), other, input_precision="ieee")
        a_at += INNER
        place += INNER
    dtype = y.dtype.element_ty
    if BIAS:
        total += tl.load(bias + column, mask=there, other=0.0).to(tl.float32)[None, :]
    out = total.to(dtype)
    if GATED:  # rounded where a separate kernel for the gate rounds
        wide = out.to(tl.float32)
        out = (wide / (1.0 + tl.exp(-wide))).to(dtype) * other.to(dtype)
    at = y + row[:, None].to(tl.int64) * columns + column[None, :]
    tl.store(at, out, mask=live[:, None] & there[None, :])


def few_rows_product(x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
    """x (at most SOME rows, inner) times weight (columns, inner), plus the bias, in half precision."""
    return few_rows_products(x, [weight], None if bias is None else [bias])[0]


def few_rows_products(x: Tensor, weights: Sequence[Tensor], biases: Sequence[Tensor] | None) -> list[Tensor]:
    """The same with up to three weights, in one launch. Programs read narrow strips of the weights in long pieces, so
    that the whole GPU reads at once."""
    outs = [torch.empty(x.shape[0], weight.shape[0], dtype=x.dtype, device=x.device) for weight in weights]
    _launch(x, weights, biases, outs, gated=False)
    return outs


def few_rows_gated(x: Tensor, gate: Tensor, up: Tensor) -> Tensor:
    """silu(x times gate) * (x times up), with the bits of two products and a gate, in one launch."""
    out = torch.empty(x.shape[0], gate.shape[0], dtype=x.dtype, device=x.device)
    _launch(x, [gate, up], None, [out], gated=True)
    return out


class Tiles(NamedTuple):
    """The columns of a strip, and the rows and inner elements that a program processes at a time."""

    strip: int
    height: int
    piece: int
    warps: int
    stages: int


def tiles_for(rows: int, columns: int, gated: bool, shared: int) -> Tiles:
    """About the fastest tiles of those measured on an H200 (benchmarks/few_rows_gpu.py) that fit in shared memory."""
    height = 16 if rows <= 16 else FEW
    narrow = columns * triton.cdiv(rows, height) <= WIDE
    strip = 64 if gated else (16 if narrow else 32) if height == 16 else (32 if narrow else 64)
    piece = 128 if strip == 64 else 256
    stages = max(2, min(6, shared // ((height + strip * (1 + gated)) * piece * 2)))
    return Tiles(strip, height, piece, 2 if height == 16 and not gated else 4, stages)


@cache
def _shared(device: torch.device) -> int:
    """Maximum bytes of shared memory of a program; on a CPU the value of every GPU since Ampere."""
    if device.type != "cuda":
        return 96 * 1024
    most: int = torch.cuda.get_device_properties(device).shared_memory_per_block_optin  # type: ignore[attr-defined]
    return most - RESERVED


def _launch(
    x: Tensor, weights: Sequence[Tensor], biases: Sequence[Tensor] | None, outs: Sequence[Tensor], gated: bool,
    tiles: Tiles | None = None,
) -> None:  # fmt: skip
    rows, inner = x.shape
    tiles = tiles or tiles_for(rows, sum(out.shape[1] for out in outs), gated, _shared(x.device))

    def three(tensors: Sequence[Tensor]) -> list[Tensor]:
        return [*tensors, *[tensors[0]] * (3 - len(tensors))]

    strips = sum(triton.cdiv(out.shape[1], tiles.strip) for out in outs)
    _few_rows[(strips, triton.cdiv(rows, tiles.height))](
        x.contiguous(), *three([weight.contiguous() for weight in weights]), *three(biases or [x]), *three(outs),
        *[out.shape[1] for out in three(outs)], rows, inner, GATED=gated, BIAS=biases is not None,
        ROWS=tiles.height, COLUMNS=tiles.strip, INNER=tiles.piece, EVEN=inner % tiles.piece == 0, num_warps=tiles.warps,
        num_stages=tiles.stages, **early(x),
    )  # fmt: skip
