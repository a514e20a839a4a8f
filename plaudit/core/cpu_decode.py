"""Decode attention on the CPU.

For a window of a few steps the KV of the batch is laid out contiguously, by groups of like length, so that a step pays
one attention call per group and no gathering; new keys go to the window and reach the blocks when it ends. The window
is workspace of a fixed size: layers that do not fit in it gather their blocks at every step instead.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from plaudit.core.attention import Layout, Rule, attend_group
from plaudit.core.backend import DecodeBatch
from plaudit.core.paged import KVCache

WORKSPACE = 64 * 2**20  # bytes


@dataclass
class _Group:
    """Rows of the decode batch with like lengths."""

    rows: Tensor | None  # (B,) which rows; None: all, in order
    blocks: Tensor  # (B * N,) their blocks, flattened
    length: int  # N * block size
    count: int  # B


class DecodeWindow(Layout):
    """One query per sequence and step."""

    def __init__(self, cache: KVCache, batch: DecodeBatch, steps: int, block_size: int) -> None:
        super().__init__((), torch.empty(0))
        self.cache = cache
        self.block_size = block_size
        self.tables = batch.tables
        self._groups, self._back = _grouped(batch, steps, block_size)
        tokens = sum(g.count * g.length for g in self._groups)
        self._room = WORKSPACE // max(1, tokens)  # bytes per token that the workspace still has
        self._laid: dict[int, list[tuple[Tensor, Tensor]]] = {}  # per layer and group: (B, heads, length, dim)
        self._steps: list[Tensor] = []
        self.positions = self.slots = torch.empty(0)
        self._lines: list[Tensor] = []

    def at(self, positions: Tensor) -> None:
        """The positions at which the next step stores and asks."""
        self.positions = positions
        blocks = self.tables.gather(1, (positions // self.block_size)[:, None])[:, 0]
        self.slots = blocks * self.block_size + positions % self.block_size
        self._steps.append(positions)
        self._masks.clear()
        self._lines.clear()

    def attend(self, layer: int, query: Tensor, key: Tensor, value: Tensor, rule: Rule) -> Tensor:
        laid = self._laid.get(layer)
        if laid is None and len(self._steps) == 1:
            laid = self._lay_out(layer)
        if laid is None:
            self.cache.keys[layer].index_copy_(0, self.slots, key)
            self.cache.values[layer].index_copy_(0, self.slots, value)
        outputs = []
        for i, group in enumerate(self._groups):
            q = _pick(query, group.rows)
            if laid is None:
                k, v = self._gather(self.cache.keys[layer], group), self._gather(self.cache.values[layer], group)
            else:
                k, v = laid[i]
                self._append(k, _pick(key, group.rows), i)
                self._append(v, _pick(value, group.rows), i)
                k, v = k.transpose(1, 2), v.transpose(1, 2)
            outputs.append(attend_group(q[:, None], k, v, self._mask(i, rule.window, query.dtype), rule)[:, 0])
        out = torch.cat(outputs) if len(outputs) > 1 else outputs[0]
        return out if self._back is None else out.index_select(0, self._back)

    def store(self) -> None:
        """Bring what the window's steps computed into the blocks."""
        if not self._laid:
            return
        positions = torch.stack(self._steps)  # (steps, B)
        blocks = self.tables.T.gather(0, positions // self.block_size)
        slots = blocks * self.block_size + positions % self.block_size
        for i, group in enumerate(self._groups):
            at = positions if group.rows is None else positions[:, group.rows]
            to = (slots if group.rows is None else slots[:, group.rows]).flatten()
            row = torch.arange(group.count).expand_as(at)
            for layer, laid in self._laid.items():
                k, v = laid[i]
                self.cache.keys[layer].index_copy_(0, to, k[row, :, at].flatten(0, 1))
                self.cache.values[layer].index_copy_(0, to, v[row, :, at].flatten(0, 1))

    def _lay_out(self, layer: int) -> list[tuple[Tensor, Tensor]] | None:
        keys, values = self.cache.keys[layer], self.cache.values[layer]
        width = (keys[0].numel() + values[0].numel()) * keys.itemsize
        if width > self._room:
            return None
        self._room -= width
        laid = [
            (self._gather(keys, g).transpose(1, 2).contiguous(), self._gather(values, g).transpose(1, 2).contiguous())
            for g in self._groups
        ]
        self._laid[layer] = laid
        return laid

    def _append(self, laid: Tensor, new: Tensor, index: int) -> None:
        """One token per sequence: new (B, heads, dim) into laid (B, heads, length, dim)."""
        batch, heads, length, dim = laid.shape
        if len(self._lines) <= index:
            at = _pick(self.positions, self._groups[index].rows)
            line = torch.arange(batch * heads).view(batch, heads) * length + at[:, None]
            self._lines.append(line.flatten())
        laid.view(-1, dim).index_copy_(0, self._lines[index], new.reshape(-1, dim))

    def _gather(self, cache: Tensor, group: _Group) -> Tensor:
        """(B, length, heads, dim). Whole blocks, which is several times faster than token by token."""
        heads, dim = cache.shape[1:]
        whole = cache.view(-1, self.block_size * heads * dim).index_select(0, group.blocks)
        return whole.view(group.count, group.length, heads, dim)

    def _mask(self, index: int, window: int | None, dtype: torch.dtype) -> Tensor:
        group = self._groups[index]
        if window is not None and window >= group.length:
            window = None
        made = self._masks.get((index, window, dtype))
        if made is None:
            at = _pick(self.positions, group.rows)[:, None]
            key = torch.arange(group.length)
            hidden = key > at
            if window is not None:
                hidden |= key <= at - window
            made = torch.zeros(hidden.shape, dtype=dtype).masked_fill_(hidden, float("-inf"))[:, None, None]
            self._masks[index, window, dtype] = made
        return made


def _pick(x: Tensor, rows: Tensor | None) -> Tensor:
    return x if rows is None else x.index_select(0, rows)


def _grouped(batch: DecodeBatch, steps: int, block_size: int) -> tuple[Sequence[_Group], Tensor | None]:
    """Groups in which no row reads more than about half again what it needs, and how to undo the regrouping."""
    held = batch.tables.shape[1]
    needs = [min(-(-(length + steps - 1) // block_size), held) for length in batch.lengths]
    members: list[list[int]] = []
    for i in sorted(range(len(needs)), key=lambda i: (needs[i], i)):
        if members and needs[i] <= needs[members[-1][0]] * 1.5 + 2:
            members[-1].append(i)
        else:
            members.append([i])
    if len(members) == 1:
        count = max(needs)
        return [_Group(None, batch.tables[:, :count].flatten(), count * block_size, len(needs))], None
    groups = []
    for rows in members:
        count, at = max(needs[i] for i in rows), torch.tensor(rows)
        groups.append(_Group(at, batch.tables[at, :count].flatten(), count * block_size, len(rows)))
    back = torch.empty(len(needs), dtype=torch.long)
    back[torch.tensor([i for rows in members for i in rows])] = torch.arange(len(needs))
    return groups, back
