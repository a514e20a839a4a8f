"""Scoring without a KV cache: reads rows of whole sequences, computing shared prefixes once per batch.

In lexical order every sequence is next to those with which it shares the longest prefix, so sorting finds all groups.
If little is shared, sequences are sorted by length instead, so that attention runs on full rectangles.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise

import numpy as np

from plaudit.core.device.backend import Backend
from plaudit.core.model.packing import PackedTree, pack, pack_tree, send
from plaudit.core.model.readouts import PendingReadout, Read, Reading, take
from plaudit.prefix import common_prefix

WORTH_SHARING = 0.1  # of all tokens; below this share the masks and gathers cost more than sharing saves


def read_rows(
    backend: Backend, sequences: Sequence[Sequence[int]], reads: Sequence[Read], budget: int, share: bool = True
) -> tuple[list[np.ndarray], int, int]:
    """The values of each read, the number of tokens computed, and the number of tokens shared."""
    results: list[np.ndarray] = [np.empty(0, dtype=np.float32)] * len(sequences)
    computed = 0
    pending: list[tuple[list[int], PendingReadout]] = []
    for batch, shared in _batches(sequences, budget, share):
        chosen = [sequences[i] for i in batch]
        tree = pack_tree(chosen, backend.decoder.device) if shared else _flat(chosen, backend)
        computed += tree.tokens
        wanted = [rows[list(reads[i].positions)] for i, rows in zip(batch, tree.rows, strict=True)]
        rows = backend.rows(tree.packed, send(np.concatenate(wanted), backend.decoder.device))
        readings = [Reading(reads[i], sequences[i], reads[i].positions) for i in batch]
        pending.append((batch, take(backend.decoder, rows, readings)))
    for batch, readout in pending:
        for i, values in zip(batch, readout.arrays(), strict=True):
            results[i] = values
    return results, computed, sum(map(len, sequences)) - computed


def _flat(sequences: Sequence[Sequence[int]], backend: Backend) -> PackedTree:
    packed = pack(sequences, backend.decoder.device)
    rows = tuple(np.arange(s, s + n) for s, n in zip(packed.starts, packed.lengths, strict=True))
    return PackedTree(packed, rows)


def _batches(sequences: Sequence[Sequence[int]], budget: int, share: bool) -> list[tuple[list[int], bool]]:
    """The sequences' indices per batch, and whether the batch shares prefixes."""
    order = list(range(len(sequences)))
    common = [0] * len(order)
    if share:
        order.sort(key=lambda i: list(sequences[i]))
        common[1:] = [common_prefix(sequences[a], sequences[b]) for a, b in pairwise(order)]
    if sum(common) < WORTH_SHARING * sum(map(len, sequences)):
        by_length = sorted(range(len(sequences)), key=lambda i: (len(sequences[i]), i))
        return [(b, False) for b in _cut(by_length, [len(sequences[i]) for i in by_length], [0] * len(order), budget)]
    return [(b, True) for b in _cut(order, [len(sequences[i]) for i in order], common, budget)]


def _cut(order: Sequence[int], lengths: Sequence[int], common: Sequence[int], budget: int) -> list[list[int]]:
    """Split into batches by new tokens. A group that shares a lot is not split up to twice the budget."""
    batches: list[list[int]] = [[]]
    tokens = 0
    for i, length, shared in zip(order, lengths, common, strict=True):
        new = length - shared
        limit = 2 * budget if shared > length // 3 else budget
        if batches[-1] and tokens + new > limit:
            batches.append([])
            tokens, new = 0, length
        batches[-1].append(i)
        tokens += new
    return batches
