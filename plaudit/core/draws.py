"""From what a step has drawn and read to the tokens of each sequence and the log-probs of its prompt."""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np
import torch

from plaudit.core.device.backend import Decoded
from plaudit.core.sequence import Draws, Sequence
from plaudit.records import Likely


def by_row(sequences: list[Sequence], decoded: Decoded) -> Iterator[Draws]:
    """What each sequence has drawn while it was alive."""
    counts = decoded.alive.numpy().sum(axis=0).tolist()
    columns = (decoded.tokens, decoded.logprobs, decoded.raw_logprobs)
    tokens, logprobs, raws = (np.ascontiguousarray(x.numpy().T).tolist() for x in columns)
    for row, (sequence, count) in enumerate(zip(sequences, counts, strict=True)):
        params = sequence.request.params
        tempered = decoded.tempered if params.reshapes else None
        yield Draws(
            tokens[row][:count], logprobs[row][:count], raws[row][:count],
            [] if tempered is None else tempered[:count, row].tolist(),
            _tops(decoded.top, row, count, params.top_logprobs),
        )  # fmt: skip


def _tops(top: tuple[torch.Tensor, torch.Tensor] | None, row: int, count: int, most: int) -> list[Likely]:
    if top is None or not most:
        return []
    ids, logprobs = (each[:count, row, :most].tolist() for each in top)
    return [tuple(zip(i, p, strict=True)) for i, p in zip(ids, logprobs, strict=True)]


def note_prompt(sequence: Sequence) -> None:
    """Some rows of a prompt were read; once these are all, its request has the log-probs."""
    request, read = sequence.request, sequence.request.prompt_read
    assert read is not None
    if sum(map(len, sequence.values)) < len(read.positions):
        return
    values, count = np.concatenate(sequence.values), read.likeliest
    request.prompt_read, sequence.values = None, []
    request.prompt_logprobs = tuple(values[:, 0].tolist())
    if count:
        ids, logprobs = values[:, 1 : 1 + count].astype(int).tolist(), values[:, 1 + count :].tolist()
        request.prompt_tops = tuple(tuple(zip(i, p, strict=True)) for i, p in zip(ids, logprobs, strict=True))
