"""Reads values from hidden rows when a sequence is scored instead of continued."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

import numpy as np
import torch
from torch import Tensor

from plaudit.core.model.decoder import Decoder
from plaudit.core.model.packing import send
from plaudit.records import NEXT


@dataclass(frozen=True, slots=True)
class Read:
    """`head`: class logits; `columns`: logits of a few vocabulary tokens; `logprobs`: their log-probabilities.

    positions   ascending; the rows of the sequence to read
    columns     vocabulary tokens; for log-probs also NEXT, the token that follows each position
    hidden      whether the hidden row itself is appended to the values
    likeliest   for log-probs: how many of the most likely tokens are appended, as ids and then as log-probs
    ranks       for log-probs: whether the rank in the vocabulary of the token that follows is appended, before those
    """

    what: Literal["head", "columns", "logprobs"]
    positions: tuple[int, ...]
    columns: tuple[int, ...] = ()
    hidden: bool = False
    likeliest: int = 0
    ranks: bool = False

    @property
    def first_position(self) -> int:
        return self.positions[0] if self.positions else 0

    def within(self, start: int, end: int) -> list[int]:
        return [p for p in self.positions if start <= p < end]


@dataclass(frozen=True, slots=True)
class Reading:
    """One sequence's rows in a step."""

    read: Read
    tokens: Sequence[int]
    positions: Sequence[int]


@dataclass(frozen=True)
class PendingReadout:
    """Values on their way to the host. A GPU continues with the next batch: the copy is queued after the batch that was
    read and before the next one, so that `arrays` does not wait for the next one."""

    readings: Sequence[Reading]
    parts: list[tuple[list[int], Tensor]]  # which readings, and their values concatenated
    copied: torch.cuda.Event | None

    def arrays(self) -> list[np.ndarray]:
        """Per sequence, (positions, values)."""
        if self.copied is not None:
            self.copied.synchronize()
        results: list[np.ndarray] = [np.empty(0, dtype=np.float32)] * len(self.readings)
        for members, tensor in self.parts:
            # Pinned memory is only used for copies and returns to the pool.
            values, start = tensor.numpy() if self.copied is None else tensor.numpy().copy(), 0
            for i in members:
                count = len(self.readings[i].positions)
                results[i] = values[start : start + count]
                start += count
        return results


def take(decoder: Decoder, rows: Tensor, readings: Sequence[Reading]) -> PendingReadout:
    """Read each sequence's rows, which are concatenated in `rows`. Sequences with equal requests share one product."""
    offsets = np.cumsum([0, *(len(r.positions) for r in readings)])
    parts: list[tuple[list[int], Tensor]] = []
    wants: dict[tuple[str, tuple[int, ...], bool, int, bool], list[int]] = {}
    for i, reading in enumerate(readings):
        read = reading.read
        wants.setdefault((read.what, read.columns, read.hidden, read.likeliest, read.ranks), []).append(i)
    for (what, columns, hidden, likeliest, ranks), members in wants.items():
        if len(wants) == 1:
            chosen = rows
        else:
            at = np.concatenate([np.arange(offsets[i], offsets[i + 1]) for i in members])
            chosen = rows[send(at, rows.device)]
        if len(chosen) == 0:
            continue
        values = _values(decoder, chosen, what, columns, [readings[i] for i in members])
        if ranks:
            following = send(np.array(_following([readings[i] for i in members])), rows.device)
            values = torch.cat([values, decoder.ranks(chosen, following)], dim=1)
        if likeliest:
            values = torch.cat([values, decoder.likeliest(chosen, likeliest)], dim=1)
        if hidden:
            values = torch.cat([values, chosen.to(values.dtype)], dim=1)
        parts.append((members, _to_host(values)))
    copied = None
    if rows.is_cuda:
        copied = torch.cuda.Event()  # type: ignore[no-untyped-call]
        copied.record()
    return PendingReadout(readings, parts, copied)


def _to_host(values: Tensor) -> Tensor:
    """A host tensor that a GPU fills once its queued work is done."""
    if not values.is_cuda:
        return values.cpu()
    return torch.empty(values.shape, dtype=values.dtype, pin_memory=True).copy_(values, non_blocking=True)


def _values(decoder: Decoder, rows: Tensor, what: str, columns: tuple[int, ...], readings: Sequence[Reading]) -> Tensor:
    if what == "head":
        return decoder.head(rows)
    if what == "columns":
        return decoder.columns(rows, columns)
    targets = np.empty((len(rows), len(columns)), dtype=np.int64)
    for i, column in enumerate(columns):
        targets[:, i] = _following(readings) if column == NEXT else column
    return decoder.logprobs(rows, send(targets, rows.device))


def _following(readings: Sequence[Reading]) -> list[int]:
    """The token behind each position."""
    return [r.tokens[p + 1] for r in readings for p in r.positions]
