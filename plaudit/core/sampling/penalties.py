"""Repetition, presence and frequency penalties over each row's tokens so far, as vLLM defines them.

Shapes: B rows, P of them penalised, V vocabulary.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch
from torch import Tensor

from plaudit.core.sampling.sampling_params import SamplingParams


class Penalties:
    """seen    (P, V) bool: tokens of the prompt and generated tokens
    counts  (P, V) how often each token was generated
    """

    def __init__(self, params: Sequence[SamplingParams], rows: list[int], hashes: Tensor) -> None:
        def column(name: str) -> Tensor:
            return torch.tensor([float(getattr(params[row], name)) for row in rows], device=hashes.device)[:, None]

        self.rows_P = torch.tensor(rows, device=hashes.device)
        self.repetition, self.presence, self.frequency = map(
            column, ("repetition_penalty", "presence_penalty", "frequency_penalty")
        )
        self.seen_PV = torch.zeros(len(rows), len(hashes), dtype=torch.bool, device=hashes.device)
        self.counts_PV = torch.zeros(len(rows), len(hashes), device=hashes.device)

    def begin(self, tokens: Sequence[Sequence[int]], prompts: Sequence[int]) -> None:
        """Set the counts from the tokens of all rows; earlier draws, which may have been discarded, are forgotten."""
        vocabulary = self.counts_PV.shape[1]
        for i, row in enumerate(self.rows_P.tolist()):
            counts = np.bincount(np.asarray(tokens[row][prompts[row] :], dtype=np.int64), minlength=vocabulary)
            whole = np.bincount(np.asarray(tokens[row], dtype=np.int64), minlength=vocabulary)
            self.counts_PV[i] = torch.from_numpy(counts)
            self.seen_PV[i] = torch.from_numpy(whole > 0)

    def note(self, tokens_B: Tensor) -> None:
        """Add the token that each row has drawn. Finished rows keep drawing, which is discarded."""
        drawn_P1 = tokens_B[self.rows_P][:, None]
        self.seen_PV.scatter_(1, drawn_P1, True)
        self.counts_PV.scatter_add_(1, drawn_P1, torch.ones_like(self.repetition))

    def applied(self, logits_BV: Tensor) -> Tensor:
        mine_PV, dtype = logits_BV[self.rows_P], logits_BV.dtype
        repetition = self.repetition.to(dtype)
        repeated_PV = torch.where(mine_PV > 0, mine_PV / repetition, mine_PV * repetition)
        mine_PV = torch.where(self.seen_PV, repeated_PV, mine_PV)
        mine_PV = mine_PV - self.frequency.to(dtype) * self.counts_PV.to(dtype)
        mine_PV = mine_PV - self.presence.to(dtype) * (self.counts_PV > 0).to(dtype)
        return logits_BV.index_copy(0, self.rows_P, mine_PV)
