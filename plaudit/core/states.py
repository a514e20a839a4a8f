"""States of recurrent layers: how many there are, which position of which block each one belongs to, and their memory.

A state is named by a block and the tokens of it that it has seen: (block, fill). So it lives and dies with the block,
is found again where the prefix tree finds the block, and a sequence needs nothing but its blocks to go on. A sequence
that runs has the one it stands at; others are kept for those who share its beginning: every `every` tokens, at the
last token but one of a prompt, where its samples part, and at the end of what has finished. They take what slots are
left, and the one used longest ago goes first: without it a prefix is found as far as the last one that is there.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from plaudit.core.model.mixers import Carry, StateShapes
from plaudit.errors import RequestError

SLOTS = 64
EVERY = 256  # tokens
RUNNING = 2  # slots of a sequence in a step: the state it stands at, and the one it goes to
PART = 0.5  # of the pool, at most, for states
HOUSE = 2 * RUNNING  # times the sequences that may run: more states than this are not kept

Name = tuple[int, int]
"""A block, and how many of its tokens the state has seen."""


def states_for(each: int, size: int, block_bytes: int, max_running: int, least: int = RUNNING) -> int:
    """How many states of `each` bytes a pool of `size` bytes holds beside its blocks; a sequence needs `least`."""
    needed = least * each + block_bytes
    if size < needed:
        raise RequestError(
            f"kv_bytes gives {size} bytes, and one sequence needs {least} states of {each} bytes and a block of "
            f"{block_bytes}: {least} × {each} + {block_bytes} = {needed}; raise kv_bytes to {needed} or more"
        )
    return max(least, min(HOUSE * max_running, int(PART * size) // each))


@dataclass(slots=True)
class Entry:
    slot: int
    kept: bool  # for others; else it is dropped when its sequence goes on
    used: int  # the step in which it was last read or made


class StateBooks:
    """Which slot has which state. `running`: sequences that may run at once."""

    def __init__(self, block_size: int, slots: int = SLOTS, every: int = EVERY, running: int = SLOTS // 4) -> None:
        if every < 1 or every % block_size:
            raise RequestError(f"state_every is {every} tokens, and must be a multiple of the block of {block_size}")
        self.block_size, self.slots, self.every, self.running = block_size, slots, every, running
        self.spare = slots - RUNNING * running  # what is left for states that are kept for others
        self.reached = 0  # slots from the first to the last that was ever taken
        self.dropped = 0  # kept states that made room for others
        self.reset()

    def reset(self) -> None:
        self._entries: dict[Name, Entry] = {}  # the one used longest ago first
        self._fills: dict[int, set[int]] = defaultdict(set)
        self._free = list(range(self.slots - 1, -1, -1))
        self._left: list[Name] = []  # where sequences stood before they went on
        self._held: set[Name] = set()  # where sequences stand
        self._step = 0
        self._kept_now = 0

    @property
    def in_use(self) -> int:
        return len(self._entries)

    def begin(self, held: set[Name]) -> None:
        """A step begins, with sequences standing at `held`."""
        self._step += 1
        self._held, self._kept_now = held, 0
        for name in self._left:
            if name in self._entries and not self._entries[name].kept and name not in held:
                self._drop(name)
        self._left = []

    def name(self, blocks: Sequence[int] | np.ndarray, position: int) -> Name:
        """Of the state after this many tokens."""
        at = (position - 1) // self.block_size
        return int(blocks[at]), position - at * self.block_size

    def find(self, name: Name) -> int | None:
        """The slot of a state, which stays until the step is over."""
        entry = self._entries.pop(name, None)
        if entry is None:
            return None
        entry.used = self._step
        self._entries[name] = entry
        return entry.slot

    def longest(self, block: int, tokens: int) -> int:
        """The most tokens, up to so many, that a state of this block has seen; 0 without one."""
        fill = max((fill for fill in self._fills.get(block, ()) if fill <= tokens), default=0)
        if fill:
            self.find((block, fill))
        return fill

    def keep(self, name: Name) -> int | None:
        """A slot for a state that others may go on from, if there is one to spare."""
        if name in self._entries:
            self._entries[name].kept = True
            return self.find(name)
        if self._kept_now >= self.spare:
            return None
        self._kept_now += 1
        return self._enter(name, kept=True)

    def stand(self, name: Name, before: Name | None = None) -> int:
        """The slot of the state a sequence goes to. With `before` it stood there, and has no more need of that: nobody
        else in this step goes on from it."""
        slot = self.find(name)
        if slot is None and before is not None and self._moves(before):
            entry = self._entries.pop(before)
            self._forget_fill(before)
            entry.used = self._step
            self._entries[name] = entry
            self._fills[name[0]].add(name[1])
            slot = entry.slot
        elif before is not None and before != name:
            self._left.append(before)
        return self._enter(name, kept=False) if slot is None else slot

    def leave(self, name: Name) -> None:
        """A sequence goes on from here in this step."""
        self._left.append(name)

    def promised(self, blocks: Sequence[int] | np.ndarray, start: int, end: int) -> list[int]:
        """Positions after `start` up to `end` at which a state is to be stored."""
        positions: list[int] = []
        for at in range(start // self.block_size, (end - 1) // self.block_size + 1):
            fills = self._fills.get(int(blocks[at]), ())
            positions += [at * self.block_size + fill for fill in sorted(fills)]
        return [position for position in positions if start < position <= end]

    def forget(self, block: int) -> None:
        """The block is free: so are its states."""
        for fill in list(self._fills.get(block, ())):
            self._drop((block, fill))

    def move(self, block: int, to: int) -> None:
        """Another block with the same tokens takes its place."""
        for fill in list(self._fills.get(block, ())):
            entry = self._entries.pop((block, fill))
            self._forget_fill((block, fill))
            if (to, fill) in self._entries:
                self._free.append(entry.slot)
            else:
                self._entries[to, fill] = entry
                self._fills[to].add(fill)

    def _moves(self, name: Name) -> bool:
        """Whether the slot may go along: the state is one sequence's alone, in a block that it has not filled."""
        entry = self._entries.get(name)
        return entry is not None and not entry.kept and name[1] < self.block_size

    def _enter(self, name: Name, kept: bool) -> int:
        if not self._free:
            self._make_room()
        slot = self._free.pop()
        self.reached = max(self.reached, slot + 1)
        self._entries[name] = Entry(slot, kept, self._step)
        self._fills[name[0]].add(name[1])
        return slot

    def _make_room(self) -> None:
        for name, entry in self._entries.items():
            if entry.used < self._step and name not in self._held:
                self.dropped += entry.kept
                self._drop(name)
                return
        raise RuntimeError(f"all {self.slots} states are in use")

    def _drop(self, name: Name) -> None:
        self._free.append(self._entries.pop(name).slot)
        self._forget_fill(name)

    def _forget_fill(self, name: Name) -> None:
        fills = self._fills[name[0]]
        fills.discard(name[1])
        if not fills:
            del self._fills[name[0]]

    def check(self, live: Callable[[int], bool]) -> None:
        """Every slot is free or has one state, and every state's block is held by somebody."""
        slots = [entry.slot for entry in self._entries.values()]
        if sorted(slots + self._free) != list(range(self.slots)):
            raise RuntimeError(f"{len(slots)} states and {len(self._free)} free slots are not {self.slots}")
        if {(block, fill) for block, fills in self._fills.items() for fill in fills} != set(self._entries):
            raise RuntimeError("states and the blocks they belong to disagree")
        if dead := [name for name in self._entries if not live(name[0])]:
            raise RuntimeError(f"block {dead[0][0]} is free and has a state")


