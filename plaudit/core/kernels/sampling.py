"""Samples tokens inside the decode graph: counter-based Gumbel noise, log-probs of the drawn tokens.

Letters: T tokens, B rows of a decode batch, H query heads, K key-value heads, G = H / K, D head size, V vocabulary.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from plaudit.algo.tokens.early_launch import after_previous, early
from plaudit.algo.tokens.token_kernel import BLOCK, WARPS, fold
from plaudit.core.kernels.truncation import BEST, EVERYTHING, Truncation, cut_logit, key_logit, key_token

FEW = 64  # up to this many rows, each block of logits has its own program: one per row would leave most of a GPU idle
PARTS = (torch.float32, torch.float32, torch.int32, *(torch.float32,) * 4)  # values per block


@triton.jit
def _uniform(step, token):
    """The sampler's hash: 32 bits of noise for a token, as in `plaudit.core.sampling.noise`."""
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
def _gumbel(seed, token):
    u = _uniform(seed, token)
    # log1p(-u) by Kahan's method: exact for tiny u, which the winning tokens have
    rest = 1.0 - u
    difference = rest - 1.0
    return -tl.log(-tl.where(difference == 0.0, -u, tl.log(rest) * (u / -difference)))


@triton.jit
def _block_best(
    logits, keys, inverse, greedy, drawn, peaks, tops, winners, vocabulary, blocks, BLOCK: tl.constexpr,
    EARLY: tl.constexpr,
):  # fmt: skip
    after_previous(EARLY)
    row, block = tl.program_id(0).to(tl.int64), tl.program_id(1)
    noise_scale = 1.0 - tl.load(greedy + row).to(tl.float32)
    token = block * BLOCK + tl.arange(0, BLOCK)
    inside = token < vocabulary
    raw = tl.load(logits + row * vocabulary + token, mask=inside, other=float("-inf")).to(tl.float32)
    noise = _gumbel(_seed(keys, drawn, row), token)
    noisy = tl.where(inside, raw * tl.load(inverse + row) + noise_scale * noise, float("-inf"))
    top, where = tl.max(noisy, axis=0, return_indices=True)
    tl.store(peaks + row * blocks + block, tl.max(raw, axis=0))
    tl.store(tops + row * blocks + block, top)
    tl.store(winners + row * blocks + block, block * BLOCK + where)


@triton.jit
def _block_sums(
    logits, inverse, peaks, sums, scales, raw_sums, raw_scales, vocabulary, blocks, BLOCK: tl.constexpr,
    PADDED: tl.constexpr, EARLY: tl.constexpr,
):  # fmt: skip
    # A block's part in `fold`, whose running peak is the largest logit so far: by what it rescales, and what it adds.
    after_previous(EARLY)
    row, block = tl.program_id(0).to(tl.int64), tl.program_id(1)
    scale = tl.load(inverse + row)
    number = tl.arange(0, PADDED)
    earlier = tl.load(peaks + row * blocks + number, mask=number < block, other=float("-inf"))
    before = tl.max(earlier, axis=0)
    higher = tl.maximum(before, tl.load(peaks + row * blocks + block))
    token = block * BLOCK + tl.arange(0, BLOCK)
    raw = tl.load(logits + row * vocabulary + token, mask=token < vocabulary, other=float("-inf")).to(tl.float32)
    place = row * blocks + block
    tl.store(raw_scales + place, tl.exp(before - higher))
    tl.store(raw_sums + place, tl.sum(tl.exp(raw - higher), axis=0))
    if scale != 1.0:  # which keeps the order of logits, so that the largest stays the largest
        tl.store(scales + place, tl.exp(before * scale - higher * scale))
        tl.store(sums + place, tl.sum(tl.exp(raw * scale - higher * scale), axis=0))


@triton.jit
def _seed(keys, drawn, row):
    count = tl.load(drawn + row)
    return _mix64(tl.load(keys + row).to(tl.uint64) + (count + 1).to(tl.uint64) * 0x9E3779B97F4A7C15)


@triton.jit
def _advance(
    row, chosen, count, was_alive, tokens, positions, drawn, left, alive, stops, stop_count, STOPS: tl.constexpr
):  # fmt: skip
    """Advance a row to its next token, unless this one is a stop token or the last."""
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


