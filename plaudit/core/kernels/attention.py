"""Stores keys and values in the paged cache and computes attention over it: decode steps, and prompts of any lengths.

A row of queries has the same bits in both kernels, whatever else is in the batch: keys are processed in tiles of one
size from position 0, in order; the softmax is in base 2 and rescaled tile by tile; one warp sums over a tile's keys. A
decode step over few rows is split into segments of at least SEGMENT keys, so that shorter rows are never split.

Letters: T tokens, B rows of a decode batch, H query heads, K key-value heads, G = H / K, D head size, V vocabulary.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch
import triton
import triton.language as tl
from torch import Tensor

from plaudit.algo.tokens.early_launch import after_previous, early
from plaudit.core.kernels.pointwise import _rotate_heads

QUERY_TILE = 64
SEGMENT = 1024
LOG2_E = 1.4426950408889634
FEW = 1024  # programs of a decode step up to which memory latency limits them, not bandwidth


@triton.jit
def _slot(tables, positions, row, table_row, BLOCK_SIZE: tl.constexpr):
    """The cache slot of a row's newest token."""
    position = tl.load(positions + row)
    block = tl.load(tables + row * table_row + position // BLOCK_SIZE).to(tl.int64)
    return block * BLOCK_SIZE + position % BLOCK_SIZE


@triton.jit
def _store_decoded(
    key, value, key_cache, value_cache, tables, positions, key_width, value_width, key_row, value_row, table_row,
    BLOCK_SIZE: tl.constexpr, WIDTH: tl.constexpr, EARLY: tl.constexpr,
):  # fmt: skip
    after_previous(EARLY)
    row = tl.program_id(0).to(tl.int64)
    slot = _slot(tables, positions, row, table_row, BLOCK_SIZE)
    at = tl.arange(0, WIDTH)
    inside = at < key_width
    tl.store(key_cache + slot * key_width + at, tl.load(key + row * key_row + at, mask=inside), mask=inside)
    inside = at < value_width
    tl.store(value_cache + slot * value_width + at, tl.load(value + row * value_row + at, mask=inside), mask=inside)


def store_decoded(
    key: Tensor, value: Tensor, key_cache: Tensor, value_cache: Tensor, tables: Tensor, positions: Tensor, size: int
) -> None:
    """Store one token's key (B, K, D) and value of every row at its position; caches are (slots, K, D)."""
    key_width, value_width = key_cache[0].numel(), value_cache[0].numel()
    key, value = _rows_whole(key), _rows_whole(value)
    _store_decoded[(key.shape[0],)](
        key, value, key_cache, value_cache, tables, positions, key_width, value_width, key.stride(0), value.stride(0),
        tables.stride(0), BLOCK_SIZE=size, WIDTH=triton.next_power_of_2(max(key_width, value_width)), num_warps=4,
        **early(key),
    )  # fmt: skip


def _rows_whole(x: Tensor) -> Tensor:
    """x (B, heads, D) with each row's heads contiguous."""
    return x if x.stride(-1) == 1 and x.stride(1) == x.shape[2] else x.contiguous()


@triton.jit
def _rotate_and_store(
    q, k, v, q_out, key_cache, value_cache, cos, sin, tables, positions, q_row, q_head, k_row, k_head, v_row,
    value_width, table_row, H: tl.constexpr, HP: tl.constexpr, K: tl.constexpr, KP: tl.constexpr, HALF: tl.constexpr,
    HALF_PADDED: tl.constexpr, BLOCK_SIZE: tl.constexpr, WIDTH: tl.constexpr, EARLY: tl.constexpr,
):  # fmt: skip
    after_previous(EARLY)
    row = tl.program_id(0).to(tl.int64)
    slot = _slot(tables, positions, row, table_row, BLOCK_SIZE)
    _rotate_heads(q, q_out, cos, sin, row, row, q_row, q_head, H, HP, HALF, HALF_PADDED, False)
    _rotate_heads(k, key_cache, cos, sin, row, slot, k_row, k_head, K, KP, HALF, HALF_PADDED, False)
    at = tl.arange(0, WIDTH)
    inside = at < value_width
    tl.store(value_cache + slot * value_width + at, tl.load(v + row * v_row + at, mask=inside), mask=inside)


def rotate_and_store(
    query: Tensor, key: Tensor, value: Tensor, cos: Tensor, sin: Tensor, key_cache: Tensor, value_cache: Tensor,
    tables: Tensor, positions: Tensor, size: int,
) -> Tensor:  # fmt: skip
    """`rotary` of one token's query (B, H, D) and key by cos and sin (B, D), and `store_decoded` of the key and the
    value, in one launch; returns the rotated query."""
    rows, heads, dim = query.shape
    kv_heads, half, value_width = key.shape[1], dim // 2, value_cache[0].numel()
    value = _rows_whole(value)
    out = torch.empty(query.shape, dtype=query.dtype, device=query.device)
    _rotate_and_store[(rows,)](
        query, key, value, out, key_cache, value_cache, cos.contiguous(), sin.contiguous(), tables, positions,
        query.stride(0), query.stride(1), key.stride(0), key.stride(1), value.stride(0), value_width, tables.stride(0),
        H=heads, HP=triton.next_power_of_2(heads), K=kv_heads, KP=triton.next_power_of_2(kv_heads), HALF=half,
        HALF_PADDED=triton.next_power_of_2(half), BLOCK_SIZE=size, WIDTH=triton.next_power_of_2(value_width),
        num_warps=4, **early(query),
    )  # fmt: skip
    return out


@triton.jit
def _decode_attention(
    query, keys, values, out, parts, peaks, sums, tables, positions, sinks, scale_log2, softcap_log2, window, query_row,
    query_head, key_slot, key_head, value_slot, value_head, table_row, H: tl.constexpr, G: tl.constexpr,
    GP: tl.constexpr, D: tl.constexpr, DP: tl.constexpr, E: tl.constexpr, STRIP: tl.constexpr, STRIPS: tl.constexpr,
    BLOCK_SIZE: tl.constexpr, TILE: tl.constexpr, SPLITS: tl.constexpr, SEGMENT: tl.constexpr, WINDOW: tl.constexpr,
    CAP: tl.constexpr, SINKS: tl.constexpr, EXACT: tl.constexpr, FEW: tl.constexpr, EARLY: tl.constexpr,
):  # fmt: skip
    after_previous(EARLY)
    kv_head = tl.program_id(0)  # first: heads of one row run together and read adjacent memory
    row = tl.program_id(1).to(tl.int64)
    split, strip = tl.program_id(2) // STRIPS, tl.program_id(2) % STRIPS
    length = tl.load(positions + row).to(tl.int32) + 1
    first = 0
    if WINDOW:
        first = tl.maximum(length - window, 0)
    base = first // TILE * TILE
    share = tl.maximum(tl.cdiv(tl.cdiv(length - base, SPLITS), TILE) * TILE, SEGMENT)
    begin = base + split * share
    end = tl.minimum(begin + share, length)

    group = tl.arange(0, GP)
    head = kv_head * G + group
    inner, at_d, at_e = tl.arange(0, TILE), tl.arange(0, DP), strip * STRIP + tl.arange(0, STRIP)
    q_inside = (group < G)[:, None] & (at_d < D)[None, :]
    q = tl.load(query + row * query_row + head[:, None] * query_head + at_d[None, :], mask=q_inside, other=0.0)
    peak = tl.full([GP], float("-inf"), tl.float32)
    total = tl.zeros([GP], tl.float32)
    if SINKS and split == 0:  # a logit that counts in the softmax but has no value
        peak = 1.4426950408889634 * tl.load(sinks + head, mask=group < G, other=float("-inf")).to(tl.float32)
        total = tl.where(peak == float("-inf"), 0.0, 1.0)
    gathered = tl.zeros([GP, STRIP], tl.float32)
    table = tables + row * table_row
    block = tl.load(table + tl.minimum(begin, length - 1) // BLOCK_SIZE)
    for start in range(begin, end, TILE):
        # A tile lies within one block, so its keys are contiguous.
        if not FEW:
            block = tl.load(table + start // BLOCK_SIZE)
        slot = block.to(tl.int64) * BLOCK_SIZE + start % BLOCK_SIZE
        if FEW:  # prefetch the next tile's
            block = tl.load(table + tl.minimum(start + TILE, end - 1) // BLOCK_SIZE)
        seen = (start + inner < end) & (start + inner >= first)
        k_at = keys + (slot * key_slot + kv_head * key_head) + (inner[:, None] * key_slot + at_d[None, :])
        if FEW:  # masked keys are read too
            k = tl.load(k_at, mask=(at_d < D)[None, :], other=0.0)
        else:
            k = tl.load(k_at, mask=seen[:, None] & (at_d < D)[None, :], other=0.0)
        if EXACT:
            score = tl.dot(q, tl.trans(k), input_precision="ieee") * scale_log2
        else:
            score = tl.dot(q, tl.trans(k)) * scale_log2
        if CAP:  # softcap * tanh(score / softcap), where both are in units of log2(e)
            score = softcap_log2 * (2.0 / (1.0 + tl.exp2(-2.8853900817779268 * score / softcap_log2)) - 1.0)
        score = tl.where(seen[None, :], score, float("-inf"))
        higher = tl.maximum(peak, tl.max(score, axis=1))
        keep = tl.exp2(peak - higher)
        chance = tl.exp2(score - higher[:, None])
        total = total * keep + tl.sum(chance, axis=1)
        v_at = values + (slot * value_slot + kv_head * value_head) + (inner[:, None] * value_slot + at_e[None, :])
        v = tl.load(v_at, mask=seen[:, None] & (at_e < E)[None, :], other=0.0)
        if EXACT:
            gathered = gathered * keep[:, None] + tl.dot(chance, v, input_precision="ieee")
        else:
            gathered = gathered * keep[:, None] + tl.dot(chance.to(v.dtype), v)
        peak = higher

    inside = (group < G)[:, None] & (at_e < E)[None, :]
    if SPLITS == 1 or length - base <= share:  # nothing to combine
        if split == 0:
            result = gathered / total[:, None]
            tl.store(out + (row * H + head[:, None]) * E + at_e[None, :], result.to(out.dtype.element_ty), mask=inside)
    else:
        place = (row * H + head) * SPLITS + split
        tl.store(peaks + place, peak, mask=group < G)
        tl.store(sums + place, total, mask=group < G)
        tl.store(parts + place[:, None] * E + at_e[None, :], gathered, mask=inside)


@triton.jit
def _join_splits(
    parts, peaks, sums, out, positions, window, H: tl.constexpr, E: tl.constexpr, EP: tl.constexpr,
    SPLITS: tl.constexpr, SP: tl.constexpr, TILE: tl.constexpr, SEGMENT: tl.constexpr, WINDOW: tl.constexpr,
    EARLY: tl.constexpr,
):  # fmt: skip
    after_previous(EARLY)
    place = tl.program_id(0).to(tl.int64)  # row * H + head
    length = tl.load(positions + place // H).to(tl.int32) + 1
    if WINDOW:
        length -= tl.maximum(length - window, 0) // TILE * TILE
    if length > SEGMENT:  # otherwise one program had the whole row
        split, at = tl.arange(0, SP), tl.arange(0, EP)
        peak = tl.load(peaks + place * SPLITS + split, mask=split < SPLITS, other=float("-inf"))
        weight = tl.exp2(peak - tl.max(peak, axis=0))
        total = tl.sum(weight * tl.load(sums + place * SPLITS + split, mask=split < SPLITS, other=0.0), axis=0)
        inside = (split < SPLITS)[:, None] & (at < E)[None, :]
        part = tl.load(parts + (place * SPLITS + split)[:, None] * E + at[None, :], mask=inside, other=0.0)
        joined = tl.sum(part * weight[:, None], axis=0) / total
        tl.store(out + place * E + at, joined.to(out.dtype.element_ty), mask=at < E)


def decode_attention(
    query: Tensor, keys: Tensor, values: Tensor, tables: Tensor, positions: Tensor, size: int, *, scale: float,
    splits: int = 1, window: int | None = None, softcap: float | None = None, sinks: Tensor | None = None,
) -> Tensor:  # fmt: skip
    """One query per row over its cached tokens 0 .. position: query (B, H, D) -> (B, H, E).

    keys    (slots, K, D), values (slots, K, E); token i of row b lies in slot tables[b, i // size] * size + i % size
    splits  programs per row and key-value head: few rows with many tokens need more than one to fill the device; a row
            of up to SEGMENT tokens always uses one
    """
    batch, heads, dim = query.shape
    kv_heads, width = keys.shape[1], values.shape[2]
    exact = query.dtype == torch.float32
    tile = 32 if exact or dim > 128 else 64
    assert size % tile == 0, f"blocks of {size} tokens are no whole number of tiles of {tile}"
    out = torch.empty(batch, heads, width, dtype=query.dtype, device=query.device)
    parts, peaks, sums = out, out, out
    if splits > 1:
        parts = torch.empty(batch, heads, splits, width, dtype=torch.float32, device=query.device)
        peaks, sums = (torch.empty(batch, heads, splits, dtype=torch.float32, device=query.device) for _ in range(2))
    group, padded = heads // kv_heads, max(16, triton.next_power_of_2(width))
    # If the device has idle capacity, two programs share the columns of wide values.
    strips = 2 if width >= 128 and kv_heads * batch <= FEW // 4 else 1
    _decode_attention[(kv_heads, batch, splits * strips)](
        query, keys, values, out, parts, peaks, sums, tables, positions, query if sinks is None else sinks,
        scale * LOG2_E, (softcap or 0.0) * LOG2_E, window or 0, query.stride(0), query.stride(1), keys.stride(0),
        keys.stride(1), values.stride(0), values.stride(1), tables.stride(0), H=heads, G=group,
        GP=max(16, triton.next_power_of_2(group)), D=dim, DP=max(16, triton.next_power_of_2(dim)), E=width,
        STRIP=padded // strips, STRIPS=strips, BLOCK_SIZE=size, TILE=tile, SPLITS=splits, SEGMENT=SEGMENT,
        WINDOW=window is not None, CAP=softcap is not None, SINKS=sinks is not None, EXACT=exact,
        FEW=kv_heads * batch <= FEW, num_warps=1 if not exact else 2 if dim <= 64 else 4, num_stages=3, **early(query),
    )  # fmt: skip
    if splits > 1:
        _join_splits[(batch * heads,)](
            parts, peaks, sums, out, positions, window or 0, H=heads, E=width, EP=padded, SPLITS=splits,
            SP=triton.next_power_of_2(splits), TILE=tile, SEGMENT=SEGMENT, WINDOW=window is not None, num_warps=1,
            **early(query),
        )  # fmt: skip
    return out


@triton.jit
def _varlen_attention(
    query, keys, values, out, sums, query_ends, key_starts, key_counts, key_rows, tiles, sinks, scale_log2,
    softcap_log2, tokens, window, query_row, query_head, key_row, key_head, value_row, value_head, H: tl.constexpr,
    G: tl.constexpr, D: tl.constexpr, DP: tl.constexpr, M: tl.constexpr, N: tl.constexpr, WINDOW: tl.constexpr,
    SCATTERED: tl.constexpr, CAP: tl.constexpr, SINKS: tl.constexpr, SUMS: tl.constexpr,
):  # fmt: skip
    # A tile is M queries of one sequence; `tiles` names the sequence and the first query of each, longest first.
    sequence = tl.load(tiles + 2 * tl.program_id(0))
    first = tl.load(tiles + 2 * tl.program_id(0) + 1)
    head = tl.program_id(1)
    kv_head = head // G
    q_begin, k_begin = tl.load(query_ends + sequence), tl.load(key_starts + sequence)
    q_count = tl.load(query_ends + sequence + 1) - q_begin
    k_count = tl.load(key_counts + sequence)
    before = k_count - q_count

    at_d = tl.arange(0, DP)
    row = first + tl.arange(0, M)
    inside = (row < q_count)[:, None] & (at_d < D)[None, :]
    q_at = (q_begin + row).to(tl.int64)[:, None] * query_row + head * query_head + at_d[None, :]
    q = tl.load(query + q_at, mask=inside, other=0.0)
    position = before + row
    peak = tl.full([M], float("-inf"), tl.float32)
    total = tl.zeros([M], tl.float32)
    if SINKS:  # a logit that counts in the softmax but has no value
        peak = tl.zeros([M], tl.float32) + 1.4426950408889634 * tl.load(sinks + head).to(tl.float32)
        total = tl.full([M], 1.0, tl.float32)
    gathered = tl.zeros([M, DP], tl.float32)
    begin = 0
    if WINDOW:
        begin = tl.maximum(before + first - window + 1, 0) // N * N
    end = tl.minimum(before + first + M, k_count)
    clear = tl.maximum(begin, (before + first + 1) // N * N)  # tiles before this need no causal mask
    if WINDOW:
        clear = begin
    for start in range(begin, end, N):
        key = start + tl.arange(0, N)
        in_range = key < k_count
        place = (k_begin + key).to(tl.int64)
        if SCATTERED:
            place = tl.load(key_rows + place, mask=in_range, other=0)
        k_at = place[:, None] * key_row + kv_head * key_head + at_d[None, :]
        k = tl.load(keys + k_at, mask=in_range[:, None] & (at_d < D)[None, :], other=0.0)
        score = tl.dot(q, tl.trans(k)) * scale_log2
        if CAP:  # softcap * tanh(score / softcap), where both are in units of log2(e)
            score = softcap_log2 * (2.0 / (1.0 + tl.exp2(-2.8853900817779268 * score / softcap_log2)) - 1.0)
        if start >= clear:
            seen = (key[None, :] <= position[:, None]) & in_range[None, :]
            if WINDOW:
                seen = seen & (key[None, :] > position[:, None] - window)
            score = tl.where(seen, score, float("-inf"))
        higher = tl.maximum(peak, tl.max(score, axis=1))
        safe = tl.where(higher == float("-inf"), 0.0, higher)  # a row may attend to no key of a tile
        chance = tl.exp2(score - safe[:, None])
        keep = tl.exp2(peak - safe)
        total = total * keep + tl.sum(chance, axis=1)
        v_at = place[:, None] * value_row + kv_head * value_head + at_d[None, :]
        v = tl.load(values + v_at, mask=in_range[:, None] & (at_d < D)[None, :], other=0.0)
        gathered = gathered * keep[:, None] + tl.dot(chance.to(v.dtype), v)
        peak = higher
    total = tl.where(total == 0.0, 1.0, total)  # rows past the end have no keys
    result = gathered / total[:, None]
    o_at = ((q_begin + row).to(tl.int64)[:, None] * H + head) * D + at_d[None, :]
    tl.store(out + o_at, result.to(out.dtype.element_ty), mask=inside)
    if SUMS:  # natural logarithm, as in torch's flash attention
        logs = (peak + tl.log2(total)) * 0.6931471805599453
        tl.store(sums + head.to(tl.int64) * tokens + q_begin + row, logs, mask=row < q_count)


def query_tiles(counts: Sequence[int] | np.ndarray) -> np.ndarray:
    """(programs, 2) int32: the sequence and the first query of each tile, tiles with the most keys first."""
    counts = np.asarray(counts)
    tiles = -(-counts // QUERY_TILE)
    sequence = np.repeat(np.arange(len(counts)), tiles)
    first = (np.arange(len(sequence)) - np.repeat(tiles.cumsum() - tiles, tiles)) * QUERY_TILE
    order = np.argsort(-first, kind="stable")
    return np.ascontiguousarray(np.stack([sequence[order], first[order]], axis=1).astype(np.int32))


def varlen_attention(
    query: Tensor, keys: Tensor, values: Tensor, query_ends: Tensor, key_starts: Tensor, key_counts: Tensor,
    tiles: Tensor, *, scale: float, window: int | None = None, key_rows: Tensor | None = None,
    softcap: float | None = None, sinks: Tensor | None = None, sums: Tensor | None = None,
) -> Tensor:  # fmt: skip
    """Causal attention of packed sequences: query (Tq, H, D) over keys and values (Tk or more, K, D) -> (Tq, H, D).

    query_ends              cumulative counts of queries, one more than there are sequences
    key_starts, key_counts  the keys of each sequence; its last query attends to all of them
    key_rows                the row of each key, if they are not contiguous
    tiles                   (programs, 2): sequence and first query of every QUERY_TILE queries
    sums                    (H, Tq) float32, output: the log of each query's sum of exponentials
    """
    _, heads, dim = query.shape
    out = torch.empty(query.shape, dtype=query.dtype, device=query.device)
    _varlen_attention[(tiles.shape[0], heads)](
        query, keys, values, out, out if sums is None else sums, query_ends, key_starts, key_counts,
        tiles if key_rows is None else key_rows, tiles, query if sinks is None else sinks, scale * LOG2_E,
        (softcap or 0.0) * LOG2_E, query.shape[0], window or 0,
        query.stride(0), query.stride(1), keys.stride(0), keys.stride(1), values.stride(0), values.stride(1), H=heads,
        G=heads // keys.shape[1], D=dim,
        DP=max(16, triton.next_power_of_2(dim)), M=QUERY_TILE, N=64 if dim <= 128 else 32, WINDOW=window is not None,
        SCATTERED=key_rows is not None, CAP=softcap is not None, SINKS=sinks is not None, SUMS=sums is not None,
        num_warps=4,
        num_stages=3 if dim <= 64 else 2,
    )  # fmt: skip
    return out
