"""Decode attention on the CPU.

The batch's KV is copied once into contiguous tensors, by groups of similar length, each key in the column of its
position; the steps append to them. So a step costs one attention call per group and no gathering, the copy is reused
for as long as the same rows decode, and a row's sums have the same order as in a prompt. New keys are written to the
blocks at the end of every call. The window is a workspace of fixed size: layers that do not fit in it gather their
blocks at every step instead.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from plaudit.core.device.backend import DecodeBatch
from plaudit.core.device.mixing import WindowStates
from plaudit.core.device.paged import KVCache
from plaudit.core.model.attention import (
    LEAST_KEYS,
    Layout,
    Rule,
    attend_group,
    explicit,
    row_mask,
    two_rows,
    weighted,
)
from plaudit.core.model.mixers import Mixer

WORKSPACE = 64 * 2**20  # bytes
STEPS = 64  # columns for new tokens: after this many steps the KV is laid out again


@dataclass(frozen=True)
class _Group:
    """Rows of the decode batch with similar lengths."""

    rows: Tensor | None  # (B,) which rows; None: all, in order
    blocks: int  # of the longest row before the first step
    columns: int  # of these blocks and of the steps
    longest: int  # position of the longest row's first step
    start: Tensor  # (B,) position of the first step
    ragged: bool  # whether the starts differ

    @property
    def count(self) -> int:
        return len(self.start)


class DecodeWindow(Layout):
    """The layout of decode steps: one query per sequence and step."""

    def __init__(self, cache: KVCache, batch: DecodeBatch, steps: int, block_size: int, exact: bool) -> None:
        super().__init__((), torch.empty(0), exact=exact)
        self.cache = cache
        self.block_size = block_size
        self.capacity = max(STEPS, steps)
        self.batch = batch
        self.states: WindowStates | None = None  # of a model with recurrent layers
        self._sampler = batch.sampler
        self._lengths = batch.lengths
        self._groups, self._back = _grouped(batch.lengths, block_size, self.capacity)
        columns = sum(g.count * g.columns for g in self._groups)
        self._spare = WORKSPACE // columns  # bytes per column that the workspace still has
        # Per layer and group, keys as (B, heads, dim, columns) and values as (B, heads, columns, dim), the fastest
        # layout for the products of one query. Where values are part of the keys, both are views of one tensor.
        self._laid: dict[int, list[tuple[Tensor, Tensor]] | None] = {}
        self._stored = 0  # steps whose KV is in the blocks
        self._step = -1
        self._noted: list[tuple[Tensor, Tensor]] = []  # positions and alive rows of the steps not stored yet

    def goes_on(self, batch: DecodeBatch, steps: int) -> bool:
        """Whether the batch continues where the window ends; if so, the window uses it for its next steps. A sampler
        belongs to one list of sequences. Any other writer to the blocks of the batch must drop the window."""
        same = batch.sampler is self._sampler and batch.lengths == [n + self._stored for n in self._lengths]
        if not same or self._stored + steps > self.capacity:
            return False
        self.batch = batch
        if self.states is not None:
            self.states.tables = batch.tables.tolist()
        return True

    def next(self) -> None:
        """Begin a step."""
        self._step += 1
        self._noted.append((self.batch.positions, self.batch.alive))
        self._masks.clear()

    def slots(self) -> Tensor:
        """The slots of this step's tokens, (B,)."""
        return _slots(self.batch.tables, self.batch.positions[None], self.block_size)[0]

    def mix(self, mixer: Mixer, hidden: Tensor) -> Tensor:
        assert self.states is not None
        return self.states.mix(mixer, hidden)

    def attend(self, layer: int, query: Tensor, key: Tensor, value: Tensor, rule: Rule) -> Tensor:
        if layer not in self._laid:
            self._laid[layer] = self._lay_out(layer, rule)
        laid, latent = self._laid[layer], rule.latent is not None
        if laid is None:
            slots = self.slots()
            self.cache.keys[layer].index_copy_(0, slots, key)
            if not latent:
                self.cache.values[layer].index_copy_(0, slots, value)
        outputs = []
        for i, group in enumerate(self._groups):
            q = _pick(query, group.rows)
            if laid is None:
                outputs.append(self._attend_blocks(layer, q, group, rule))
                continue
            k, v = laid[i]
            end = max(LEAST_KEYS, group.longest + self._step + 1)
            self._put(group, k, v, _pick(key, group.rows), None if latent else _pick(value, group.rows))
            mask = self._mask(i, rule.window, end, query.dtype)
            outputs.append(_attend(q, k[..., :end], v[:, :, :end], mask, rule, self.exact))
        out = torch.cat(outputs) if len(outputs) > 1 else outputs[0]
        return out if self._back is None else out.index_select(0, self._back)

    def store(self) -> None:
        """Write the KV of the steps since the last call to the blocks, and the states to their slots."""
        if self.states is not None:
            self.states.store(range(len(self._lengths)))
        positions, alive = (torch.stack(each) for each in zip(*self._noted, strict=True))  # (steps, B)
        slots = _slots(self.batch.tables, positions, self.block_size)
        stored = self._step + 1
        for i, group in enumerate(self._groups):
            counts, to, at = (x if group.rows is None else x[:, group.rows] for x in (alive, slots, positions))
            row, at, to = counts.nonzero()[:, 1], at[counts], to[counts]
            for layer, laid in self._laid.items():
                if laid is not None:
                    k, v = laid[i]
                    self.cache.keys[layer].index_copy_(0, to, k[row, :, :, at])
                    if self.cache.values[layer].shape[2]:
                        self.cache.values[layer].index_copy_(0, to, v[row, :, at])
        self._stored = stored
        self._noted.clear()

    def _lay_out(self, layer: int, rule: Rule) -> list[tuple[Tensor, Tensor]] | None:
        keys, values = self.cache.keys[layer], self.cache.values[layer]
        width = (keys[0].numel() + values[0].numel()) * keys.itemsize
        if width > self._spare:
            return None
        self._spare -= width
        laid = []
        for group in self._groups:
            columns, past = group.columns, group.blocks * self.block_size
            # Zeros, for a masked key still meets a weight of 0.
            if rule.latent is not None:  # keys and values in one place
                rows = keys.new_zeros(group.count, keys.shape[1], columns, keys.shape[2])
                rows[:, :, :past] = self._gather(keys, group, group.blocks).transpose(1, 2)
                laid.append((rows.transpose(2, 3), rule.values(rows, rows)))
                continue
            k = keys.new_zeros(group.count, keys.shape[1], keys.shape[2], columns)
            v = values.new_zeros(group.count, values.shape[1], columns, values.shape[2])
            k[..., :past] = self._gather(keys, group, group.blocks).permute(0, 2, 3, 1)
            v[:, :, :past] = self._gather(values, group, group.blocks).transpose(1, 2)
            laid.append((k, v))
        return laid

    def _put(self, group: _Group, k: Tensor, v: Tensor, key: Tensor, value: Tensor | None) -> None:
        """Write each row's new key and value (B, heads, dim; no value if it is part of the key) to the column of its
        position; for rows that have ended to a later column, so that their KV stays unchanged."""
        if not group.ragged:
            column = group.longest + self._step
            k[..., column] = key
            if value is not None:
                v[:, :, column] = value
            return
        at = (group.start + self._step)[:, None, None, None]
        k.scatter_(3, at.expand(*key.shape, 1), key[..., None])
        if value is not None:
            v.scatter_(2, at.expand(*value.shape[:2], 1, value.shape[2]), value[:, :, None])

    def _attend_blocks(self, layer: int, query: Tensor, group: _Group, rule: Rule) -> Tensor:
        blocks = min(self.batch.tables.shape[1], group.blocks + -(-(self._step + 1) // self.block_size))
        keys, values = (self._gather(c[layer], group, blocks) for c in (self.cache.keys, self.cache.values))
        at = _pick(self.batch.positions, group.rows)
        mask = row_mask(at, keys.shape[1], rule.window, query.dtype)
        attend, values = explicit if self.exact else attend_group, rule.values(keys, values)
        return attend(query[:, None], keys, values, mask, rule)[:, 0]

    def _gather(self, cache: Tensor, group: _Group, blocks: int) -> Tensor:
        """A group's KV, (B, tokens, heads, dim), in whole blocks, which is several times faster than single tokens."""
        heads, dim = cache.shape[1:]
        tables = _pick(self.batch.tables, group.rows)[:, :blocks].flatten()
        whole = cache.view(len(cache) // self.block_size, self.block_size * heads * dim).index_select(0, tables)
        return whole.view(group.count, blocks * self.block_size, heads, dim)

    def _mask(self, index: int, window: int | None, end: int, dtype: torch.dtype) -> Tensor | None:
        """The mask of this step, (B, 1, 1, end)."""
        group = self._groups[index]
        if window is not None and window >= end:
            window = None
        if window is None and not group.ragged and end == group.longest + self._step + 1:
            return None
        made = self._masks.get((index, window, dtype))
        if made is None:
            made = self._masks[index, window, dtype] = row_mask(group.start + self._step, end, window, dtype)
        return made


def _attend(q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None, rule: Rule, exact: bool) -> Tensor:
    """q (B, H, D), k (B, K, D, L), v (B, K, L, D) -> (B, H, D). exact: bit-equal to `explicit`."""
    batch, heads, dim = q.shape
    kv_heads, length = v.shape[1:3]
    if q.dtype not in (torch.float32, torch.float64) or rule.softcap is not None or rule.sinks is not None:
        mask = q.new_zeros(1, 1, 1, length) if mask is None else mask
        attend = explicit if exact else attend_group
        return attend(q[:, None], k.permute(0, 3, 1, 2), v.transpose(1, 2), mask, rule)[:, 0]
    # For one query two plain products take half as long as the fused kernel, which is optimized for many.
    scaled = (q * (dim**-0.5 if rule.scale is None else rule.scale)).reshape(batch * kv_heads, -1, dim)
    scores = torch.bmm(two_rows(scaled) if exact else scaled, k.flatten(0, 1))
    if mask is not None:
        scores.view(batch, kv_heads, -1, length).add_(mask)
    weights, values = torch.softmax(scores, dim=-1), v.flatten(0, 1)
    out = weighted(weights, values) if exact else torch.bmm(weights, values)
    return out[:, : heads // kv_heads].reshape(batch, heads, -1).contiguous()  # some modules take a view of it


def _pick(x: Tensor, rows: Tensor | None) -> Tensor:
    return x if rows is None else x.index_select(0, rows)


def _slots(tables: Tensor, positions: Tensor, block_size: int) -> Tensor:
    """tables (B, N), positions (steps, B) -> (steps, B)."""
    return tables.T.gather(0, positions // block_size) * block_size + positions % block_size


def _grouped(lengths: Sequence[int], block_size: int, capacity: int) -> tuple[Sequence[_Group], Tensor | None]:
    """Groups of rows in which no row reads more than about 1.5 times the blocks it needs, and the index that restores
    the batch order."""
    needs = [max(1, -(-(length - 1) // block_size)) for length in lengths]
    members: list[list[int]] = []
    for i in sorted(range(len(needs)), key=lambda i: (needs[i], i)):
        if members and needs[i] <= needs[members[-1][0]] * 1.5 + 2:
            members[-1].append(i)
        else:
            members.append([i])
    members = [sorted(rows) for rows in members]
    groups = []
    for rows in members:
        blocks = max(needs[i] for i in rows)
        start = torch.tensor([lengths[i] - 1 for i in rows])
        low, high = min(lengths[i] for i in rows), max(lengths[i] for i in rows)
        columns = max(LEAST_KEYS, blocks * block_size + capacity)
        chosen = torch.tensor(rows) if len(members) > 1 else None
        groups.append(_Group(chosen, blocks, columns, high - 1, start, ragged=low != high))
    if len(groups) == 1:
        return groups, None
    back = torch.empty(len(needs), dtype=torch.long)
    back[torch.tensor([i for rows in members for i in rows])] = torch.arange(len(needs))
    return groups, back
