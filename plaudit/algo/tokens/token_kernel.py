"""Log-probabilities of tokens from their rows of logits, on a GPU: one order of sums for the sampler and the learner.

The vocabulary is read in blocks of BLOCK from the first token on. Within a block the sum is the compiler's tree over
WARPS warps; from block to block the running sum is rescaled to the higher peak; products and sums are rounded one by
one. `fold` implements that order, and every kernel that reads logits uses it with these constants, so the sampler's and
the learner's log-probs are bit-identical.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

BLOCK = 4096
WARPS = 8


@triton.jit
def fold(peak, total, x):
    """Fold a block of logits into the running peak and the sum of exp(logit - peak)."""
    higher = tl.maximum(peak, tl.max(x, axis=0))
    return higher, total * tl.exp(peak - higher) + tl.sum(tl.exp(x - higher), axis=0)


@triton.jit
def _token_logprobs(
    logits, targets, inverse, logprobs, normalisers, entropies, vocabulary, ENTROPY: tl.constexpr, BLOCK: tl.constexpr
):  # fmt: skip
    row = tl.program_id(0).to(tl.int64)
    scale = tl.load(inverse + row)
    peak, total, weighted = float("-inf"), 0.0, 0.0
    for start in range(0, vocabulary, BLOCK):
        token = start + tl.arange(0, BLOCK)
        inside = token < vocabulary
        raw = tl.load(logits + row * vocabulary + token, mask=inside, other=float("-inf")).to(tl.float32)
        shaped = raw * scale
        before, sum_before = peak, total
        peak, total = fold(peak, total, shaped)
        if ENTROPY:  # Σ (z - peak) exp(z - peak)
            moved = tl.where(before == float("-inf"), 0.0, weighted + (before - peak) * sum_before)
            part = tl.where(shaped == float("-inf"), 0.0, (shaped - peak) * tl.exp(shaped - peak))
            weighted = moved * tl.exp(before - peak) + tl.sum(part, axis=0)
    chosen = tl.load(logits + row * vocabulary + tl.load(targets + row)).to(tl.float32)
    tl.store(logprobs + row, chosen * scale - peak - tl.log(total))
    tl.store(normalisers + row, peak + tl.log(total))
    if ENTROPY:
        tl.store(entropies + row, tl.log(total) - weighted / total)


def token_logprobs(
    logits: Tensor, targets: Tensor, inverse: Tensor, entropies: Tensor | None = None
) -> tuple[Tensor, Tensor]:
    """log p of each row's target at its inverse temperature, and the row's normaliser, from logits (R, V) in float32.

    targets, inverse  (R,) token ids, float32
    entropies         (R,) float32, output for the entropies
    """
    rows, vocabulary = logits.shape
    logprobs, normalisers = (torch.empty(rows, device=logits.device) for _ in range(2))
    if rows:
        _token_logprobs[(rows,)](
            logits, targets.contiguous(), inverse.contiguous(), logprobs, normalisers,
            logprobs if entropies is None else entropies, vocabulary, ENTROPY=entropies is not None,
            BLOCK=min(BLOCK, triton.next_power_of_2(vocabulary)), num_warps=WARPS, enable_fp_fusion=False,
        )  # fmt: skip
    return logprobs, normalisers
