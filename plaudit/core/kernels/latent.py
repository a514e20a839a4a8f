"""Attention over latents (model/latent.py), and the products before and after it, with one matrix per head.

One kernel for prompts and decode steps: a program handles one query row, or TOKENS rows of a prompt, and HEADS of their
heads, and iterates over the sequence's latents in tiles of one size from position 0, in order. So a row has the same
bits in both, whatever else is in the batch. All heads read the same latents, whose first columns are the values: a tile
is loaded once for both products. A decode step over few rows is split into segments of at least SEGMENT latents.

Letters: T query rows, H heads, R width of a latent, P width of the rotated part after it.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch
import triton
import triton.language as tl
from torch import Tensor

from plaudit.algo.tokens.early_launch import early
from plaudit.core.kernels.attention import LOG2_E, SEGMENT, _join_splits

HEADS = 16  # per program: the fewest rows of a product
TOKENS = 4  # per program of a prompt, each with HEADS heads
ROWS, COLUMNS, INNER = 32, 64, 64  # per tile in heads_product


@triton.jit
def _heads_product(
    x, matrices, out, rows, inner, columns, x_row, x_head, by_head, by_inner, by_column, out_row, out_head,
    ROWS: tl.constexpr, COLUMNS: tl.constexpr, INNER: tl.constexpr,
):  # fmt: skip
    row = (tl.program_id(0) * ROWS + tl.arange(0, ROWS)).to(tl.int64)
    column = tl.program_id(1) * COLUMNS + tl.arange(0, COLUMNS)
    head = tl.program_id(2).to(tl.int64)
    live, there = row < rows, column < columns
    total = tl.zeros([ROWS, COLUMNS], dtype=tl.float32)
    for first in range(0, inner, INNER):
        k = first + tl.arange(0, INNER)
        a_at = x + row[:, None] * x_row + head * x_head + k[None, :]
        b_at = matrices + head * by_head + k[:, None] * by_inner + column[None, :] * by_column
        a = tl.load(a_at, mask=live[:, None] & (k < inner)[None, :], other=0.0)
        b = tl.load(b_at, mask=(k < inner)[:, None] & there[None, :], other=0.0)
        total = tl.dot(a, b, total, input_precision="ieee")
    at = out + row[:, None] * out_row + head * out_head + column[None, :]
    tl.store(at, total.to(out.dtype.element_ty), mask=live[:, None] & there[None, :])


def heads_product(x: Tensor, matrices: Tensor) -> Tensor:
    """x (T, H, I) by matrices (H, I, O) -> (T, H, O), summed in a fixed order."""
    rows, heads, inner = x.shape
    columns = matrices.shape[2]
    x = x if x.stride(-1) == 1 else x.contiguous()
    out = torch.empty(rows, heads, columns, dtype=x.dtype, device=x.device)
    _heads_product[(triton.cdiv(rows, ROWS), triton.cdiv(columns, COLUMNS), heads)](
        x, matrices, out, rows, inner, columns, x.stride(0), x.stride(1), *matrices.stride(), out.stride(0),
        out.stride(1), ROWS=ROWS, COLUMNS=COLUMNS, INNER=INNER, num_warps=4, num_stages=3,
    )  # fmt: skip
    return out


@triton.jit
def _latent_attention(
    query, latents, out, parts, peaks, sums, tables, starts, places, positions, tiles, scale_log2, count, query_row,
    query_head, latent_slot, table_row, H: tl.constexpr, HEADS: tl.constexpr, TOKENS: tl.constexpr, R: tl.constexpr,
    RP: tl.constexpr, P: tl.constexpr, PP: tl.constexpr, PAGED: tl.constexpr, SCATTERED: tl.constexpr,
    BLOCK_SIZE: tl.constexpr, TILE: tl.constexpr, SPLITS: tl.constexpr, SEGMENT: tl.constexpr, SUMS: tl.constexpr,
    EXACT: tl.constexpr,
):  # fmt: skip
    # The rows of the products are TOKENS query rows of one sequence by HEADS heads.
    at_m = tl.arange(0, TOKENS * HEADS)
    head = tl.program_id(1) * HEADS + at_m % HEADS
    first_row, last_row = tl.program_id(0).to(tl.int64), tl.program_id(0).to(tl.int64)
    if TOKENS > 1:
        first_row = tl.load(tiles + 2 * tl.program_id(0)).to(tl.int64)
        last_row = first_row + tl.load(tiles + 2 * tl.program_id(0) + 1) - 1
    row = first_row + at_m // HEADS
    live = (head < H) & (row <= last_row)
    lengths = tl.load(positions + row, mask=row <= last_row, other=0).to(tl.int32) + 1
    length = tl.load(positions + last_row).to(tl.int32) + 1
    split = tl.program_id(2)
    share = tl.maximum(tl.cdiv(tl.cdiv(length, SPLITS), TILE) * TILE, SEGMENT)
    begin = split * share
    end = tl.minimum(begin + share, length)
    start_row = first_row if PAGED else tl.load(starts + first_row).to(tl.int64)

    at_r, at_p = tl.arange(0, RP), tl.arange(0, PP)
    q_at = query + row[:, None] * query_row + head[:, None] * query_head
    q = tl.load(q_at + at_r[None, :], mask=live[:, None] & (at_r < R)[None, :], other=0.0)
    q_rotated = tl.load(q_at + R + at_p[None, :], mask=live[:, None] & (at_p < P)[None, :], other=0.0)
    peak = tl.full([TOKENS * HEADS], float("-inf"), tl.float32)
    # Exponentials are summed by a product with ones, whose order of sums does not depend on the number of rows.
    ones = tl.full([TILE, 16], 1.0, latents.dtype.element_ty)
    totals = tl.zeros([TOKENS * HEADS, 16], tl.float32)
    gathered = tl.zeros([TOKENS * HEADS, RP], tl.float32)
    for first in range(begin, end, TILE):
        position = first + tl.arange(0, TILE)
        inside = position < end
        if PAGED:  # a tile lies within one block
            block = tl.load(tables + first_row * table_row + first // BLOCK_SIZE).to(tl.int64)
            slot = block * BLOCK_SIZE + first % BLOCK_SIZE + tl.arange(0, TILE)
        else:
            slot = start_row + position
            if SCATTERED:
                slot = tl.load(places + slot, mask=inside, other=0)
        at = latents + slot[:, None] * latent_slot
        latent = tl.load(at + at_r[None, :], mask=inside[:, None] & (at_r < R)[None, :], other=0.0)
        rotated = tl.load(at + R + at_p[None, :], mask=inside[:, None] & (at_p < P)[None, :], other=0.0)
        if EXACT:
            score = tl.dot(q, tl.trans(latent), input_precision="ieee")
            score = tl.dot(q_rotated, tl.trans(rotated), score, input_precision="ieee")
        else:
            score = tl.dot(q, tl.trans(latent))
            score = tl.dot(q_rotated, tl.trans(rotated), score)
        seen = inside[None, :] & (position[None, :] < lengths[:, None])
        score = tl.where(seen, score * scale_log2, float("-inf"))
        higher = tl.maximum(peak, tl.max(score, axis=1))
        keep = tl.exp2(peak - higher)[:, None]
        chance = tl.exp2(score - higher[:, None])
        if EXACT:
            totals = totals * keep + tl.dot(chance, ones, input_precision="ieee")
            gathered = gathered * keep + tl.dot(chance, latent, input_precision="ieee")
        else:
            totals = totals * keep + tl.dot(chance.to(latent.dtype), ones)
            gathered = gathered * keep + tl.dot(chance.to(latent.dtype), latent)
        peak = higher

    total = tl.max(totals, axis=1)  # all columns are equal
    kept = live[:, None] & (at_r < R)[None, :]
    if SPLITS == 1 or length <= share:  # nothing to combine
        if split == 0:
            result = gathered / total[:, None]
            tl.store(out + (row * H + head)[:, None] * R + at_r[None, :], result.to(out.dtype.element_ty), mask=kept)
        if SUMS:  # natural logarithm, as in torch's flash attention
            logs = (peak + tl.log2(total)) * 0.6931471805599453
            tl.store(sums + head.to(tl.int64) * count + row, logs, mask=live)
    else:
        place = (row * H + head) * SPLITS + split
        tl.store(peaks + place, peak, mask=live)
        tl.store(sums + place, total, mask=live)
        tl.store(parts + place[:, None] * R + at_r[None, :], gathered, mask=kept)


def latent_tiles(counts: Sequence[int] | np.ndarray) -> np.ndarray:
    """(programs, 2) int32: the first row and the number of rows of each tile of packed sequences, largest positions
    first."""
    counts = np.asarray(counts)
    tiles = -(-counts // TOKENS)
    within = (np.arange(tiles.sum()) - np.repeat(tiles.cumsum() - tiles, tiles)) * TOKENS
    rows = np.minimum(np.repeat(counts, tiles) - within, TOKENS)
    order = np.argsort(-within, kind="stable")
    first = np.repeat(counts.cumsum() - counts, tiles) + within
    return np.ascontiguousarray(np.stack([first[order], rows[order]], axis=1).astype(np.int32))


def latent_attention(
    query: Tensor, latents: Tensor, rank: int, positions: Tensor, *, scale: float, tables: Tensor | None = None,
    size: int = 1, starts: Tensor | None = None, places: Tensor | None = None, tiles: Tensor | None = None,
    splits: int = 1, sums: Tensor | None = None,
) -> Tensor:  # fmt: skip
    """Each query row over the latents of its sequence, 0 .. its position: query (T, H, R + P) -> (T, H, R).

    latents  (slots, 1, R + P)
    tables   in a decode step: latent i of row t lies in slot tables[t, i // size] * size + i % size
    starts   in a prompt: it lies at starts[t] + i or, with `places`, at places[starts[t] + i]
    tiles    of a prompt's rows, by `latent_tiles`; without them each row has its own program
    splits   programs per row and HEADS heads, as in `decode_attention`
    sums     (H, T) float32, output: the log of each row's sum of exponentials
    """
    rows, heads, width = query.shape
    exact, rotated = query.dtype == torch.float32, width - rank
    out = torch.empty(rows, heads, rank, dtype=query.dtype, device=query.device)
    tile = 16 if exact else 32
    assert tables is None or size % tile == 0, f"blocks of {size} tokens are no whole number of tiles of {tile}"
    parts, peaks, totals = out, out, out if sums is None else sums
    if splits > 1:
        parts = torch.empty(rows, heads, splits, rank, dtype=torch.float32, device=query.device)
        peaks, totals = (torch.empty(rows, heads, splits, dtype=torch.float32, device=query.device) for _ in range(2))
    padded = max(16, triton.next_power_of_2(rank))
    programs, tokens = (rows, 1) if tiles is None or exact else (tiles.shape[0], TOKENS)
    _latent_attention[(programs, triton.cdiv(heads, HEADS), splits)](
        query, latents, out, parts, peaks, totals, positions if tables is None else tables,
        positions if starts is None else starts, positions if places is None else places, positions,
        positions if tiles is None else tiles, scale * LOG2_E, rows, query.stride(0), query.stride(1),
        latents.stride(0), 0 if tables is None else tables.stride(0), H=heads, HEADS=HEADS, TOKENS=tokens, R=rank,
        RP=padded, P=rotated, PP=max(16, triton.next_power_of_2(rotated)), PAGED=tables is not None,
        SCATTERED=places is not None, BLOCK_SIZE=size, TILE=tile, SPLITS=splits, SEGMENT=SEGMENT,
        SUMS=sums is not None, EXACT=exact, num_warps=4 if tokens == 1 else 8, num_stages=1 if exact else 2,
    )  # fmt: skip
    if splits > 1:
        _join_splits[(rows * heads,)](
            parts, peaks, totals, out, positions, 0, H=heads, E=rank, EP=padded, SPLITS=splits,
            SP=triton.next_power_of_2(splits), TILE=tile, SEGMENT=SEGMENT, WINDOW=False, num_warps=1,
            **early(query),
        )  # fmt: skip
    return out
