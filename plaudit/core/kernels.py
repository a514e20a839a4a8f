"""Triton kernels of the CUDA back end. Each has a plain function that checks shapes and launches it.

Triton's interpreter runs them on the CPU (TRITON_INTERPRET=1), which is how they are tested without a GPU.
Letters: T tokens, B rows of a decode batch, H query heads, K key-value heads, G = H / K, D head size, V vocabulary.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch
import triton
import triton.language as tl
from torch import Tensor

STRIPES = 264  # programs that share the rows of a sum over all of them: two to a multiprocessor


@triton.jit
def _normed(value, w, columns, epsilon, GEMMA: tl.constexpr):
    wide = value.to(tl.float32)
    scale = 1.0 / tl.sqrt(tl.sum(wide * wide, axis=0) / columns + epsilon)
    if GEMMA:  # the weight is an offset from 1, and all is wide until the end
        out = (wide * scale * (1.0 + w.to(tl.float32))).to(value.dtype)
    else:  # rounded before the weight, as Llama's norm rounds
        out = (wide * scale).to(value.dtype) * w
    return out


@triton.jit
def _rms_norm(x, weight, y, columns, epsilon, GEMMA: tl.constexpr, BLOCK: tl.constexpr):
    row = tl.program_id(0).to(tl.int64)
    at = tl.arange(0, BLOCK)
    inside = at < columns
    value = tl.load(x + row * columns + at, mask=inside, other=0.0)
    w = tl.load(weight + at, mask=inside, other=0.0)
    tl.store(y + row * columns + at, _normed(value, w, columns, epsilon, GEMMA), mask=inside)


def rms_norm(x: Tensor, weight: Tensor, epsilon: float, gemma: bool = False) -> Tensor:
    """Root-mean-square norm over the last dimension."""
    columns = x.shape[-1]
    flat = x.contiguous().view(-1, columns)
    y = torch.empty_like(flat)
    block = triton.next_power_of_2(columns)
    _rms_norm[(flat.shape[0],)](
        flat, weight, y, columns, epsilon, GEMMA=gemma, BLOCK=block, num_warps=_norm_warps(block)
    )
    return y.view(x.shape)


def _norm_warps(block: int) -> int:
    return min(16, max(1, block // 256))


@triton.jit
def _add_rms_norm(x, y, weight, total, normed, columns, epsilon, BLOCK: tl.constexpr):
    row = tl.program_id(0).to(tl.int64)
    at = tl.arange(0, BLOCK)
    inside = at < columns
    place = row * columns + at
    first = tl.load(x + place, mask=inside, other=0.0)
    second = tl.load(y + place, mask=inside, other=0.0)
    value = (first.to(tl.float32) + second.to(tl.float32)).to(first.dtype)  # rounded as torch rounds a sum
    w = tl.load(weight + at, mask=inside, other=0.0)
    tl.store(total + place, value, mask=inside)
    tl.store(normed + place, _normed(value, w, columns, epsilon, False), mask=inside)


def add_rms_norm(x: Tensor, y: Tensor, weight: Tensor, epsilon: float) -> tuple[Tensor, Tensor]:
    """x + y and its norm, to the bit what torch's sum and `rms_norm` give: the learner computes these one by one."""
    columns = x.shape[-1]
    x, y = x.contiguous(), y.contiguous()
    total, normed = torch.empty_like(x), torch.empty_like(x)
    block = triton.next_power_of_2(columns)
    _add_rms_norm[(x.numel() // columns,)](
        x, y, weight, total, normed, columns, epsilon, BLOCK=block, num_warps=_norm_warps(block)
    )
    return total, normed


@triton.jit
def _rms_norm_backward(
    x, weight, grad, dx, parts, rows, columns, epsilon, GEMMA: tl.constexpr, PROGRAMS: tl.constexpr, BLOCK: tl.constexpr
):  # fmt: skip
    program = tl.program_id(0)
    at = tl.arange(0, BLOCK)
    inside = at < columns
    w = tl.load(weight + at, mask=inside, other=0.0).to(tl.float32)
    if GEMMA:
        w = 1.0 + w
    summed = tl.zeros([BLOCK], dtype=tl.float32)
    first = program.to(tl.int64) * columns
    for _ in range(program, rows, PROGRAMS):
        value = tl.load(x + first + at, mask=inside, other=0.0)
        wide = value.to(tl.float32)
        g = tl.load(grad + first + at, mask=inside, other=0.0).to(tl.float32)
        scale = 1.0 / tl.sqrt(tl.sum(wide * wide, axis=0) / columns + epsilon)
        normed = wide * scale
        summed += g * normed
        through = g * w
        out = scale * (through - normed * (tl.sum(through * normed, axis=0) / columns))
        tl.store(dx + first + at, out.to(value.dtype), mask=inside)
        first += PROGRAMS * columns
    tl.store(parts + program * columns + at, summed, mask=inside)


def rms_norm_backward(x: Tensor, weight: Tensor, grad: Tensor, epsilon: float, gemma: bool) -> tuple[Tensor, Tensor]:
    """The gradients of the input and of the weight. Rows are added up in a fixed order."""
    columns = x.shape[-1]
    flat, grad = x.contiguous().view(-1, columns), grad.contiguous()
    dx = torch.empty_like(flat)
    programs = min(flat.shape[0], STRIPES)
    parts = torch.empty(programs, columns, dtype=torch.float32, device=x.device)
    block = triton.next_power_of_2(columns)
    _rms_norm_backward[(programs,)](
        flat, weight, grad, dx, parts, flat.shape[0], columns, epsilon, GEMMA=gemma, PROGRAMS=programs, BLOCK=block,
        num_warps=_norm_warps(block),
    )  # fmt: skip
    return dx.view(x.shape), parts.sum(0).to(weight.dtype)


@triton.jit
def _silu_mul(gate, up, y, count, BLOCK: tl.constexpr):
    at = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    inside = at < count
    g = tl.load(gate + at, mask=inside, other=0.0)
    u = tl.load(up + at, mask=inside, other=0.0)
    wide = g.to(tl.float32)
    silu = (wide / (1.0 + tl.exp(-wide))).to(g.dtype)
    tl.store(y + at, silu * u, mask=inside)


def silu_mul(gate: Tensor, up: Tensor) -> Tensor:
    """silu(gate) * up."""
    gate, up = gate.contiguous(), up.contiguous()
    y = torch.empty_like(gate)
    _silu_mul[(triton.cdiv(gate.numel(), 2048),)](gate, up, y, gate.numel(), BLOCK=2048, num_warps=8)
    return y


@triton.jit
def _silu_mul_backward(gate, up, grad, dgate, dup, count, BLOCK: tl.constexpr):
    at = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    inside = at < count
    g = tl.load(gate + at, mask=inside, other=0.0)
    wide, u = g.to(tl.float32), tl.load(up + at, mask=inside, other=0.0).to(tl.float32)
    dy = tl.load(grad + at, mask=inside, other=0.0).to(tl.float32)
    gated = 1.0 / (1.0 + tl.exp(-wide))
    tl.store(dgate + at, (dy * u * gated * (1.0 + wide * (1.0 - gated))).to(g.dtype), mask=inside)
    tl.store(dup + at, (dy * wide * gated).to(g.dtype), mask=inside)


def silu_mul_backward(gate: Tensor, up: Tensor, grad: Tensor) -> tuple[Tensor, Tensor]:
    """The gradients of gate and up."""
    gate, up, grad = gate.contiguous(), up.contiguous(), grad.contiguous()
    dgate, dup = torch.empty_like(gate), torch.empty_like(up)
    count = gate.numel()
    _silu_mul_backward[(triton.cdiv(count, 2048),)](gate, up, grad, dgate, dup, count, BLOCK=2048, num_warps=8)
    return dgate, dup


@triton.jit
def _rotate_heads(
    x, y, cos, sin, token, place, x_token, x_head, HEADS: tl.constexpr, PADDED: tl.constexpr, HALF: tl.constexpr,
    HALF_PADDED: tl.constexpr, BACK: tl.constexpr,
):  # fmt: skip
    # Token `token` of x goes to row `place` of y.
    head = tl.arange(0, PADDED)[:, None]
    at = tl.arange(0, HALF_PADDED)[None, :]
    inside = (head < HEADS) & (at < HALF)
    low_at = token * x_token + head * x_head + at
    low = tl.load(x + low_at, mask=inside, other=0.0)
    high = tl.load(x + low_at + HALF, mask=inside, other=0.0)
    angle = token * 2 * HALF + at
    real = at < HALF
    c1, s1 = tl.load(cos + angle, mask=real, other=0.0), tl.load(sin + angle, mask=real, other=0.0)
    c2, s2 = tl.load(cos + angle + HALF, mask=real, other=0.0), tl.load(sin + angle + HALF, mask=real, other=0.0)
    if BACK:  # the transposed rotation
        s1, s2 = -s2, -s1
    wide_low, wide_high = low.to(tl.float32), high.to(tl.float32)
    out = y + place * HEADS * 2 * HALF + head * 2 * HALF + at
    tl.store(out, (wide_low * c1 - wide_high * s1).to(low.dtype), mask=inside)
    tl.store(out + HALF, (wide_high * c2 + wide_low * s2).to(low.dtype), mask=inside)


@triton.jit
def _rotary(
    q, k, q_out, k_out, cos, sin, q_token, q_head, k_token, k_head, H: tl.constexpr, HP: tl.constexpr, K: tl.constexpr,
    KP: tl.constexpr, HALF: tl.constexpr, HALF_PADDED: tl.constexpr, BACK: tl.constexpr,
):  # fmt: skip
    token = tl.program_id(0).to(tl.int64)
    _rotate_heads(q, q_out, cos, sin, token, token, q_token, q_head, H, HP, HALF, HALF_PADDED, BACK)
    _rotate_heads(k, k_out, cos, sin, token, token, k_token, k_head, K, KP, HALF, HALF_PADDED, BACK)


def rotary(query: Tensor, key: Tensor, cos: Tensor, sin: Tensor, back: bool = False) -> tuple[Tensor, Tensor]:
    """Rotary position embedding of query (1, H, T, D) and key (1, K, T, D) by cos and sin (1, T, D), in one launch.
    The results have the same shapes and lie token by token in memory, as attention wants them. `back`: the gradients
    of query and key from those of the results."""
    _, heads, tokens, dim = query.shape
    kv_heads = key.shape[1]
    outputs = [torch.empty(1, tokens, n, dim, dtype=query.dtype, device=query.device) for n in (heads, kv_heads)]
    half = dim // 2
    _rotary[(tokens,)](
        query, key, *outputs, cos.contiguous(), sin.contiguous(), query.stride(2), query.stride(1), key.stride(2),
        key.stride(1), H=heads, HP=triton.next_power_of_2(heads), K=kv_heads, KP=triton.next_power_of_2(kv_heads),
        HALF=half, HALF_PADDED=triton.next_power_of_2(half), BACK=back, num_warps=4,
    )  # fmt: skip
    return outputs[0].transpose(1, 2), outputs[1].transpose(1, 2)


@triton.jit
def _rotate(
    x, y, cos, sin, x_token, x_head, HEADS: tl.constexpr, PADDED: tl.constexpr, HALF: tl.constexpr,
    HALF_PADDED: tl.constexpr,
):  # fmt: skip
    token = tl.program_id(0).to(tl.int64)
    _rotate_heads(x, y, cos, sin, token, token, x_token, x_head, HEADS, PADDED, HALF, HALF_PADDED, False)


def rotate(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """The same of queries or keys alone: x (T, heads, D) by cos and sin (T, D)."""
    tokens, heads, dim = x.shape
    y = torch.empty(x.shape, dtype=x.dtype, device=x.device)
    _rotate[(tokens,)](
        x, y, cos.contiguous(), sin.contiguous(), x.stride(0), x.stride(1), HEADS=heads,
        PADDED=triton.next_power_of_2(heads), HALF=dim // 2, HALF_PADDED=triton.next_power_of_2(dim // 2), num_warps=4,
    )  # fmt: skip
    return y


@triton.jit
def _slot(tables, positions, row, table_row, BLOCK_SIZE: tl.constexpr):
    """Where in the cache the newest token of a row lies."""
    position = tl.load(positions + row)
    block = tl.load(tables + row * table_row + position // BLOCK_SIZE).to(tl.int64)
    return block * BLOCK_SIZE + position % BLOCK_SIZE


@triton.jit
def _store_decoded(
    key, value, key_cache, value_cache, tables, positions, key_width, value_width, key_row, value_row, table_row,
    BLOCK_SIZE: tl.constexpr, WIDTH: tl.constexpr,
):  # fmt: skip
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
    )  # fmt: skip


def _rows_whole(x: Tensor) -> Tensor:
    """x (B, heads, D) with the heads of a row end to end."""
    return x if x.stride(-1) == 1 and x.stride(1) == x.shape[2] else x.contiguous()


@triton.jit
def _rotate_and_store(
    q, k, v, q_out, key_cache, value_cache, cos, sin, tables, positions, q_row, q_head, k_row, k_head, v_row,
    value_width, table_row, H: tl.constexpr, HP: tl.constexpr, K: tl.constexpr, KP: tl.constexpr, HALF: tl.constexpr,
    HALF_PADDED: tl.constexpr, BLOCK_SIZE: tl.constexpr, WIDTH: tl.constexpr,
):  # fmt: skip
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
    value, in one launch; gives the rotated query."""
    rows, heads, dim = query.shape
    kv_heads, half, value_width = key.shape[1], dim // 2, value_cache[0].numel()
    value = _rows_whole(value)
    out = torch.empty(query.shape, dtype=query.dtype, device=query.device)
    _rotate_and_store[(rows,)](
        query, key, value, out, key_cache, value_cache, cos.contiguous(), sin.contiguous(), tables, positions,
        query.stride(0), query.stride(1), key.stride(0), key.stride(1), value.stride(0), value_width, tables.stride(0),
        H=heads, HP=triton.next_power_of_2(heads), K=kv_heads, KP=triton.next_power_of_2(kv_heads), HALF=half,
        HALF_PADDED=triton.next_power_of_2(half), BLOCK_SIZE=size, WIDTH=triton.next_power_of_2(value_width),
        num_warps=4,
    )  # fmt: skip
    return out


@triton.jit
def _decode_attention(
    query, keys, values, out, peaks, sums, tables, positions, sinks, scale, softcap, window, query_row, query_head,
    key_slot, key_head, value_slot, value_head, table_row, H: tl.constexpr, G: tl.constexpr, GP: tl.constexpr,
    D: tl.constexpr, DP: tl.constexpr, E: tl.constexpr, EP: tl.constexpr, BLOCK_SIZE: tl.constexpr,
    TILE: tl.constexpr, SPLITS: tl.constexpr, WINDOW: tl.constexpr, CAP: tl.constexpr, SINKS: tl.constexpr,
    EXACT: tl.constexpr,
):  # fmt: skip
    kv_head = tl.program_id(0)  # first: heads of one row run together, and what they read lies side by side
    row = tl.program_id(1).to(tl.int64)
    split = tl.program_id(2)
    length = tl.load(positions + row).to(tl.int32) + 1
    first = 0
    if WINDOW:
        first = tl.maximum(length - window, 0)
    share = tl.cdiv(tl.cdiv(length - first, SPLITS), TILE) * TILE
    begin = first + split * share
    end = tl.minimum(begin + share, length)

    group = tl.arange(0, GP)
    head = kv_head * G + group
    at_d, at_e = tl.arange(0, DP), tl.arange(0, EP)
    q_inside = (group < G)[:, None] & (at_d < D)[None, :]
    q = tl.load(query + row * query_row + head[:, None] * query_head + at_d[None, :], mask=q_inside, other=0.0)
    peak = tl.full([GP], float("-inf"), tl.float32)
    total = tl.zeros([GP], tl.float32)
    if SINKS and split == 0:  # a logit that takes part in the softmax and gives nothing
        peak = tl.load(sinks + head, mask=group < G, other=float("-inf")).to(tl.float32)
        total = tl.where(peak == float("-inf"), 0.0, 1.0)
    gathered = tl.zeros([GP, EP], tl.float32)
    for start in range(begin, end, TILE):
        position = start + tl.arange(0, TILE)
        seen = position < end
        block = tl.load(tables + row * table_row + position // BLOCK_SIZE, mask=seen, other=0).to(tl.int64)
        slot = block * BLOCK_SIZE + position % BLOCK_SIZE
        k = tl.load(
            keys + slot[:, None] * key_slot + kv_head * key_head + at_d[None, :],
            mask=seen[:, None] & (at_d < D)[None, :], other=0.0,
        )  # fmt: skip
        if EXACT:
            score = tl.dot(q, tl.trans(k), input_precision="ieee") * scale
        else:
            score = tl.dot(q, tl.trans(k)) * scale
        if CAP:
            score = softcap * (2.0 / (1.0 + tl.exp(-2.0 * score / softcap)) - 1.0)
        score = tl.where(seen[None, :], score, float("-inf"))
        higher = tl.maximum(peak, tl.max(score, axis=1))
        keep = tl.exp(peak - higher)
        chance = tl.exp(score - higher[:, None])
        total = total * keep + tl.sum(chance, axis=1)
        v = tl.load(
            values + slot[:, None] * value_slot + kv_head * value_head + at_e[None, :],
            mask=seen[:, None] & (at_e < E)[None, :], other=0.0,
        )  # fmt: skip
        if EXACT:
            gathered = gathered * keep[:, None] + tl.dot(chance, v, input_precision="ieee")
        else:
            gathered = gathered * keep[:, None] + tl.dot(chance.to(v.dtype), v)
        peak = higher

    inside = (group < G)[:, None] & (at_e < E)[None, :]
    if SPLITS == 1:
        result = gathered / total[:, None]
        tl.store(out + (row * H + head[:, None]) * E + at_e[None, :], result.to(out.dtype.element_ty), mask=inside)
    else:
        place = (row * H + head) * SPLITS + split
        tl.store(peaks + place, peak, mask=group < G)
        tl.store(sums + place, total, mask=group < G)
        tl.store(out + place[:, None] * E + at_e[None, :], gathered, mask=inside)


@triton.jit
def _join_splits(parts, peaks, sums, out, E: tl.constexpr, EP: tl.constexpr, SPLITS: tl.constexpr, SP: tl.constexpr):
    place = tl.program_id(0).to(tl.int64)  # row * H + head
    split, at = tl.arange(0, SP), tl.arange(0, EP)
    peak = tl.load(peaks + place * SPLITS + split, mask=split < SPLITS, other=float("-inf"))
    weight = tl.exp(peak - tl.max(peak, axis=0))
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
    splits  programs per row and key-value head: few rows with many tokens need more than one to fill the device
    """
    batch, heads, dim = query.shape
    kv_heads, width = keys.shape[1], values.shape[2]
    exact = query.dtype == torch.float32
    out = torch.empty(batch, heads, width, dtype=query.dtype, device=query.device)
    if splits == 1:
        target, peaks, sums = out, out, out
    else:
        target = torch.empty(batch, heads, splits, width, dtype=torch.float32, device=query.device)
        peaks, sums = (torch.empty(batch, heads, splits, dtype=torch.float32, device=query.device) for _ in range(2))
    group = heads // kv_heads
    _decode_attention[(kv_heads, batch, splits)](
        query, keys, values, target, peaks, sums, tables, positions, query if sinks is None else sinks, scale,
        softcap or 0.0, window or 0, query.stride(0), query.stride(1), keys.stride(0), keys.stride(1),
        values.stride(0), values.stride(1), tables.stride(0), H=heads, G=group,
        GP=max(16, triton.next_power_of_2(group)), D=dim, DP=max(16, triton.next_power_of_2(dim)), E=width,
        EP=max(16, triton.next_power_of_2(width)), BLOCK_SIZE=size, TILE=32 if exact or dim > 128 else 64,
        SPLITS=splits, WINDOW=window is not None, CAP=softcap is not None, SINKS=sinks is not None, EXACT=exact,
        num_warps=2 if dim <= 64 else 4, num_stages=3,
    )  # fmt: skip
    if splits > 1:
        _join_splits[(batch * heads,)](
            target, peaks, sums, out, E=width, EP=triton.next_power_of_2(width), SPLITS=splits,
            SP=triton.next_power_of_2(splits), num_warps=1,
        )  # fmt: skip
    return out


@triton.jit
def _varlen_attention(
    query, keys, values, out, query_ends, key_starts, key_counts, key_rows, tiles, scale_log2, window, query_row,
    query_head, key_row, key_head, value_row, value_head, H: tl.constexpr, G: tl.constexpr, D: tl.constexpr,
    DP: tl.constexpr, M: tl.constexpr, N: tl.constexpr, WINDOW: tl.constexpr, SCATTERED: tl.constexpr,
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
        known = key < k_count
        place = (k_begin + key).to(tl.int64)
        if SCATTERED:
            place = tl.load(key_rows + place, mask=known, other=0)
        k_at = place[:, None] * key_row + kv_head * key_head + at_d[None, :]
        k = tl.load(keys + k_at, mask=known[:, None] & (at_d < D)[None, :], other=0.0)
        score = tl.dot(q, tl.trans(k)) * scale_log2
        if start >= clear:
            seen = (key[None, :] <= position[:, None]) & known[None, :]
            if WINDOW:
                seen = seen & (key[None, :] > position[:, None] - window)
            score = tl.where(seen, score, float("-inf"))
        higher = tl.maximum(peak, tl.max(score, axis=1))
        safe = tl.where(higher == float("-inf"), 0.0, higher)  # a row may see nothing of a tile
        chance = tl.exp2(score - safe[:, None])
        keep = tl.exp2(peak - safe)
        total = total * keep + tl.sum(chance, axis=1)
        v_at = place[:, None] * value_row + kv_head * value_head + at_d[None, :]
        v = tl.load(values + v_at, mask=known[:, None] & (at_d < D)[None, :], other=0.0)
        gathered = gathered * keep[:, None] + tl.dot(chance.to(v.dtype), v)
        peak = higher
    result = gathered / tl.where(total == 0.0, 1.0, total)[:, None]  # rows past the end have seen nothing
    o_at = ((q_begin + row).to(tl.int64)[:, None] * H + head) * D + at_d[None, :]
    tl.store(out + o_at, result.to(out.dtype.element_ty), mask=inside)


QUERY_TILE = 64
LOG2_E = 1.4426950408889634


def query_tiles(counts: Sequence[int] | np.ndarray) -> np.ndarray:
    """(programs, 2) int32: the sequence and the first query of each tile, the tiles with most to read first."""
    counts = np.asarray(counts)
    tiles = -(-counts // QUERY_TILE)
    sequence = np.repeat(np.arange(len(counts)), tiles)
    first = (np.arange(len(sequence)) - np.repeat(tiles.cumsum() - tiles, tiles)) * QUERY_TILE
    order = np.argsort(-first, kind="stable")
    return np.ascontiguousarray(np.stack([sequence[order], first[order]], axis=1).astype(np.int32))


def varlen_attention(
    query: Tensor, keys: Tensor, values: Tensor, query_ends: Tensor, key_starts: Tensor, key_counts: Tensor,
    tiles: Tensor, *, scale: float, window: int | None = None, key_rows: Tensor | None = None,
) -> Tensor:  # fmt: skip
    """Causal attention of packed sequences: query (Tq, H, D) over keys and values (Tk or more, K, D) -> (Tq, H, D).

    query_ends              cumulative counts of queries, one more than there are sequences
    key_starts, key_counts  which keys a sequence has; its last query sees the last of them
    key_rows                where each key lies, if not end to end
    tiles                   (programs, 2): sequence and first query of every QUERY_TILE queries
    """
    _, heads, dim = query.shape
    out = torch.empty(query.shape, dtype=query.dtype, device=query.device)
    _varlen_attention[(tiles.shape[0], heads)](
        query, keys, values, out, query_ends, key_starts, key_counts, tiles if key_rows is None else key_rows, tiles,
        scale * LOG2_E, window or 0, query.stride(0), query.stride(1), keys.stride(0), keys.stride(1),
        values.stride(0), values.stride(1), H=heads, G=heads // keys.shape[1], D=dim,
        DP=max(16, triton.next_power_of_2(dim)), M=QUERY_TILE, N=64 if dim <= 128 else 32, WINDOW=window is not None,
        SCATTERED=key_rows is not None, num_warps=4, num_stages=3 if dim <= 64 else 2,
    )  # fmt: skip
    return out


@triton.jit
def _uniform(step, token):
    """The sampler's hash: 32 bits of noise for a token, as `plaudit.core.sampler` writes it down."""
    low = (step & 0xFFFFFFFF).to(tl.uint32)
    high = (step >> 32).to(tl.uint32)
    x = low ^ (token.to(tl.uint32) * 0x9E3779B1)
    x = (x ^ (x >> 16)) * 0x85EBCA6B
    x = x ^ high
    x = (x ^ (x >> 13)) * 0xC2B2AE35
    x = x ^ (x >> 16)
    u = ((x & 0x7FFFFFFF).to(tl.float32) + 0.5) * (1.0 / 2147483648.0)
    return tl.minimum(u, 1.0 - 1.0 / 16777216.0)


@triton.jit
def _mix64(x):
    x = (x ^ (x >> 30)) * 0xBF58476D1CE4E5B9
    x = (x ^ (x >> 27)) * 0x94D049BB133111EB
    return x ^ (x >> 31)


@triton.jit
def _sample(
    logits, keys, inverse, greedy, tokens, positions, drawn, left, alive, stops, step, out_tokens, out_logprobs,
    out_raw, out_alive, rows, vocabulary, stop_count, STOPS: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    row = tl.program_id(0).to(tl.int64)
    scale = tl.load(inverse + row)
    noise_scale = 1.0 - tl.load(greedy + row).to(tl.float32)
    count = tl.load(drawn + row)
    seed = _mix64(tl.load(keys + row).to(tl.uint64) + (count + 1).to(tl.uint64) * 0x9E3779B97F4A7C15)
    best = float("-inf")
    chosen = 0
    raw_peak, raw_sum, peak, total = float("-inf"), 0.0, float("-inf"), 0.0
    for start in range(0, vocabulary, BLOCK):
        token = start + tl.arange(0, BLOCK)
        inside = token < vocabulary
        raw = tl.load(logits + row * vocabulary + token, mask=inside, other=float("-inf")).to(tl.float32)
        shaped = raw * scale
        u = _uniform(seed, token)
        # log1p(-u) by Kahan's trick: exact where u is tiny, which is where the winners are
        rest = 1.0 - u
        gone = rest - 1.0
        log1p = tl.where(gone == 0.0, -u, tl.log(rest) * (u / -gone))
        noisy = tl.where(inside, shaped - noise_scale * tl.log(-log1p), float("-inf"))
        top, where = tl.max(noisy, axis=0, return_indices=True)
        chosen = tl.where(top > best, start + where, chosen)
        best = tl.maximum(top, best)
        higher = tl.maximum(raw_peak, tl.max(raw, axis=0))
        raw_sum = raw_sum * tl.exp(raw_peak - higher) + tl.sum(tl.exp(raw - higher), axis=0)
        raw_peak = higher
        if scale != 1.0:
            higher = tl.maximum(peak, tl.max(shaped, axis=0))
            total = total * tl.exp(peak - higher) + tl.sum(tl.exp(shaped - higher), axis=0)
            peak = higher
    if scale == 1.0:
        peak, total = raw_peak, raw_sum
    raw_logit = tl.load(logits + row * vocabulary + chosen).to(tl.float32)
    place = tl.load(step) * rows + row
    was_alive = tl.load(alive + row)
    tl.store(out_tokens + place, chosen.to(tl.int64))
    tl.store(out_raw + place, raw_logit - raw_peak - tl.log(raw_sum))
    tl.store(out_logprobs + place, noise_scale * (raw_logit * scale - peak - tl.log(total)))
    tl.store(out_alive + place, was_alive)
    at = tl.arange(0, STOPS)
    ends = tl.load(stops + row * stop_count + at, mask=at < stop_count, other=-1)
    ended = tl.max((ends == chosen).to(tl.int32), axis=0)
    budget = tl.load(left + row)
    lives = (was_alive != 0) & (ended == 0) & (budget > 1)
    tl.store(alive + row, lives)
    if lives:
        tl.store(tokens + row, chosen.to(tl.int64))
        tl.store(positions + row, tl.load(positions + row) + 1)
        tl.store(drawn + row, count + 1)
        tl.store(left + row, budget - 1)


def sample(
    logits: Tensor, keys: Tensor, inverse: Tensor, greedy: Tensor, state: tuple[Tensor, ...], stops: Tensor,
    step: Tensor, outputs: tuple[Tensor, ...],
) -> None:  # fmt: skip
    """Draw a token for every row, note it at outputs[step], and advance the rows that live on.

    state    tokens, positions, drawn, left, alive of a DecodeBatch, changed in place
    outputs  tokens, logprobs, raw_logprobs, alive of a Decoded
    """
    rows, vocabulary = logits.shape
    _sample[(rows,)](
        logits, keys, inverse, greedy, *state, stops, step, *outputs, rows, vocabulary, stops.shape[1],
        STOPS=triton.next_power_of_2(stops.shape[1]), BLOCK=min(4096, triton.next_power_of_2(vocabulary)), num_warps=8,
    )  # fmt: skip
