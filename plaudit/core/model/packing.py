"""Packed forward: the tokens of many sequences are concatenated in one row, so linear layers see no padding.

An unmodified transformers decoder runs on the row; its attention is ours and reads from `layout` which tokens belong
together. Gradients flow through it, so training uses the same forward.
"""

from __future__ import annotations

import sys
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import chain
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from plaudit.core.model.attention import ATTENTION, Group, Layout, group_spans, send, use_packed_attention
from plaudit.core.model.mixers import layout_arguments
from plaudit.core.model.varlen import VarlenLayout
from plaudit.prefix import common_prefix

__all__ = [
    "ATTENTION",
    "Packed",
    "PackedTree",
    "hidden_rows",
    "pack",
    "pack_tree",
    "send",
    "trunk",
    "use_packed_attention",
]

ALONE = 96  # tokens from which on a whole sequence is attended to separately


@dataclass(frozen=True)
class Packed:
    input_ids: Tensor  # (1, T)
    position_ids: Tensor  # (1, T)
    layout: Layout
    starts: tuple[int, ...]  # offset in the row of each sequence's own tokens
    lengths: tuple[int, ...]  # how many tokens of its own each sequence has
    shared: tuple[int, ...]  # how many tokens before them belong to another sequence
    rows: tuple[np.ndarray, ...]  # per sequence, the row of each of its tokens, shared ones included


@dataclass(frozen=True)
class PackedTree:
    """A row in which sequences share the tokens of a common prefix."""

    packed: Packed
    rows: tuple[np.ndarray, ...]  # per sequence, the row of each of its tokens, shared ones included

    @property
    def tokens(self) -> int:
        return self.packed.input_ids.shape[1]


def pack(sequences: Sequence[Sequence[int]], device: torch.device | str = "cpu", lone: bool = True) -> Packed:
    """`lone`: long sequences may be attended to one by one. Training sets it to False, so that its passes with and
    without gradients, and its recipes' numbers, stay equal to the bit."""
    lengths = tuple(len(ids) for ids in sequences)
    if not lengths or min(lengths) == 0:
        raise ValueError(f"cannot pack {len(lengths)} sequences of lengths {lengths}: each needs at least one token")
    ends = np.cumsum(lengths)
    starts = tuple((ends - lengths).tolist())
    rows = tuple(np.arange(start, end) for start, end in zip(starts, ends, strict=True))
    return _packed(sequences, [0] * len(lengths), rows, starts, device, lone)


def pack_tree(
    sequences: Sequence[Sequence[int]], device: torch.device | str = "cpu", lone: bool = True,
    keys: Sequence[Sequence[Any]] | None = None,
) -> PackedTree:  # fmt: skip
    """Pack sequences in the order of their keys; each shares the rows of a common prefix with the one before it."""
    keys = sequences if keys is None else keys
    rows: list[np.ndarray] = []
    shared: list[int] = []
    starts: list[int] = []
    total = 0
    for i, ids in enumerate(sequences):
        # The last token is always the sequence's own, so that every sequence has its own query.
        common = min(common_prefix(keys[i - 1], keys[i]), len(ids) - 1) if i else 0
        own = len(ids) - common
        rows.append(np.concatenate([rows[-1][:common] if i else [], np.arange(total, total + own)]).astype(np.int64))
        shared.append(common)
        starts.append(total)
        total += own
    return PackedTree(_packed(sequences, shared, tuple(rows), tuple(starts), device, lone), tuple(rows))


def _packed(
    sequences: Sequence[Sequence[int]], shared: Sequence[int], rows: tuple[np.ndarray, ...], starts: tuple[int, ...],
    device: torch.device | str, lone: bool,
) -> Packed:  # fmt: skip
    own = tuple(len(ids) - before for ids, before in zip(sequences, shared, strict=True))
    tokens = np.fromiter(
        chain.from_iterable(ids[before:] for ids, before in zip(sequences, shared, strict=True)), np.int64, sum(own)
    )
    positions = np.concatenate([np.arange(b, b + n) for b, n in zip(shared, own, strict=True)])
    layout = packed_layout(list(zip(starts, own, shared, strict=True)), rows, device, lone)
    return Packed(send(tokens, device)[None], send(positions, device)[None], layout, starts, own, tuple(shared), rows)


def packed_layout(
    spans: Sequence[tuple[int, int, int]], rows: Sequence[np.ndarray], device: torch.device | str, lone: bool = True
) -> Layout:
    """The layout of spans (first row, new tokens, tokens before) whose keys are at `rows`, one row per token."""
    if torch.device(device).type == "cuda":
        return VarlenLayout(spans, rows, device, lambda: grouped_layout(spans, rows, device))
    layout = grouped_layout(spans, rows, device, lone)
    layout.exact = not lone
    return layout


def grouped_layout(
    spans: Sequence[tuple[int, int, int]], rows: Sequence[np.ndarray], device: torch.device | str, lone: bool = True
) -> Layout:
    """As `packed_layout`, for attention over groups of similar length."""
    groups: list[Group] = []
    restore = np.empty(sum(new for _, new, _ in spans), dtype=np.int64)
    done = 0
    # On a CPU a long sequence alone is as fast, and needs no copies of its rows and no padding.
    lone = lone and torch.device(device).type == "cpu"
    for members in group_spans(spans, ALONE if lone else sys.maxsize):
        first, new, before = (np.array([spans[i][f] for i in members])[:, None] for f in range(3))
        longest, most = int(new.max()), int((new + before).max())
        steps = np.minimum(np.arange(longest)[None], new - 1)
        keys = np.zeros((len(members), most), dtype=np.int64)
        for row, i in enumerate(members):
            keys[row, : len(rows[i])] = rows[i]
        restore[first + steps] = done + np.arange(len(members))[:, None] * longest + steps
        queries, at, positions = (torch.from_numpy(x).to(device) for x in (first + steps, keys, before + steps))
        whole = not before.any()
        start, length, _ = spans[members[0]]
        alone = slice(start, start + length) if lone and whole and len(members) == 1 else None
        groups.append(Group(queries, at, positions, whole, alone))
        done += len(members) * longest
    return Layout(tuple(groups), torch.from_numpy(restore).to(device), spans, rows)


def trunk(model: nn.Module) -> nn.Module:
    """The decoder without its head, for any transformers model class; a few name one that they do not have."""
    prefix: Any = model.base_model_prefix
    return getattr(model, prefix if hasattr(model, prefix) else "model")  # type: ignore[no-any-return]


def hidden_rows(model: nn.Module, packed: Packed) -> Tensor:
    """Final hidden states of every packed token, (T, hidden)."""
    out = trunk(model)(
        input_ids=packed.input_ids, position_ids=packed.position_ids, attention_mask=None, use_cache=False,
        **layout_arguments(trunk(model), packed.layout),
    )  # fmt: skip
    hidden: Tensor = out.last_hidden_state[0]
    return hidden
