"""Recurrent layers: gated delta rules and Mamba-2, with states updated in place, and short convolutions.

In eager mode each token of these layers reads and writes the state many times, and a prompt is computed in chunks,
whose sums differ from those of single tokens. Here the state stays in registers from a prompt's first token to its
last, and prompts, decode steps and the learner run the same instructions for every token: no multiplication is fused
with an addition, and neither the length nor a row's address is a compile-time constant.

Letters: B rows, L tokens, H heads, G groups of heads with one key, K key size, V value size, C channels, W width of a
convolution.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

EPSILON = tl.constexpr(1e-6)  # of transformers' l2norm
# Tile width in values, and warps, for a state of 128 keys: they fix the order of the sums over keys, which must be the
# same in prompts and decode steps.
VALUES, WARPS = 32, 4
INPUTS = ("query", "key", "value", "decay", "beta")


@triton.jit
def _softplus(x):
    """log(1 + exp(x)) by the series of the inverse hyperbolic tangent, whose argument is at most 1/3: the logarithm of
    1 + exp(x) would lose precision for small steps."""
    small = tl.exp(-tl.abs(x))
    s = small / (2.0 + small)
    t = s * s
    series = 1.0 / 13 + t * (1.0 / 15)
    series = 1.0 / 9 + t * (1.0 / 11 + t * series)
    series = 1.0 / 5 + t * (1.0 / 7 + t * series)
    return tl.maximum(x, 0.0) + 2.0 * s * (1.0 + t * (1.0 / 3 + t * series))


@triton.jit(
    do_not_specialize=["length", *(f"{name}_{of}" for name in INPUTS for of in ("row", "token"))],
    do_not_specialize_on_alignment=INPUTS,
)
def _recurrence(
    query, key, value, decay, beta, skip, bias, state, out, query_row, query_token, key_row, key_token, value_row,
    value_token, decay_row, decay_token, beta_row, beta_token, length, heads, shared, key_dim, value_dim, key_stride,
    value_stride, scale, low, high, MAMBA: tl.constexpr, NORM: tl.constexpr, CHANNELS: tl.constexpr,
    KEYS: tl.constexpr, VALUES: tl.constexpr,
):  # fmt: skip
    row_head = tl.program_id(0).to(tl.int64)
    row, head = row_head // heads, row_head % heads
    k_at, v_at = tl.arange(0, KEYS), tl.program_id(1) * VALUES + tl.arange(0, VALUES)
    k_in, v_in = k_at < key_dim, v_at < value_dim
    place = row_head * key_dim * value_dim + k_at[:, None] * key_stride + v_at[None, :] * value_stride
    inside = k_in[:, None] & v_in[None, :]
    kept = tl.load(state + place, mask=inside, other=0.0)
    query_at = query + row * query_row + head // shared * key_dim + k_at
    key_at = key + row * key_row + head // shared * key_dim + k_at
    value_at = value + row * value_row + head * value_dim + v_at
    beta_at = beta + row * beta_row + head
    out_at = out + (row * length * heads + head) * value_dim + v_at
    if MAMBA:  # one decay rate per head, times the step, from which beta is computed
        rate = tl.load(decay + head).to(tl.float32)
        offset = tl.load(bias + head).to(tl.float32)
        through = tl.load(skip + head).to(tl.float32)
    elif CHANNELS:
        decay_at = decay + row * decay_row + head * key_dim + k_at
    else:
        decay_at = decay + row * decay_row + head
    for _ in range(length):
        q = tl.load(query_at, mask=k_in, other=0.0).to(tl.float32)
        k = tl.load(key_at, mask=k_in, other=0.0).to(tl.float32)
        v = tl.load(value_at, mask=v_in, other=0.0).to(tl.float32)
        b = tl.load(beta_at).to(tl.float32)
        if NORM:
            q = q * tl.rsqrt(tl.sum(q * q, axis=0) + EPSILON)
            k = k * tl.rsqrt(tl.sum(k * k, axis=0) + EPSILON)
        if MAMBA:
            b = tl.minimum(tl.maximum(_softplus(b + offset), low), high)
            kept = kept * tl.exp(b * rate)
            delta = v * b
        else:
            q = q * scale
            if CHANNELS:
                kept = kept * tl.exp(tl.load(decay_at, mask=k_in, other=0.0).to(tl.float32))[:, None]
            else:
                kept = kept * tl.exp(tl.load(decay_at).to(tl.float32))
            decay_at += decay_token
            seen = tl.sum(kept * k[:, None], axis=0)
            delta = (v - seen) * b
        kept += k[:, None] * delta[None, :]
        read = tl.sum(kept * q[:, None], axis=0)
        if MAMBA:
            read += through * v
        tl.store(out_at, read, mask=v_in)
        query_at += query_token
        key_at += key_token
        value_at += value_token
        beta_at += beta_token
        out_at += heads * value_dim
    tl.store(state + place, kept, mask=inside)


def delta_rule(
    query: Tensor, key: Tensor, value: Tensor, decay: Tensor, beta: Tensor, state: Tensor, norm: bool
) -> Tensor:
    """query and key (B, L, H, K), value (B, L, H, V), decay (B, L, H), or (B, L, H, K) of a rate for each channel, beta
    (B, L, H), state (B, H, K, V) in float32, changed in place -> (B, L, H, V)."""
    out = torch.empty_like(value, memory_format=torch.contiguous_format)
    strides = (value.shape[-1], 1)
    return _run(query, key, value, decay, beta, (beta, beta), state, out, strides, norm=norm)


def state_space(
    x: Tensor, step: Tensor, rate: Tensor, key: Tensor, query: Tensor, skip: Tensor, bias: Tensor, state: Tensor,
    limits: tuple[float, float],
) -> Tensor:  # fmt: skip
    """Mamba-2, whose B is a key and whose C is a query: x (B, L, H, V), step (B, L, H) before bias (H) and softplus,
    rate (H) of decay, key and query (B, L, G, K), skip (H), state (B, H, V, K) in float32, changed in place
    -> (B, L, H, V) in float32."""
    out = torch.empty(x.shape, device=x.device)
    strides = (1, key.shape[-1])
    return _run(query, key, x, rate, step, (skip, bias), state, out, strides, limits)


def _run(
    query: Tensor, key: Tensor, value: Tensor, decay: Tensor, beta: Tensor, of_heads: tuple[Tensor, Tensor],
    state: Tensor, out: Tensor, strides: tuple[int, int], limits: tuple[float, float] | None = None, norm: bool = False,
) -> Tensor:  # fmt: skip
    rows, length, heads, value_dim = value.shape
    key_dim, mamba = key.shape[-1], limits is not None
    values = min(VALUES, triton.next_power_of_2(value_dim))
    of_tokens = [_inner(x) for x in (query, key, value)]
    of_tokens += [(decay.contiguous(), 0, 0) if mamba else _inner(decay), _inner(beta)]
    _recurrence[(rows * heads, triton.cdiv(value_dim, values))](
        *(x for x, _, _ in of_tokens), *(x.contiguous() for x in of_heads), state, out,
        *(stride for _, row, token in of_tokens for stride in (row, token)), length, heads, heads // key.shape[2],
        key_dim, value_dim, *strides, key_dim**-0.5, *(limits or (0.0, 0.0)), MAMBA=mamba, NORM=norm,
        CHANNELS=decay.ndim == 4, KEYS=triton.next_power_of_2(key_dim), VALUES=values, num_warps=WARPS,
        enable_fp_fusion=False,
    )  # fmt: skip
    return out


def _inner(x: Tensor) -> tuple[Tensor, int, int]:
    """The tensor with each token's values contiguous, and the strides of rows and tokens: slices of a wider row are
    read in place."""
    if not x[0, 0].is_contiguous():
        x = x.contiguous()
    return x, x.stride(0), x.stride(1)


@triton.jit
def _store_convolved(summed, bias, out, at, channel, inside, SILU: tl.constexpr, BIAS: tl.constexpr):
    if BIAS:
        summed += tl.load(bias + channel, mask=inside, other=0.0).to(tl.float32)
    if SILU:
        summed = summed.to(out.dtype.element_ty).to(tl.float32)
        summed = summed / (1.0 + tl.exp(-summed))
    tl.store(out + at, summed.to(out.dtype.element_ty), mask=inside)


@triton.jit
def _convolution_step(
    x, state, weight, bias, out, total, channels, WIDTH: tl.constexpr, SILU: tl.constexpr, BIAS: tl.constexpr,
    BLOCK: tl.constexpr,
):  # fmt: skip
    at = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    inside = at < total
    channel = at % channels
    new = tl.load(x + at, mask=inside, other=0.0)
    summed = new.to(tl.float32) * tl.load(weight + channel * WIDTH + WIDTH - 1, mask=inside, other=0.0).to(tl.float32)
    for i in tl.static_range(WIDTH - 1):
        column = tl.load(state + at * WIDTH + i + 1, mask=inside, other=0.0)
        summed += column.to(tl.float32) * tl.load(weight + channel * WIDTH + i, mask=inside, other=0.0).to(tl.float32)
        tl.store(state + at * WIDTH + i, column, mask=inside)
    tl.store(state + at * WIDTH + WIDTH - 1, new.to(state.dtype.element_ty), mask=inside)
    _store_convolved(summed, bias, out, at, channel, inside, SILU, BIAS)


def convolution_step(x: Tensor, state: Tensor, weight: Tensor, bias: Tensor | None, silu: bool) -> Tensor:
    """x (B, C, 1), state (B, C, W) of the last columns, changed in place, weight (C, W), bias (C,) -> (B, C, 1)."""
    x = x.contiguous()
    out = torch.empty_like(x)
    _convolution_step[(triton.cdiv(x.numel(), 256),)](
        x, state, weight, weight if bias is None else bias, out, x.numel(), x.shape[1], WIDTH=state.shape[-1],
        SILU=silu, BIAS=bias is not None, BLOCK=256, num_warps=4, enable_fp_fusion=False,
    )  # fmt: skip
    return out


@triton.jit
def _convolution(
    x, weight, bias, out, total, channels, length, row_stride, channel_stride, token_stride, WIDTH: tl.constexpr,
    SILU: tl.constexpr, BIAS: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    at = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    inside = at < total
    channel, token = at % channels, at // channels % length
    source = x + at // (channels * length) * row_stride + channel * channel_stride + token * token_stride
    new = tl.load(source, mask=inside, other=0.0)
    summed = new.to(tl.float32) * tl.load(weight + channel * WIDTH + WIDTH - 1, mask=inside, other=0.0).to(tl.float32)
    for i in tl.static_range(WIDTH - 1):
        back = WIDTH - 1 - i
        column = tl.load(source - back * token_stride, mask=inside & (token >= back), other=0.0)
        summed += column.to(tl.float32) * tl.load(weight + channel * WIDTH + i, mask=inside, other=0.0).to(tl.float32)
    _store_convolved(summed, bias, out, at, channel, inside, SILU, BIAS)


def convolution(x: Tensor, weight: Tensor, bias: Tensor | None, silu: bool) -> Tensor:
    """x (B, C, L), zeros before it, weight (C, W), bias (C,) -> (B, C, L), with the sums of `convolution_step`."""
    rows, channels, length = x.shape
    out = torch.empty(rows, length, channels, dtype=x.dtype, device=x.device)
    _convolution[(triton.cdiv(x.numel(), 256),)](
        x, weight, weight if bias is None else bias, out, x.numel(), channels, length, *x.stride(),
        WIDTH=weight.shape[-1], SILU=silu, BIAS=bias is not None, BLOCK=256, num_warps=4, enable_fp_fusion=False,
    )  # fmt: skip
    return out.transpose(1, 2)
