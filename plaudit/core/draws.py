"""Applies a step's sampled tokens to its sequences and collects the log-probs of prompts."""

from __future__ import annotations

import math
from collections.abc import Iterator
from itertools import chain

import numpy as np
import torch

from plaudit.core.device.backend import Decoded
from plaudit.core.sequence import Draws, Sequence
from plaudit.records import ItemError, Likely


def by_row(sequences: list[Sequence], decoded: Decoded) -> Iterator[Draws]:
    """The draws of each sequence while it was alive."""
    counts = decoded.alive.numpy().sum(axis=0).tolist()
    columns = (decoded.tokens, decoded.logprobs, decoded.raw_logprobs)
    tokens, logprobs, raws = (np.ascontiguousarray(x.numpy().T).tolist() for x in columns)
    for row, (sequence, count) in enumerate(zip(sequences, counts, strict=True)):
        params = sequence.request.params
        tempered = decoded.tempered if decoded.tempered is not None and params.reshapes else None
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


def padded(rows: list[list[int]] | list[frozenset[int]], filler: int) -> np.ndarray:
    """Rows of numbers as one array, padded, at least one column wide."""
    counts = np.array([len(row) for row in rows])
    made = np.full((len(rows), max(1, counts.max())), filler, dtype=np.int64)
    made[np.arange(made.shape[1]) < counts[:, None]] = np.fromiter(chain.from_iterable(rows), np.int64, counts.sum())
    return made


def accept_all(sequence: Sequence, draws: Draws, version: int) -> int:
    """Append drawn tokens whose stop conditions the back end has checked; returns how many."""
    sequence.take(draws, version)
    if draws.tokens[-1] in sequence.request.stop_ids:
        sequence.finish = "stop"
    elif sequence.remaining == 0:
        sequence.finish = "length"
    return len(draws.tokens)


def accept(sequence: Sequence, draws: Draws, version: int, model: str) -> int:
    """Append drawn tokens until one ends the sequence; returns how many were appended."""
    request = sequence.request
    for i, token in enumerate(draws.tokens):
        if math.isnan(draws.raw_logprobs[i]):
            sequence.finish = "error"
            sequence.error = ItemError("NotANumber", f"{model} gave logits that are not numbers")
            return i
        if sequence.stuck:
            sequence.finish = "error"
            sequence.error = ItemError("NoMatch", "no token of the vocabulary continues a match of the schema or regex")
            return i
        sequence.take(Draws(*(column[i : i + 1] for column in draws)), version)  # type: ignore[arg-type]
        stopped = token in request.stop_ids
        if sequence.stream is not None and (not stopped or request.params.include_stop):
            stopped = sequence.stream.push(token) or stopped
        if request.stop_when is not None and not stopped:
            stopped = _stops(sequence)
        if stopped or sequence.remaining == 0 or sequence.finish is not None:
            sequence.finish = sequence.finish or ("stop" if stopped else "length")
            return i + 1
    return len(draws.tokens)


def _stops(sequence: Sequence) -> bool:
    """Call the request's stop_when; if it raises, the sequence ends with an error."""
    assert sequence.request.stop_when is not None
    try:
        text = sequence.stream.text if sequence.stream is not None else ""
        return bool(sequence.request.stop_when(sequence.tokens[sequence.prompt_len :], text))
    except Exception as error:
        sequence.finish = "error"
        sequence.error = ItemError(type(error).__name__, f"the stop test failed: {error}")
        return True


def note_prompt(sequence: Sequence) -> None:
    """Once all rows of a prompt have been read, store its log-probs in the request."""
    request, read = sequence.request, sequence.request.prompt_read
    assert read is not None
    if sum(map(len, sequence.values)) < len(read.positions):
        return
    values, count = np.concatenate(sequence.values), read.likeliest
    request.prompt_read, sequence.values = None, []
    request.prompt_logprobs = tuple(values[:, 0].tolist())
    request.prompt_ranks = tuple(values[:, 1].astype(int).tolist())
    if count:
        ids, logprobs = values[:, 2 : 2 + count].astype(int).tolist(), values[:, 2 + count :].tolist()
        request.prompt_tops = tuple(tuple(zip(i, p, strict=True)) for i, p in zip(ids, logprobs, strict=True))