class StateBank:
    """The states' memory: per layer, tensors of (slots + rows, ...). The rows behind the slots are for a batch that
    decodes in place, under the same addresses whatever its sequences are."""

    def __init__(self, shapes: StateShapes, slots: int, device: torch.device, rows: int = 0) -> None:
        self.device, self._slots = device, slots
        self._layers = {
            layer: {
                name: torch.zeros(slots + rows, *shape, dtype=dtype, device=device)
                for name, (shape, dtype) in parts.items()
            }
            for layer, parts in shapes.items()
        }

    @property
    def nbytes(self) -> int:
        return sum(tensor.nbytes for parts in self._layers.values() for tensor in parts.values())

    def copy(self, slot: int) -> list[Tensor]:
        """One state, for another engine: its tensors in the order of `shapes`."""
        return [tensor[slot].clone() for parts in self._layers.values() for tensor in parts.values()]

    def enter(self, slot: int, state: Sequence[Tensor]) -> None:
        """What `copy` of another engine gave."""
        mine = (tensor for parts in self._layers.values() for tensor in parts.values())
        for tensor, incoming in zip(mine, state, strict=True):
            tensor[slot].copy_(incoming)

    def rows(self, layer: int, count: int) -> Carry:
        """The first rows behind the slots themselves, not a copy."""
        return Carry({name: self._rows(tensor, count) for name, tensor in self._layers[layer].items()})

    def load_rows(self, slots: Tensor) -> None:
        """The states in these slots into the first rows."""
        for parts in self._layers.values():
            for tensor in parts.values():
                self._rows(tensor, len(slots)).copy_(tensor.index_select(0, slots))

    def keep_rows(self, layer: int, carry: Carry) -> None:
        """What a mixer has made of the rows, where it has not written into them."""
        for name, tensor in carry.state.items():
            row = self._rows(self._layers[layer][name], len(tensor))
            if row.data_ptr() != tensor.data_ptr():
                row.copy_(tensor)

    def store_rows(self, rows: Tensor, slots: Tensor) -> None:
        for parts in self._layers.values():
            for tensor in parts.values():
                tensor.index_copy_(0, slots, tensor.index_select(0, self._slots + rows))

    def _rows(self, tensor: Tensor, count: int) -> Tensor:
        return tensor[self._slots : self._slots + count]

    def take(self, layer: int, slots: Tensor) -> Carry:
        """A copy of the states in these slots."""
        return Carry({name: tensor.index_select(0, slots) for name, tensor in self._layers[layer].items()})

    def put(self, layer: int, slots: Tensor, carry: Carry, rows: Tensor | None = None) -> None:
        """The states of a call's sequences, or of some `rows` of them, into these slots."""
        state = carry.state
        for name, tensor in self._layers[layer].items():
            new = state[name] if rows is None else state[name].index_select(0, rows)
            tensor.index_copy_(0, slots, new.to(tensor.dtype))
