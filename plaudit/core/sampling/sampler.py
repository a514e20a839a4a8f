"""Sampling: draws tokens from logits for a whole batch at once, with the same result for each row in any batch.

A token is drawn by adding Gumbel noise to the log-probabilities and taking the largest. The noise is a pure function of
(seed, sample index, output position, token id), see `noise.py`. So a sample does not depend on the rest of the batch,
and a preempted sequence continues with the same tokens.

Shapes: B rows, V vocabulary, F rows that are filtered.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from plaudit.algo.tokens.logprobs import kernel_logprobs, on_kernel, token_logprobs_of, top_logprobs
from plaudit.core.sampling.constraint import Constraint
from plaudit.core.sampling.moves import Moves
from plaudit.core.sampling.noise import gumbel
from plaudit.core.sampling.sampling_params import SamplingParams


def _argmax(x: Tensor) -> Tensor:
    """Argmax of each row; numpy's is five times faster than torch's on a CPU. Both take the first of equal values."""
    return torch.from_numpy(x.numpy().argmax(axis=1)) if x.device.type == "cpu" else x.argmax(dim=1)


@dataclass(frozen=True)
class Drawn:
    tokens: Tensor  # (B,) int64
    logprobs: Tensor  # (B,) float32, under the distribution that was sampled
    raw_logprobs: Tensor  # (B,) float32, at temperature 1 without any processing
    tempered: Tensor | None = None  # (B,) under the full softmax at each row's temperature; None: same as `logprobs`
    top: tuple[Tensor, Tensor] | None = None  # (B, N) the most likely tokens and their raw log-probs, if requested


class Sampler:
    """The sampling parameters of a batch as tensors. `draw` has no host decisions that depend on tensor values."""

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
        distinct = {id(p): p for p in params}  # many rows share one
        self.moves = Moves(params, stop_ids, hashes) if any(p.moves for p in distinct.values()) else None
        self.top = max((p.top_logprobs for p in distinct.values()), default=0)
        reshapes = {number: p.reshapes for number, p in distinct.items()}
        self.reshaped = torch.tensor([reshapes[id(p)] for p in params], device=device)
        self.reshapes = any(reshapes.values())
        self.filtered = torch.tensor([i for i, p in enumerate(params) if p.truncates], device=device)
        chosen = [params[i] for i in self.filtered.tolist()]
        vocab = len(hashes)
        self.top_k = torch.tensor([min(p.top_k or vocab, vocab) for p in chosen], device=device)[:, None]
        self.top_p = torch.tensor([p.top_p for p in chosen], device=device)[:, None]
        self.min_p = torch.tensor([p.min_p for p in chosen], device=device)[:, None]

    @property
    def by_kernel(self) -> bool:
        """Whether the sampling kernels support all its options: temperature and truncation."""
        return self.moves is None and self.top == 0

    def begin(
        self, tokens: Sequence[Sequence[int]], prompts: Sequence[int], constraints: Sequence[Constraint | None]
    ) -> None:  # fmt: skip
        """Set the rows' tokens before the next draw; the first `prompts` of each are the prompt."""
        if self.moves is not None:
            self.moves.begin(tokens, prompts, constraints)

    def note(self, tokens_B: Tensor) -> None:
        """Add the token that each row has drawn."""
        if self.moves is not None:
            self.moves.note(tokens_B)

    def noise(self, positions: Tensor) -> Tensor:
        """positions (..., B) -> the noise that `draw` adds, (..., B, V), of many steps at once: it needs no logits."""
        if self.all_greedy:
            return torch.zeros(*positions.shape, 1, device=positions.device)
        return gumbel(self.keys, positions, self.hashes)

    def draw(self, logits_BV: Tensor, positions_B: Tensor, noise_BV: Tensor | None = None) -> Drawn:
        """logits: float32. positions: how many tokens each row has generated so far. noise: if already computed."""
        shaped_BV = self._shaped(logits_BV, positions_B)
        if self.all_greedy:
            noisy_BV = shaped_BV
        else:
            noisy_BV = shaped_BV + (self.noise(positions_B) if noise_BV is None else noise_BV)
            if self.any_greedy:
                noisy_BV = torch.where(self.greedy[:, None], shaped_BV, noisy_BV)
        tokens_B = _argmax(noisy_BV)
        fused = on_kernel(logits_BV)  # bit-equal to a decode graph's draw and to a learner
        plain_B = torch.ones_like(self.inverse[:, 0])
        raw_B = kernel_logprobs(logits_BV, tokens_B, plain_B)[0] if fused else token_logprobs_of(logits_BV, tokens_B)
        top = top_logprobs(logits_BV, self.top) if self.top else None
        if self.all_greedy:
            return Drawn(tokens_B, torch.zeros_like(raw_B), raw_B, None, top)
        if not self.tempered:
            tempered_B = raw_B
        elif fused:
            tempered_B = kernel_logprobs(logits_BV, tokens_B, self.inverse[:, 0])[0]
        else:
            tempered_B = token_logprobs_of(self._tempered(logits_BV) if self.reshapes else shaped_BV, tokens_B)
        if self.any_greedy:
            tempered_B = tempered_B.masked_fill(self.greedy, 0.0)
        if not self.reshapes:
            return Drawn(tokens_B, tempered_B, raw_B, None, top)
        logprobs_B = torch.where(self.reshaped, token_logprobs_of(shaped_BV, tokens_B), tempered_B)
        return Drawn(tokens_B, logprobs_B, raw_B, tempered_B, top)

    def _tempered(self, logits_BV: Tensor) -> Tensor:
        return logits_BV * self.inverse.to(logits_BV.dtype) if self.tempered else logits_BV

    def _shaped(self, logits_BV: Tensor, positions_B: Tensor) -> Tensor:
        """Apply moves, temperature and filters. Returns the logits themselves if none applies."""
        shaped_BV = logits_BV if self.moves is None else self.moves.applied(logits_BV, positions_B)
        shaped_BV = self._tempered(shaped_BV)
        if len(self.filtered):
            shaped_BV = shaped_BV.index_copy(0, self.filtered, self._kept(shaped_BV[self.filtered]))
        return shaped_BV

    def _kept(self, logits_FV: Tensor) -> Tensor:
        """Apply min_p, then top_k, then top_p; ties go to the lower token id, and the best token always stays."""
        ordered_FV, order_FV = torch.sort(logits_FV, dim=1, descending=True, stable=True)
        rank_V = torch.arange(logits_FV.shape[1], device=logits_FV.device)
        share_FV = torch.softmax(ordered_FV, dim=1)
        drop_FV = (rank_V >= self.top_k) | (share_FV < self.min_p * share_FV[:, :1])
        share_FV = torch.softmax(ordered_FV.masked_fill(drop_FV, float("-inf")), dim=1)
        drop_FV |= share_FV.cumsum(dim=1) - share_FV >= self.top_p
        drop_FV[:, 0] = False
        return logits_FV.masked_fill(drop_FV.scatter(1, order_FV, drop_FV), float("-inf"))
