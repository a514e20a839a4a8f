"""The Gumbel noise of a draw: a pure function of (seed, sample index, output position, token id).

    row   = mix64(mix64(seed) + index)
    step  = mix64(row + (position + 1) * 0x9E3779B97F4A7C15)          # 64 bits, low and high half
    x     = low(step) ^ (token * 0x9E3779B1)                          # 32 bits from here, shifts are logical
    x     = (x ^ x >> 16) * 0x85EBCA6B;  x ^= high(step)
    x     = (x ^ x >> 13) * 0xC2B2AE35;  x ^= x >> 16
    u     = ((x & 0x7FFFFFFF) + 0.5) / 2**31, at most 1 - 2**-24
    noise = -log(-log1p(-u))                                          # float32

The integer arithmetic gives the same bits on every device. Shapes: B rows, V vocabulary.
"""

from __future__ import annotations

import torch
from torch import Tensor

MASK64 = (1 << 64) - 1
GOLDEN64 = 0x9E3779B97F4A7C15


def mix64(x: int) -> int:
    """The finalizer of splitmix64."""
    x &= MASK64
    x = ((x ^ (x >> 30)) * 0xBF58476D1CE4E5B9) & MASK64
    x = ((x ^ (x >> 27)) * 0x94D049BB133111EB) & MASK64
    return x ^ (x >> 31)


def row_key(seed: int, index: int) -> int:
    """The key of one sample, as a signed 64-bit number."""
    return _signed(mix64(mix64(seed) + index), 64)


def _signed(x: int, bits: int) -> int:
    return x - (1 << bits) if x >> (bits - 1) else x


def _mix64(x: Tensor) -> Tensor:
    """`mix64` on int64 tensors: products wrap, and shifts are masked to be logical."""
    x = (x ^ ((x >> 30) & ((1 << 34) - 1))) * _signed(0xBF58476D1CE4E5B9, 64)
    x = (x ^ ((x >> 27) & ((1 << 37) - 1))) * _signed(0x94D049BB133111EB, 64)
    return x ^ ((x >> 31) & ((1 << 33) - 1))


def token_hashes(vocab: int, device: torch.device) -> Tensor:
    """token * 0x9E3779B1 as int32, (V,)."""
    return (torch.arange(vocab, dtype=torch.int64, device=device) * 0x9E3779B1).to(torch.int32)


def gumbel(keys: Tensor, positions: Tensor, hashes: Tensor) -> Tensor:
    """keys (B,) int64, positions (..., B) int64, hashes (V,) int32 -> (..., B, V) float32 noise."""
    step = _mix64(keys + (positions + 1) * _signed(GOLDEN64, 64))
    low, high = step.to(torch.int32)[..., None], (step >> 32).to(torch.int32)[..., None]
    x = low ^ hashes
    x ^= (x >> 16).bitwise_and_(0xFFFF)
    x *= _signed(0x85EBCA6B, 32)
    x ^= high
    x ^= (x >> 13).bitwise_and_(0x7FFFF)
    x *= _signed(0xC2B2AE35, 32)
    x ^= (x >> 16).bitwise_and_(0xFFFF)
    # -u in two steps: a power of two scales exactly, so this rounds as (x + 0.5) / 2**31 does
    minus_u = x.bitwise_and_(0x7FFFFFFF).to(torch.float32).mul_(-(2.0**-31)).sub_(2.0**-32).clamp_(min=2.0**-24 - 1)
    return minus_u.log1p_().neg_().log_().neg_()
