"""Products of a mixture's experts: each row with the weights of the experts that its router chose.

A pair is a token with one of its experts; pair `t * k + j` is token `t` with its choice `j`. `Routes` sorts the pairs
by expert, an expert's pairs in the order of the tokens, and splits them into blocks of one expert each. A product
processes one block of pairs at a time, sums over the inner dimension in order and never splits it, so that a pair has
the same bits in any batch (docs/proof.md).
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
import triton
import triton.language as tl
from torch import Tensor

from plaudit.algo.tokens.early_launch import after_previous, early

CHUNKS = (2048, 8192)  # pairs sorted together, for few and for many pairs


@dataclass(frozen=True)
class Tiles:
    """The tile sizes of a program: rows, columns and inner dimension."""

    rows: int
    columns: int
    inner: int
    warps: int
    stages: int


FEW = Tiles(16, 64, 128, 4, 4)  # up to 16 pairs per expert: the weights are read once, which limits the speed
SOME = Tiles(64, 128, 64, 4, 4)
MANY = Tiles(128, 256, 64, 8, 3)


@dataclass(frozen=True)
class Routes:
    """The pairs of tokens and experts, sorted by expert."""

    order: Tensor  # (pairs,): the pair at each position of the sorted order
    ends: Tensor  # (experts,): the position after an expert's last pair
    blocks: Tensor  # (3, blocks): expert, first position, position after the expert's last pair; some are empty
    choices: int  # experts per token
    tiles: Tiles
    partial: bool = False  # some pairs have an expert of another rank


@triton.jit
def _routes(ids, order, ends, blocks, pairs, most, ROWS: tl.constexpr, CHUNK: tl.constexpr, EARLY: tl.constexpr):
    after_previous(EARLY)
    expert = tl.program_id(0)
    at = tl.arange(0, CHUNK)
    lower = tl.zeros([CHUNK], dtype=tl.int32)
    equal = tl.zeros([CHUNK], dtype=tl.int32)
    for first in range(0, pairs, CHUNK):
        inside = first + at < pairs
        chosen = tl.load(ids + first + at, mask=inside, other=0)
        lower += (inside & (chosen < expert)).to(tl.int32)
        equal += (inside & (chosen == expert)).to(tl.int32)
    start = tl.sum(lower, axis=0)
    end = start + tl.sum(equal, axis=0)
    place = start
    for first in range(0, pairs, CHUNK):
        inside = first + at < pairs
        mine = (inside & (tl.load(ids + first + at, mask=inside, other=0) == expert)).to(tl.int32)
        tl.store(order + place + tl.cumsum(mine, axis=0) - mine, first + at, mask=mine != 0)
        place += tl.sum(mine, axis=0)
    tl.store(ends + expert, end)
    # Each expert has its own blocks: at most one more than its pairs fill.
    block = start // ROWS + expert
    behind = end // ROWS + expert + 1
    while block < behind:
        tl.store(blocks + block, expert)
        tl.store(blocks + most + block, start)
        tl.store(blocks + 2 * most + block, end)
        start += ROWS
        block += 1


def routes(ids: Tensor, experts: int, partial: bool = False) -> Routes:
    """The Routes of the experts (tokens, choices) that a router chose. `partial`: the id `experts` stands for an expert
    of another rank."""
    ids = ids.contiguous()
    pairs = ids.numel()
    share = pairs / experts
    tiles = FEW if share <= 16 else SOME if share <= 96 else MANY
    most = pairs // tiles.rows + experts
    # Without some pairs not all of the blocks are written.
    made = torch.zeros if partial else torch.empty
    order, ends, blocks = (
        made(*shape, dtype=torch.int32, device=ids.device) for shape in ((pairs,), (experts,), (3, most))
    )
    chunk = CHUNKS[tiles is MANY]
    _routes[(experts,)](
        ids, order, ends, blocks, pairs, most, ROWS=tiles.rows, CHUNK=chunk, num_warps=chunk // 256, **early(ids)
    )
    return Routes(order, ends, blocks, ids.shape[-1], tiles, partial)


@triton.jit
def _product(
    x, weight, bias, y, order, blocks, most, columns, inner, x_row, w_expert, w_column, w_inner, per,
    TILES: tl.constexpr, GATED: tl.constexpr, BIAS: tl.constexpr, TO_PAIRS: tl.constexpr, EVEN: tl.constexpr,
    ROWS: tl.constexpr, COLUMNS: tl.constexpr, INNER: tl.constexpr, EARLY: tl.constexpr,
):  # fmt: skip
    after_previous(EARLY)
    program = tl.program_id(0)
    block = program // TILES
    start = tl.load(blocks + most + block)
    end = tl.load(blocks + 2 * most + block)
    if start < end:
        expert = tl.load(blocks + block).to(tl.int64)
        place = start + tl.arange(0, ROWS)
        live = place < end
        pair = tl.load(order + place, mask=live, other=0)
        row = place
        if per > 0:
            row = pair // per
        column = (program % TILES) * COLUMNS + tl.arange(0, COLUMNS)
        there = column < columns
        k = tl.arange(0, INNER)
        x_at = x + row.to(tl.int64)[:, None] * x_row + k[None, :]
        w_at = weight + expert * w_expert + column[None, :] * w_column + k[:, None] * w_inner
        total = tl.zeros([ROWS, COLUMNS], dtype=tl.float32)
        other = tl.zeros([ROWS, COLUMNS], dtype=tl.float32)
        for first in range(0, inner, INNER):
            if EVEN:
                a = tl.load(x_at, mask=live[:, None], other=0.0)
                b = tl.load(w_at, mask=there[None, :], other=0.0)
            else:
                a = tl.load(x_at, mask=live[:, None] & (first + k < inner)[None, :], other=0.0)
                b = tl.load(w_at, mask=there[None, :] & (first + k < inner)[:, None], other=0.0)
            total = tl.dot(a, b, total, input_precision="ieee")
            if GATED:  # rows of the second half of the weight pair with those of the first
                if EVEN:
                    c = tl.load(w_at + columns * w_column, mask=there[None, :], other=0.0)
                else:
                    c = tl.load(
                        w_at + columns * w_column, mask=there[None, :] & (first + k < inner)[:, None], other=0.0
                    )
                other = tl.dot(a, c, other, input_precision="ieee")
            x_at += INNER
            w_at += INNER * w_inner
        dtype = y.dtype.element_ty
        out = total.to(dtype)
        if BIAS:
            added = tl.load(bias + expert * columns + column, mask=there, other=0.0).to(tl.float32)
            out = (out.to(tl.float32) + added[None, :]).to(dtype)
        if GATED:  # rounded where `silu_mul` rounds
            wide = out.to(tl.float32)
            out = (wide / (1.0 + tl.exp(-wide))).to(dtype) * other.to(dtype)
        if TO_PAIRS:
            place = pair
        y_at = y + place.to(tl.int64)[:, None] * columns + column[None, :]
        tl.store(y_at, out, mask=live[:, None] & there[None, :])


def expert_product(
    x: Tensor, weight: Tensor, bias: Tensor | None, routes: Routes, per: int = 0, to_pairs: bool = False,
    gated: bool = False,
) -> Tensor:  # fmt: skip
    """One row per pair: its row of x times its expert's weight (experts, columns, inner), plus its bias.

    per       0: x has one row per place; else the pair's row is `pair // per`: 1 for one row per pair, the number of
              choices for one row per token
    to_pairs  results are ordered by pair, not by place
    gated     the weight has the columns of a gate and then as many others: silu(gate) * others
    """
    pairs, inner = routes.order.numel(), weight.shape[2]
    columns = weight.shape[1] // 2 if gated else weight.shape[1]
    x = x.contiguous()
    made = torch.zeros if to_pairs and routes.partial else torch.empty
    y = made(pairs, columns, dtype=x.dtype, device=x.device)
    tiles, most = routes.tiles, routes.blocks.shape[1]
    most_columns = tiles.columns // 2 if gated and tiles is MANY else tiles.columns
    width = min(most_columns, max(16, triton.next_power_of_2(columns)))
    depth = min(tiles.inner // (2 if x.element_size() == 4 else 1), max(16, triton.next_power_of_2(inner)))
    across = triton.cdiv(columns, width)
    _product[(most * across,)](
        x, weight, bias, y, routes.order, routes.blocks, most, columns, inner, x.stride(0), *weight.stride(), per,
        TILES=across, GATED=gated, BIAS=bias is not None, TO_PAIRS=to_pairs, EVEN=inner % depth == 0,
        ROWS=tiles.rows, COLUMNS=width, INNER=depth, num_warps=tiles.warps, num_stages=tiles.stages,
        **early(x),
    )  # fmt: skip
    return y


@triton.jit
def _weight_gradient(
    x, grad, out, order, ends, columns, inner, x_row, per, grad_per, COLUMNS: tl.constexpr, INNER: tl.constexpr,
    ROWS: tl.constexpr,
):  # fmt: skip
    expert = tl.program_id(0)
    column = tl.program_id(1) * COLUMNS + tl.arange(0, COLUMNS)
    k = tl.program_id(2) * INNER + tl.arange(0, INNER)
    start = tl.load(ends + expert - 1, mask=expert > 0, other=0)
    end = tl.load(ends + expert)
    total = tl.zeros([COLUMNS, INNER], dtype=tl.float32)
    for first in range(start, end, ROWS):
        place = first + tl.arange(0, ROWS)
        live = place < end
        pair = tl.load(order + place, mask=live, other=0)
        row, grad_row = place, place
        if per > 0:
            row = pair // per
        if grad_per > 0:
            grad_row = pair // grad_per
        a = tl.load(
            grad + grad_row.to(tl.int64)[None, :] * columns + column[:, None],
            mask=live[None, :] & (column < columns)[:, None], other=0.0,
        )  # fmt: skip
        b = tl.load(
            x + row.to(tl.int64)[:, None] * x_row + k[None, :], mask=live[:, None] & (k < inner)[None, :], other=0.0
        )
        total = tl.dot(a, b, total, input_precision="ieee")
    at = out + expert.to(tl.int64) * columns * inner + column.to(tl.int64)[:, None] * inner + k[None, :]
    tl.store(at, total.to(out.dtype.element_ty), mask=(column < columns)[:, None] & (k < inner)[None, :])


def weight_gradient(x: Tensor, grad: Tensor, routes: Routes, per: int, grad_per: int) -> Tensor:
    """The gradient of the weights (experts, columns, inner), from the rows and the gradients of their product's
    results. Rows are summed in the order of their places."""
    x, grad = x.contiguous(), grad.contiguous()
    experts, columns, inner = routes.ends.numel(), grad.shape[1], x.shape[1]
    out = torch.empty(experts, columns, inner, dtype=x.dtype, device=x.device)
    wide = 128 if x.element_size() == 2 else 64
    _weight_gradient[(experts, triton.cdiv(columns, wide), triton.cdiv(inner, wide))](
        x, grad, out, routes.order, routes.ends, columns, inner, x.stride(0), per, grad_per, COLUMNS=wide, INNER=wide,
        ROWS=32, num_warps=8, num_stages=3,
    )  # fmt: skip
    return out


@triton.jit
def _combined(
    y, weights, out, columns, CHOICES: tl.constexpr, WEIGHTED: tl.constexpr, ROUND: tl.constexpr, BLOCK: tl.constexpr,
    EARLY: tl.constexpr,
):  # fmt: skip
    after_previous(EARLY)
    token = tl.program_id(0).to(tl.int64)
    at = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    inside = at < columns
    total = tl.zeros([BLOCK], dtype=tl.float32)
    for choice in range(CHOICES):
        pair = token * CHOICES + choice
        value = tl.load(y + pair * columns + at, mask=inside, other=0.0)
        if WEIGHTED:
            wide = value.to(tl.float32) * tl.load(weights + pair).to(tl.float32)
            if ROUND:  # as torch rounds a product of two tensors of one type
                wide = wide.to(value.dtype).to(tl.float32)
            total += wide
        else:
            total += value.to(tl.float32)
    tl.store(out + token * columns + at, total.to(out.dtype.element_ty), mask=inside)


def combined(y: Tensor, weights: Tensor | None, choices: int) -> Tensor:
    """The results of each token's experts (by pair), summed in the order of the choices, each times its weight
    (tokens, choices) if there are weights."""
    tokens, columns = y.shape[0] // choices, y.shape[1]
    out = torch.empty(tokens, columns, dtype=y.dtype, device=y.device)
    block = min(1024, triton.next_power_of_2(columns))
    _combined[(tokens, triton.cdiv(columns, block))](
        y, y if weights is None else weights.contiguous(), out, columns, CHOICES=choices, WEIGHTED=weights is not None,
        ROUND=weights is not None and weights.dtype == y.dtype, BLOCK=block, num_warps=4, **early(y),
    )  # fmt: skip
    return out


@triton.jit
def _softmax_top(
    logits, values, ids, experts, CHOICES: tl.constexpr, NORMED: tl.constexpr, BLOCK: tl.constexpr,
    PADDED: tl.constexpr, EARLY: tl.constexpr,
):  # fmt: skip
    after_previous(EARLY)
    token = tl.program_id(0).to(tl.int64)
    at = tl.arange(0, BLOCK)
    inside = at < experts
    logit = tl.load(logits + token * experts + at, mask=inside, other=-float("inf")).to(tl.float32)
    left = tl.exp(logit - tl.max(logit, axis=0))
    left = left / tl.sum(left, axis=0)
    left = tl.where(inside, left, -1.0)
    choice = tl.arange(0, PADDED)
    best = tl.zeros([PADDED], dtype=tl.float32)
    for number in range(CHOICES):
        highest = tl.max(left, axis=0)
        taken = tl.min(tl.where(left == highest, at, BLOCK), axis=0)  # the first of equal values
        best = tl.where(choice == number, highest, best)
        tl.store(ids + token * CHOICES + number, taken.to(tl.int64))
        left = tl.where(at == taken, -1.0, left)
    if NORMED:
        best = best / tl.sum(best, axis=0)
    tl.store(values + token * CHOICES + choice, best.to(values.dtype.element_ty), mask=choice < CHOICES)


def softmax_top(logits: Tensor, choices: int, normed: bool, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    """The most likely experts of each token, ties to the first, and their probabilities; `normed`: normalized to sum
    to 1."""
    tokens, experts = logits.shape
    values = torch.empty(tokens, choices, dtype=dtype, device=logits.device)
    ids = torch.empty(tokens, choices, dtype=torch.int64, device=logits.device)
    _softmax_top[(tokens,)](
        logits.contiguous(), values, ids, experts, CHOICES=choices, NORMED=normed,
        BLOCK=triton.next_power_of_2(experts), PADDED=triton.next_power_of_2(choices), num_warps=1,
        **early(logits),
    )  # fmt: skip
    return values, ids
