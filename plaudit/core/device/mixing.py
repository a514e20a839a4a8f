"""Recurrent states in a step: which rows run together, which slot they read, and where they store the new state."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from plaudit.core.device.backend import Copy, Span
from plaudit.core.model.mixers import Carry, Mixer
from plaudit.core.model.packing import send
from plaudit.core.states import StateBank, StateTable


@dataclass(frozen=True)
class Piece:
    """Rows of one sequence between two states."""

    first: int
    tokens: int
    source: int | None  # a slot; None: the sequence begins here
    target: int


@dataclass(frozen=True)
class PieceGroup:
    """Independent pieces of one length, for one call of a mixer."""

    rows: Tensor  # (B, L)
    sources: Tensor | None  # (B,)
    targets: Tensor  # (B,)


class Mixing:
    """The states of a step over prompts, which are computed in pieces."""

    def __init__(self, states: StateTable, bank: StateBank, spans: Sequence[Span], copies: Sequence[Copy]) -> None:
        self.bank = bank
        copied = {(c.target, c.first + c.tokens): c.source for c in copies}
        pieces: list[Piece] = []
        row = 0
        for span in spans:
            pieces += _pieces(states, span, row, copied)
            row += len(span.tokens)
        self.groups = _grouped(pieces, bank.device)

    def mix(self, mixer: Mixer, hidden: Tensor) -> Tensor:
        """(1, T, width) -> (1, T, width)."""
        out = torch.empty_like(hidden[0])
        for group in self.groups:
            carry = Carry() if group.sources is None else self.bank.take(mixer.layer, group.sources)
            at = group.rows.flatten()
            mixed = mixer(hidden[0].index_select(0, at).view(*group.rows.shape, -1), carry)
            out.index_copy_(0, at, mixed.flatten(0, 1))
            self.bank.put(mixer.layer, group.targets, carry)
        return out[None]


def _pieces(states: StateTable, span: Span, row: int, copied: dict[tuple[int, int], int]) -> list[Piece]:
    start, end = span.start, span.start + len(span.tokens)
    source = _source(states, span, copied) if start else None
    stops = [(p, states.find(states.name(span.blocks, p))) for p in states.planned(span.blocks, start, end)]
    if not stops or stops[-1][0] != end:
        stops.append((end, states.advance(states.name(span.blocks, end))))
    pieces, at = [], start
    for stop, target in stops:
        assert target is not None
        pieces.append(Piece(row + at - start, stop - at, source, target))
        at, source = stop, target
    return pieces


def _source(states: StateTable, span: Span, copied: dict[tuple[int, int], int]) -> int:
    """The slot that a span continues from: of its own block, or of the block that is copied to it in this step."""
    name = states.name(span.blocks, span.start)
    slot = states.find(name)
    if slot is not None:
        states.vacate(name)
    elif name in copied:
        slot = states.find((copied[name], name[1]))
    if slot is None:
        raise RuntimeError(f"no state after {span.start} tokens in block {name[0]}")
    return slot


def _grouped(pieces: Sequence[Piece], device: torch.device) -> list[PieceGroup]:
    """Groups of pieces, in an order in which every state is computed before it is read."""
    levels: dict[int, int] = {}  # of the slots that this step writes
    members: dict[tuple[int, int, bool], list[Piece]] = defaultdict(list)
    for piece in pieces:
        level = 0 if piece.source is None else levels.get(piece.source, -1) + 1
        levels[piece.target] = level
        members[level, piece.tokens, piece.source is None].append(piece)
    groups = []
    for level, tokens, fresh in sorted(members):
        some = members[level, tokens, fresh]
        rows = np.array([piece.first for piece in some])[:, None] + np.arange(tokens)
        sources = None if fresh else send(np.array([piece.source for piece in some]), device)
        groups.append(PieceGroup(send(rows, device), sources, send(np.array([p.target for p in some]), device)))
    return groups


class GraphStates:
    """The states of a batch that decodes in the bank's own rows, many steps without the host. A row that ends in
    between stores no state, because its tensors advance with the others; a prompt that continues it is recomputed from
    the state before."""

    def __init__(self, states: StateTable, bank: StateBank, tables: Sequence[Sequence[int]], at: Sequence[int]) -> None:
        self.states, self.bank, self.tables, self.at = states, bank, tables, at
        bank.load_rows(send(np.array(_slots(states, tables, at)), bank.device))

    def store(self, steps: int, alive: Sequence[bool]) -> None:
        """Store the states of the rows that are still alive after `steps` steps."""
        rows, slots = [], []
        for row, (table, at, lived) in enumerate(zip(self.tables, self.at, alive, strict=True)):
            if lived:
                rows.append(row)
                slots.append(self.states.advance(self.states.name(table, at + steps), self.states.name(table, at)))
        if rows:
            self.bank.store_rows(*(send(np.array(each), self.bank.device) for each in (rows, slots)))


def _slots(states: StateTable, tables: Sequence[Sequence[int]], at: Sequence[int]) -> list[int]:
    """The slots of the rows' states after `at` tokens."""
    slots = [states.find(states.name(table, seen)) for table, seen in zip(tables, at, strict=True)]
    if None in slots:
        raise RuntimeError(f"no state after {at[slots.index(None)]} tokens of a decoding row")
    return slots  # type: ignore[return-value]


class WindowStates:
    """The states of a decode batch, in one tensor per layer and state, for as long as its rows decode together."""

    def __init__(self, states: StateTable, bank: StateBank, tables: Sequence[Sequence[int]], at: Sequence[int]) -> None:
        self.states, self.bank = states, bank
        self.tables = tables
        self.at = list(at)  # tokens that each row's state has consumed
        self._stored = list(at)  # the same for the state in its slot
        self._slots = torch.tensor(_slots(states, tables, at))
        self._carries: dict[int, Carry] = {}

    def mix(self, mixer: Mixer, hidden: Tensor) -> Tensor:
        carry = self._carries.get(mixer.layer)
        if carry is None:
            carry = self._carries[mixer.layer] = self.bank.take(mixer.layer, self._slots)
        return mixer(hidden[0][:, None], carry).transpose(0, 1)

    def advance(self, before: Tensor, after: Tensor) -> None:
        """End a step. before, after: the rows alive before and after it. A row that has ended is stored now, because
        its tensors advance with the others."""
        ended, kept = [], []
        for row, (was, is_) in enumerate(zip(before.tolist(), after.tolist(), strict=True)):
            self.at[row] += was
            if was and not is_:
                ended.append(row)
            elif was and self.at[row] % self.states.every == 0:
                kept.append(row)
        self.store(ended)
        names = {row: self.states.name(self.tables[row], self.at[row]) for row in kept}
        self._put({row: slot for row, name in names.items() if (slot := self.states.keep(name)) is not None})

    def store(self, rows: Sequence[int]) -> None:
        """Store the current states of these rows."""
        slots = {}
        for row in rows:
            table, stored = self.tables[row], self._stored[row]
            if stored != self.at[row]:
                name = self.states.name(table, self.at[row])
                slots[row] = self.states.advance(name, self.states.name(table, stored))
                self._stored[row] = self.at[row]
        self._put(slots)

    def _put(self, slots: dict[int, int]) -> None:
        if slots:
            rows, to = torch.tensor(list(slots)), torch.tensor(list(slots.values()))
            for layer, carry in self._carries.items():
                self.bank.put(layer, to, carry, rows)
