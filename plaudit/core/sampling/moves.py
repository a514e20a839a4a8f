"""Logit processors before the temperature, in vLLM's order: biases, forbidden and early end tokens, allowed tokens,
penalties; then constraints.

Shapes: B rows, V vocabulary, E entries (row, token), A rows with allowed tokens, C rows with a constraint.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch
from torch import Tensor

from plaudit.core.sampling.constraint import Constraint
from plaudit.core.sampling.penalties import Penalties
from plaudit.core.sampling.sampling_params import SamplingParams


class Moves:
    def __init__(self, params: Sequence[SamplingParams], stop_ids: Sequence[frozenset[int]], hashes: Tensor) -> None:
        device, vocabulary = hashes.device, len(hashes)
        biases = [(row, token, bias) for row, p in enumerate(params) for token, bias in p.logit_bias.items()]
        biases += [(row, token, float("-inf")) for row, p in enumerate(params) for token in p.bad_words_ids]
        rows, tokens, values = zip(*biases, strict=True) if biases else ((), (), ())
        self.biased = torch.tensor(rows, device=device).long(), torch.tensor(tokens, device=device).long()
        self.bias_E = torch.tensor(values, device=device)
        pairs = [(row, t) for row, p in enumerate(params) if p.min_tokens > 0 for t in sorted(stop_ids[row])]
        self.endings = tuple(torch.tensor(pairs, device=device).long().reshape(-1, 2).T)  # forbidden before min_tokens
        self.minimum = torch.tensor([p.min_tokens for p in params], device=device)
        allowing = [row for row, p in enumerate(params) if p.allowed_token_ids is not None]
        barred_AV = torch.ones(len(allowing), vocabulary, dtype=torch.bool)
        for i, row in enumerate(allowing):
            barred_AV[i, list(params[row].allowed_token_ids or ())] = False
        self.allowing_A, self.barred_AV = torch.tensor(allowing, device=device).long(), barred_AV.to(device)
        penalised = [row for row, p in enumerate(params) if p.penalises]
        self.penalties = Penalties(params, penalised, hashes) if penalised else None
        self.constraints: list[tuple[int, Constraint]] = []

    def begin(
        self, tokens: Sequence[Sequence[int]], prompts: Sequence[int], constraints: Sequence[Constraint | None]
    ) -> None:  # fmt: skip
        if self.penalties is not None:
            self.penalties.begin(tokens, prompts)
        self.constraints = [(row, each) for row, each in enumerate(constraints) if each is not None]
        for row, constraint in self.constraints:
            constraint.follow(tokens[row][prompts[row] :])

    def note(self, tokens_B: Tensor) -> None:
        if self.penalties is not None:
            self.penalties.note(tokens_B)
        if self.constraints:
            drawn = tokens_B.tolist()
            for row, constraint in self.constraints:
                constraint.consume(drawn[row])

    def applied(self, logits_BV: Tensor, positions_B: Tensor) -> Tensor:
        """The processed logits, a new tensor. positions: how many tokens each row has generated so far."""
        dtype = logits_BV.dtype
        moved_BV = logits_BV.index_put(self.biased, self.bias_E.to(dtype), accumulate=True)
        early_E = (positions_B < self.minimum)[self.endings[0]]
        moved_BV.index_put_(self.endings, torch.where(early_E, float("-inf"), 0.0).to(dtype), accumulate=True)
        moved_BV[self.allowing_A] = moved_BV[self.allowing_A].masked_fill(self.barred_AV, float("-inf"))
        if self.penalties is not None:
            moved_BV = self.penalties.applied(moved_BV)
        if not self.constraints:
            return moved_BV
        rows_C = torch.tensor([row for row, _ in self.constraints], device=logits_BV.device)
        barred_CV = torch.from_numpy(np.stack([each.barred() for _, each in self.constraints])).to(logits_BV.device)
        return moved_BV.index_copy(0, rows_C, moved_BV[rows_C].masked_fill(barred_CV, float("-inf")))
