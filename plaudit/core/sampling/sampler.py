"""Sampling: from logits to tokens, for a whole batch at once and for each row as if it were alone.

A token is drawn by adding Gumbel noise to the log-probabilities and taking the largest. The noise is a pure function of
(seed, sample index, output position, token id), written in integer arithmetic that any device repeats exactly:

    row   = mix64(mix64(seed) + index)
    step  = mix64(row + (position + 1) * 0x9E3779B97F4A7C15)          # 64 bits, low and high half
    x     = low(step) ^ (token * 0x9E3779B1)                          # 32 bits from here, shifts are logical
    x     = (x ^ x >> 16) * 0x85EBCA6B;  x ^= high(step)
    x     = (x ^ x >> 13) * 0xC2B2AE35;  x ^= x >> 16
    u     = ((x & 0x7FFFFFFF) + 0.5) / 2**31, at most 1 - 2**-24
    noise = -log(-log1p(-u))                                          # float32

So a sample depends on nothing around it, and a preempted sequence goes on as if nothing had happened.

Shapes: B rows, V vocabulary, E entries (row, token) of biases or endings, F rows that are filtered.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from plaudit.algo.tokens.logprobs import kernel_logprobs, on_kernel
from plaudit.core.sampling.sampling_params import SamplingParams

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
    """`mix64` on int64 tensors, whose products wrap and whose shifts must be masked to be logical."""
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


def _argmax(x: Tensor) -> Tensor:
    """Of each row; numpy's is five times faster than torch's on a CPU. Both take the first of equals."""
    return torch.from_numpy(x.numpy().argmax(axis=1)) if x.device.type == "cpu" else x.argmax(dim=1)


def _logprobs(logits_BV: Tensor, tokens_B: Tensor) -> Tensor:
    return torch.log_softmax(logits_BV, dim=1).gather(1, tokens_B[:, None])[:, 0]


@dataclass(frozen=True)
class Drawn:
    tokens: Tensor  # (B,) int64
    logprobs: Tensor  # (B,) float32, under the distribution that was sampled
    raw_logprobs: Tensor  # (B,) float32, temperature 1 and nothing applied


class Sampler:
    """The options of a batch's rows as tensors. `draw` has no host decisions that depend on tensor values."""

    def __init__(
        self, params: Sequence[SamplingParams], keys: Sequence[int], stop_ids: Sequence[frozenset[int]],
        hashes: Tensor,
    ) -> None:  # fmt: skip
        device = hashes.device
        self.hashes = hashes
        self.keys = torch.tensor(list(keys), dtype=torch.int64, device=device)
        temperatures = [p.temperature for p in params]
        self.greedy = torch.tensor([t == 0 for t in temperatures], device=device)
        self.all_greedy = all(t == 0 for t in temperatures)
        self.any_greedy = any(t == 0 for t in temperatures)
        self.inverse = torch.tensor([1 / t if t > 0 else 1.0 for t in temperatures], device=device)[:, None]
        self.tempered = any(t not in (0, 1) for t in temperatures)
        self.bias = self._bias(params)
        self.minimum = torch.tensor([p.min_tokens for p in params], device=device)
        self.endings = self._endings(params, stop_ids)
        self.filtered = torch.tensor(
            [i for i, p in enumerate(params) if p.top_k > 0 or p.top_p < 1 or p.min_p > 0], device=device
        )
        chosen = [params[i] for i in self.filtered.tolist()]
        vocab = len(hashes)
        self.top_k = torch.tensor([p.top_k or vocab for p in chosen], device=device)[:, None]
        self.top_p = torch.tensor([p.top_p for p in chosen], device=device)[:, None]
        self.min_p = torch.tensor([p.min_p for p in chosen], device=device)[:, None]

    def _bias(self, params: Sequence[SamplingParams]) -> tuple[Tensor, Tensor, Tensor] | None:
        entries = [(row, token, bias) for row, p in enumerate(params) for token, bias in p.logit_bias.items()]
        if not entries:
            return None
        rows, tokens, values = zip(*entries, strict=True)
        device = self.hashes.device
        return (
            torch.tensor(rows, device=device), torch.tensor(tokens, device=device), torch.tensor(values, device=device)
        )  # fmt: skip

    def _endings(
        self, params: Sequence[SamplingParams], stop_ids: Sequence[frozenset[int]]
    ) -> tuple[Tensor, Tensor] | None:
        """(row, token) pairs that must not come before the row's min_tokens."""
        pairs = [(row, t) for row, p in enumerate(params) if p.min_tokens > 0 for t in sorted(stop_ids[row])]
        if not pairs:
            return None
        rows, tokens = zip(*pairs, strict=True)
        return torch.tensor(rows, device=self.hashes.device), torch.tensor(tokens, device=self.hashes.device)

    def noise(self, positions: Tensor) -> Tensor:
        """positions (..., B) -> what `draw` adds at these positions, (..., B, V). It does not depend on logits, so it
        can be made for many steps at once."""
        if self.all_greedy:
            return torch.zeros(*positions.shape, 1, device=positions.device)
        return gumbel(self.keys, positions, self.hashes)

    def draw(self, logits_BV: Tensor, positions_B: Tensor, noise_BV: Tensor | None = None) -> Drawn:
        """logits: float32. positions: how many tokens each row has generated so far. noise: if it is made already."""
        shaped_BV = self._shaped(logits_BV, positions_B)
        if self.all_greedy:
            noisy_BV = shaped_BV
        else:
            noisy_BV = shaped_BV + (self.noise(positions_B) if noise_BV is None else noise_BV)
            if self.any_greedy:
                noisy_BV = torch.where(self.greedy[:, None], shaped_BV, noisy_BV)
        tokens_B = _argmax(noisy_BV)
        fused = on_kernel(logits_BV)  # with the bits of a decode graph's draw
        plain_B = torch.ones_like(self.inverse[:, 0])
        picked_B = kernel_logprobs(logits_BV, tokens_B, plain_B)[0] if fused else _logprobs(logits_BV, tokens_B)
        if self.all_greedy:
            return Drawn(tokens_B, torch.zeros_like(picked_B), picked_B)
        if shaped_BV is logits_BV:
            return Drawn(tokens_B, picked_B, picked_B)
        if fused and self.bias is None and self.endings is None and not len(self.filtered):
            logprobs_B = kernel_logprobs(logits_BV, tokens_B, self.inverse[:, 0])[0]
        else:
            logprobs_B = _logprobs(shaped_BV, tokens_B)
        if self.any_greedy:
            logprobs_B = logprobs_B.masked_fill(self.greedy, 0.0)
        return Drawn(tokens_B, logprobs_B, picked_B)

    def _shaped(self, logits_BV: Tensor, positions_B: Tensor) -> Tensor:
        """Bias, forbidden endings, temperature and filters. Returns the logits themselves where none applies."""
        shaped_BV = logits_BV
        if self.bias is not None:
            rows_E, tokens_E, values_E = self.bias
            shaped_BV = shaped_BV.index_put((rows_E, tokens_E), values_E.to(shaped_BV.dtype), accumulate=True)
        if self.endings is not None:
            rows_E, tokens_E = self.endings
            early_E = (positions_B < self.minimum)[rows_E]
            barred_E = torch.where(early_E, float("-inf"), 0.0).to(shaped_BV.dtype)
            shaped_BV = shaped_BV.index_put((rows_E, tokens_E), barred_E, accumulate=True)
        if self.tempered:
            shaped_BV = shaped_BV * self.inverse.to(shaped_BV.dtype)
        if len(self.filtered):
            shaped_BV = shaped_BV.index_copy(0, self.filtered, self._kept(shaped_BV[self.filtered]))
        if self.any_greedy and shaped_BV is logits_BV:
            shaped_BV = logits_BV.clone()  # a new object: the caller must not take it for the raw distribution
        return shaped_BV

    def _kept(self, logits_FV: Tensor) -> Tensor:
        """top_k, then top_p, then min_p; ties go to the lower token id, and the best token always stays."""
        ordered_FV, order_FV = torch.sort(logits_FV, dim=1, descending=True, stable=True)
        rank_V = torch.arange(logits_FV.shape[1], device=logits_FV.device)
        drop_FV = rank_V >= self.top_k
        share_FV = torch.softmax(ordered_FV.masked_fill(drop_FV, float("-inf")), dim=1)
        drop_FV |= share_FV.cumsum(dim=1) - share_FV >= self.top_p
        share_FV = share_FV.masked_fill(drop_FV, 0.0)
        drop_FV |= share_FV < self.min_p * share_FV[:, :1]
        drop_FV[:, 0] = False
        return logits_FV.masked_fill(drop_FV.scatter(1, order_FV, drop_FV), float("-inf"))