@triton.jit
def _sample(
    logits, keys, inverse, greedy, tokens, positions, drawn, left, alive, stops, step, out_tokens, out_logprobs,
    out_raw, out_alive, out_tempered, cuts, kept_peaks, kept_totals, kept_best, kept_counts, block_peaks, block_tops,
    block_winners, block_sums, block_scales, raw_sums, raw_scales, rows, vocabulary, stop_count, blocks,
    STOPS: tl.constexpr, BLOCK: tl.constexpr, TRUNCATED: tl.constexpr, EVERYTHING: tl.constexpr, BEST: tl.constexpr,
    BLOCKS: tl.constexpr, EARLY: tl.constexpr,
):  # fmt: skip
    after_previous(EARLY)
    row = tl.program_id(0).to(tl.int64)
    scale = tl.load(inverse + row)
    noise_scale = 1.0 - tl.load(greedy + row).to(tl.float32)
    count = tl.load(drawn + row)
    seed = _seed(keys, drawn, row)
    best = float("-inf")
    chosen = 0
    few = 0
    if TRUNCATED:
        cut = tl.load(cuts + row)
        lowest, highest_id = cut_logit(cut, EVERYTHING)
        few = tl.load(kept_counts + row)
        if few > 0:  # all kept tokens are in a list; the rest of the vocabulary needs no noise
            at = tl.arange(0, BEST)
            key = tl.load(kept_best + row * BEST + at, mask=at < few, other=0)
            mine = key_token(key).to(tl.int32)
            noisy = tl.where(at < few, key_logit(key) + noise_scale * _gumbel(seed, mine), float("-inf"))
            best = tl.max(noisy, axis=0)
            chosen = tl.min(tl.where((noisy == best) & (at < few), mine, 0x7FFFFFFF), axis=0)
    raw_peak, raw_sum, peak, total = float("-inf"), 0.0, float("-inf"), 0.0
    if BLOCKS > 0:  # other programs have read them
        number = tl.arange(0, BLOCKS)
        tops = tl.load(block_tops + row * blocks + number, mask=number < blocks, other=float("-inf"))
        winners = tl.load(block_winners + row * blocks + number, mask=number < blocks, other=0)
        chosen = tl.min(tl.where((tops == tl.max(tops, axis=0)) & (number < blocks), winners, 0x7FFFFFFF), axis=0)
        peaks = tl.load(block_peaks + row * blocks + number, mask=number < blocks, other=float("-inf"))
        raw_peak = tl.max(peaks, axis=0)
        peak = raw_peak * scale
        for block in range(blocks):
            place = row * blocks + block
            raw_sum = raw_sum * tl.load(raw_scales + place) + tl.load(raw_sums + place)
            if scale != 1.0:
                total = total * tl.load(block_scales + place) + tl.load(block_sums + place)
    for start in range(0, vocabulary if BLOCKS == 0 else 0, BLOCK):
        token = start + tl.arange(0, BLOCK)
        inside = token < vocabulary
        raw = tl.load(logits + row * vocabulary + token, mask=inside, other=float("-inf")).to(tl.float32)
        shaped = raw * scale
        if few == 0:
            if TRUNCATED:
                allowed = inside & ((shaped > lowest) | ((shaped == lowest) & (token <= highest_id)))
            else:
                allowed = inside
            noisy = tl.where(allowed, shaped + noise_scale * _gumbel(seed, token), float("-inf"))
            top, where = tl.max(noisy, axis=0, return_indices=True)
            chosen = tl.where(top > best, start + where, chosen)
            best = tl.maximum(top, best)
        raw_peak, raw_sum = fold(raw_peak, raw_sum, raw)
        if scale != 1.0:
            peak, total = fold(peak, total, shaped)
    if scale == 1.0:
        peak, total = raw_peak, raw_sum
    raw_logit = tl.load(logits + row * vocabulary + chosen).to(tl.float32)
    place = tl.load(step) * rows + row
    tl.store(out_tempered + place, noise_scale * (raw_logit * scale - peak - tl.log(total)))
    if TRUNCATED:  # noqa: SIM102 (this is known when it compiles, the other is not)
        if cut != EVERYTHING:
            peak, total = tl.load(kept_peaks + row), tl.load(kept_totals + row)
    was_alive = tl.load(alive + row)
    tl.store(out_tokens + place, chosen.to(tl.int64))
    tl.store(out_raw + place, raw_logit - raw_peak - tl.log(raw_sum))
    tl.store(out_logprobs + place, noise_scale * (raw_logit * scale - peak - tl.log(total)))
    tl.store(out_alive + place, was_alive)
    _advance(row, chosen, count, was_alive, tokens, positions, drawn, left, alive, stops, stop_count, STOPS)


def sample(
    logits: Tensor, keys: Tensor, inverse: Tensor, greedy: Tensor, state: tuple[Tensor, ...], stops: Tensor,
    step: Tensor, outputs: tuple[Tensor, ...], truncation: Truncation | None = None,
) -> None:  # fmt: skip
    """Draw a token for every row, store it at outputs[step], and advance the rows that stay alive.

    state       tokens, positions, drawn, left, alive of a DecodeBatch, changed in place
    outputs     tokens, logprobs, raw_logprobs, alive, tempered of a Decoded
    truncation  the tokens kept of these logits; None: all
    """
    rows, vocabulary = logits.shape
    width = min(BLOCK, triton.next_power_of_2(vocabulary))
    blocks = triton.cdiv(vocabulary, width)
    parts: tuple[Tensor, ...] = (inverse,) * 7
    apart = truncation is None and rows <= FEW and blocks > 1
    if apart:
        parts = tuple(torch.empty(rows, blocks, dtype=dtype, device=logits.device) for dtype in PARTS)
        peaks, tops, winners, *sums = parts
        _block_best[(rows, blocks)](
            logits, keys, inverse, greedy, state[2], peaks, tops, winners, vocabulary, blocks, BLOCK=width,
            num_warps=WARPS, enable_fp_fusion=False, **early(logits),
        )  # fmt: skip
        _block_sums[(rows, blocks)](
            logits, inverse, peaks, *sums, vocabulary, blocks, BLOCK=width, PADDED=triton.next_power_of_2(blocks),
            num_warps=WARPS, enable_fp_fusion=False, **early(logits),
        )  # fmt: skip
    kept: tuple[Tensor, ...] = (inverse,) * 5
    if truncation is not None:
        kept = (truncation.cuts, truncation.peaks, truncation.totals, truncation.best, truncation.counts)
    _sample[(rows,)](
        logits, keys, inverse, greedy, *state, stops, step, *outputs, *kept, *parts, rows, vocabulary, stops.shape[1],
        blocks, STOPS=triton.next_power_of_2(stops.shape[1]), BLOCK=width, TRUNCATED=truncation is not None,
        EVERYTHING=EVERYTHING, BEST=BEST, BLOCKS=triton.next_power_of_2(blocks) if apart else 0,
        num_warps=1 if apart else WARPS, enable_fp_fusion=False, **early(logits),
    )  # fmt: skip
