"""Recurrent layers: the gated delta rule, with the state written where it was read, and short convolutions.

In eager mode a token of the delta rule reads and writes a state seven times over, and a prompt is solved in chunks,
whose sums are others than those of single tokens. Here a state stays in registers from a prompt's first token to its
last, and prompts, decode steps and the learner run the same instructions for every token: no multiplication is fused
with an addition, and the length is no constant of the program.

Letters: B rows, L tokens, H heads, K key size, V value size, C channels, W width of a convolution.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

EPSILON = tl.constexpr(1e-6)  # of transformers' l2norm
# A state of 128 keys in tiles of so many values, in the registers of so many warps: the sums over keys are part of the
# contract that prompts and steps have.
VALUES, WARPS = 32, 4


@triton.jit(do_not_specialize=["length"])
def _delta_rule(
    query, key, value, decay, beta, state, out, length, heads, key_dim, value_dim, scale, NORM: tl.constexpr,
    KEYS: tl.constexpr, VALUES: tl.constexpr,
):  # fmt: skip
    row_head = tl.program_id(0).to(tl.int64)
    k_at, v_at = tl.arange(0, KEYS), tl.program_id(1) * VALUES + tl.arange(0, VALUES)
    k_in, v_in = k_at < key_dim, v_at < value_dim
    place = row_head * key_dim * value_dim + k_at[:, None] * value_dim + v_at[None, :]
    inside = k_in[:, None] & v_in[None, :]
    kept = tl.load(state + place, mask=inside, other=0.0)
    at = row_head // heads * length * heads + row_head % heads
    for _ in range(length):
        q = tl.load(query + at * key_dim + k_at, mask=k_in, other=0.0).to(tl.float32)
        k = tl.load(key + at * key_dim + k_at, mask=k_in, other=0.0).to(tl.float32)
        if NORM:
            q = q * tl.rsqrt(tl.sum(q * q, axis=0) + EPSILON)
            k = k * tl.rsqrt(tl.sum(k * k, axis=0) + EPSILON)
        q = q * scale
        v = tl.load(value + at * value_dim + v_at, mask=v_in, other=0.0).to(tl.float32)
        kept = kept * tl.exp(tl.load(decay + at).to(tl.float32))
        seen = tl.sum(kept * k[:, None], axis=0)
        delta = (v - seen) * tl.load(beta + at).to(tl.float32)
        kept += k[:, None] * delta[None, :]
        tl.store(out + at * value_dim + v_at, tl.sum(kept * q[:, None], axis=0), mask=v_in)
        at += heads
    tl.store(state + place, kept, mask=inside)


def delta_rule(
    query: Tensor, key: Tensor, value: Tensor, decay: Tensor, beta: Tensor, state: Tensor, norm: bool
) -> Tensor:
    """query and key (B, L, H, K), value (B, L, H, V), decay and beta (B, L, H), state (B, H, K, V) in float32, changed
    in place -> (B, L, H, V)."""
    rows, length, heads, value_dim = value.shape
    key_dim = key.shape[-1]
    out = torch.empty_like(value, memory_format=torch.contiguous_format)
    values = min(VALUES, triton.next_power_of_2(value_dim))
    _delta_rule[(rows * heads, triton.cdiv(value_dim, values))](
        query.contiguous(), key.contiguous(), value.contiguous(), decay.contiguous(), beta.contiguous(), state, out,
        length, heads, key_dim, value_dim, key_dim**-0.5, NORM=norm, KEYS=triton.next_power_of_2(key_dim),
        VALUES=values, num_warps=WARPS, enable_fp_fusion=False,
    )  # fmt: skip
    return out


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
    """x (B, C, L), zeros before it, weight (C, W), bias (C,) -> (B, C, L), by the sums of `convolution_step`."""
    rows, channels, length = x.shape
    out = torch.empty(rows, length, channels, dtype=x.dtype, device=x.device)
    _convolution[(triton.cdiv(x.numel(), 256),)](
        x, weight, weight if bias is None else bias, out, x.numel(), channels, length, *x.stride(),
        WIDTH=weight.shape[-1], SILU=silu, BIAS=bias is not None, BLOCK=256, num_warps=4, enable_fp_fusion=False,
    )  # fmt: skip
    return out.transpose(1, 2)
