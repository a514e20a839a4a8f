"""Norms, gates and rotary embeddings, with their backward passes.

Letters: T tokens, B rows of a decode batch, H query heads, K key-value heads, G = H / K, D head size, V vocabulary.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from plaudit.algo.tokens.early_launch import after_previous, early

STRIPES = 264  # programs that share a sum over all rows: two per multiprocessor
MANY_ROWS = 1 << 14  # number of short rows (such as heads) above which a program processes several in sequence


@triton.jit
def _normed(value, w, columns, epsilon, GEMMA: tl.constexpr):
    wide = value.to(tl.float32)
    scale = 1.0 / tl.sqrt(tl.sum(wide * wide, axis=0) / columns + epsilon)
    if GEMMA:  # the weight is an offset from 1, and everything is float32 until the end
        out = (wide * scale * (1.0 + w.to(tl.float32))).to(value.dtype)
    else:  # rounded before the weight is applied, as in Llama's norm
        out = (wide * scale).to(value.dtype) * w
    return out


@triton.jit
def _gated(value, w, g, columns, epsilon, GATE: tl.constexpr):
    """A norm with its gate, in one of the modes of `rms_norm`."""
    if GATE == "silu":
        out = _normed(value, w, columns, epsilon, False)
        out = (out.to(tl.float32) * (g / (1.0 + tl.exp(-g)))).to(value.dtype)
    elif GATE == "sigmoid":  # everything is float32 until the end
        wide = value.to(tl.float32)
        scale = 1.0 / tl.sqrt(tl.sum(wide * wide, axis=0) / columns + epsilon)
        out = (wide * scale * w.to(tl.float32) * (1.0 / (1.0 + tl.exp(-g)))).to(value.dtype)
    else:
        out = _normed(value.to(tl.float32) * (g / (1.0 + tl.exp(-g))), w.to(tl.float32), columns, epsilon, False)
    return out


@triton.jit
def _rms_norm(
    x, weight, gate, y, rows, columns, parts, epsilon, GEMMA: tl.constexpr, GATE: tl.constexpr, ROWS: tl.constexpr,
    BLOCK: tl.constexpr, EARLY: tl.constexpr,
):  # fmt: skip
    after_previous(EARLY)
    first = tl.program_id(0).to(tl.int64) * ROWS
    at = tl.arange(0, BLOCK)
    inside = at < columns
    w = tl.load(weight + first % parts * columns + at, mask=inside, other=0.0)
    for number in tl.static_range(ROWS):
        place = (first + number) * columns + at
        live = inside & (first + number < rows)
        value = tl.load(x + place, mask=live, other=0.0)
        if GATE == "":
            out = _normed(value, w, columns, epsilon, GEMMA)
        else:
            g = tl.load(gate + place, mask=live, other=0.0).to(tl.float32)
            out = _gated(value, w, g, columns, epsilon, GATE)
        tl.store(y + place, out, mask=live)


def rms_norm(
    x: Tensor, weight: Tensor, epsilon: float, gemma: bool = False, gate: Tensor | None = None, how: str = "silu"
) -> Tensor:  # fmt: skip
    """Root-mean-square norm over the last dimension, or over equal parts of it, with a weight of (parts, columns). The
    gate is applied as "silu": after the norm and its rounding; "sigmoid": after it in float32; "first": the norm of
    x * silu(gate) in float32."""
    parts, columns = weight.shape if weight.ndim == 2 else (1, weight.shape[0])
    flat = x.contiguous().view(-1, columns)
    y = torch.empty_like(flat)
    rows, block = flat.shape[0], triton.next_power_of_2(columns)
    at_once = 8 if block <= 256 and rows >= MANY_ROWS and parts == 1 else 1
    _rms_norm[(triton.cdiv(rows, at_once),)](
        flat, weight, flat if gate is None else gate.contiguous(), y, rows, columns, parts, epsilon, GEMMA=gemma,
        GATE="" if gate is None else how, ROWS=at_once, BLOCK=block, num_warps=_norm_warps(block), **early(x),
    )  # fmt: skip
    return y.view(x.shape)


@triton.jit
def _rms_norm_both(
    x0, x1, w0, w1, y0, y1, rows0, columns, epsilon0, epsilon1, BLOCK: tl.constexpr, EARLY: tl.constexpr
):  # fmt: skip
    after_previous(EARLY)
    row = tl.program_id(0).to(tl.int64)
    x, weight, y, epsilon = x0, w0, y0, epsilon0
    if row >= rows0:
        row -= rows0
        x, weight, y, epsilon = x1, w1, y1, epsilon1
    at = tl.arange(0, BLOCK)
    inside = at < columns
    w = tl.load(weight + at, mask=inside, other=0.0)
    value = tl.load(x + row * columns + at, mask=inside, other=0.0)
    tl.store(y + row * columns + at, _normed(value, w, columns, epsilon, False), mask=inside)


def rms_norm_both(
    xs: tuple[Tensor, Tensor], weights: tuple[Tensor, Tensor], epsilons: tuple[float, float]
) -> tuple[Tensor, Tensor]:
    """`rms_norm` of two tensors with last dimensions of the same size, each with its weight, in one launch."""
    columns = weights[0].shape[0]
    flats = [x.contiguous().view(-1, columns) for x in xs]
    ys = [torch.empty_like(flat) for flat in flats]
    block = triton.next_power_of_2(columns)
    _rms_norm_both[(sum(map(len, flats)),)](
        *flats, *weights, *ys, len(flats[0]), columns, *epsilons, BLOCK=block, num_warps=_norm_warps(block),
        **early(xs[0]),
    )  # fmt: skip
    return ys[0].view(xs[0].shape), ys[1].view(xs[1].shape)


def _norm_warps(block: int) -> int:
    return min(16, max(1, block // 256))


@triton.jit
def _add_rms_norm(x, y, weight, total, normed, columns, epsilon, BLOCK: tl.constexpr, EARLY: tl.constexpr):
    after_previous(EARLY)
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
    """x + y and its norm, bit-equal to torch's sum and `rms_norm`, which the learner computes separately."""
    columns = x.shape[-1]
    x, y = x.contiguous(), y.contiguous()
    total, normed = torch.empty_like(x), torch.empty_like(x)
    block = triton.next_power_of_2(columns)
    _add_rms_norm[(x.numel() // columns,)](
        x, y, weight, total, normed, columns, epsilon, BLOCK=block, num_warps=_norm_warps(block), **early(x)
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
    """The gradients of the input and of the weight. Rows are summed in a fixed order."""
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
def _silu_mul(gate, up, y, count, BLOCK: tl.constexpr, EARLY: tl.constexpr):
    after_previous(EARLY)
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
    _silu_mul[(triton.cdiv(gate.numel(), 2048),)](gate, up, y, gate.numel(), BLOCK=2048, num_warps=8, **early(gate))
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
    The results have the same shapes and are contiguous per token, as attention expects them. `back`: the gradients of
    query and key from those of the results."""
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
    HALF_PADDED: tl.constexpr, EARLY: tl.constexpr,
):  # fmt: skip
    after_previous(EARLY)
    token = tl.program_id(0).to(tl.int64)
    _rotate_heads(x, y, cos, sin, token, token, x_token, x_head, HEADS, PADDED, HALF, HALF_PADDED, False)


def rotate(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """`rotary` of queries or keys alone: x (T, heads, D) by cos and sin (T, D)."""
    tokens, heads, dim = x.shape
    y = torch.empty(x.shape, dtype=x.dtype, device=x.device)
    _rotate[(tokens,)](
        x, y, cos.contiguous(), sin.contiguous(), x.stride(0), x.stride(1), HEADS=heads,
        PADDED=triton.next_power_of_2(heads), HALF=dim // 2, HALF_PADDED=triton.next_power_of_2(dim // 2), num_warps=4,
        **early(x),
    )  # fmt: skip
    return y
