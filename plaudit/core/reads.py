"""What is read from hidden rows when a sequence is scored instead of continued."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

import numpy as np
import torch
from torch import Tensor

from plaudit.core.decoder import Decoder


@dataclass(frozen=True, slots=True)
class Read:
    """`head`: class logits; `columns`: logits of a few vocabulary tokens; `logprobs`: log p of the next token.

    positions   ascending; the rows of the sequence to read
    """

    what: Literal["head", "columns", "logprobs"]
    positions: tuple[int, ...]
    columns: tuple[int, ...] = ()

    @property
    def first_position(self) -> int:
        return self.positions[0] if self.positions else 0

    def within(self, start: int, end: int) -> list[int]:
        return [p for p in self.positions if start <= p < end]


@dataclass(frozen=True, slots=True)
class Reading:
    """One sequence's share of the rows of a step."""

    read: Read
    tokens: Sequence[int]
    positions: Sequence[int]


def take(decoder: Decoder, rows: Tensor, readings: Sequence[Reading]) -> list[np.ndarray]:
    """Read each sequence's rows (they lie end to end in `rows`): (positions, values) or, for log-probs, (positions,).

    Sequences that want the same thing share one product.
    """
    offsets = np.cumsum([0, *(len(r.positions) for r in readings)])
    results: list[np.ndarray] = [np.empty(0, dtype=np.float32)] * len(readings)
    wants: dict[tuple[str, tuple[int, ...]], list[int]] = {}
    for i, reading in enumerate(readings):
        wants.setdefault((reading.read.what, reading.read.columns), []).append(i)
    for (what, columns), members in wants.items():
        if len(wants) == 1:
            chosen = rows
        else:
            at = np.concatenate([np.arange(offsets[i], offsets[i + 1]) for i in members])
            chosen = rows[torch.from_numpy(at).to(rows.device)]
        if len(chosen) == 0:
            continue
        values = _values(decoder, chosen, what, columns, [readings[i] for i in members]).cpu().numpy()
        start = 0
        for i in members:
            count = len(readings[i].positions)
            results[i] = values[start : start + count]
            start += count
    return results


def _values(decoder: Decoder, rows: Tensor, what: str, columns: tuple[int, ...], readings: Sequence[Reading]) -> Tensor:
    if what == "head":
        return decoder.head(rows)
    if what == "columns":
        return decoder.columns(rows, columns)
    targets = [r.tokens[p + 1] for r in readings for p in r.positions]
    return decoder.logprobs(rows, torch.tensor(targets, device=rows.device))
