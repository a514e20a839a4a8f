"""States of recurrent layers: their slots, the block position each belongs to, and their memory.

A state is named (block, fill): the block, and how many of its tokens the state has consumed. So it is freed with the
block and found through the prefix tree, and a sequence needs only its blocks to continue. A running sequence has the
state at its current position. Further states are kept for requests that share its prefix: every `every` tokens, at the
second-to-last token of a prompt, where its samples diverge, and at the end of finished sequences. They use the
remaining slots, evicted least recently used first; a prefix can be shared up to its last state that is still stored.
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
RUNNING = 2  # slots of a sequence in a step: its current state and the next one
STATE_FRACTION = 0.5  # at most, of the pool
STATES_PER_SEQUENCE = 2 * RUNNING  # upper bound of slots per sequence that may run

Name = tuple[int, int]
"""(block, fill): a block, and how many of its tokens the state has consumed."""


def states_for(each: int, size: int, block_bytes: int, max_running: int, least: int = RUNNING) -> int:
    """The number of states of `each` bytes for a pool of `size` bytes that also has blocks; a sequence needs
    `least`."""
    needed = least * each + block_bytes
    if size < needed:
        raise RequestError(
            f"kv_bytes gives {size} bytes, and one sequence needs {least} states of {each} bytes and a block of "
            f"{block_bytes}: {least} × {each} + {block_bytes} = {needed}; raise kv_bytes to {needed} or more"
        )
    return max(least, min(STATES_PER_SEQUENCE * max_running, int(STATE_FRACTION * size) // each))


@dataclass(slots=True)
class Entry:
    slot: int
    kept: bool  # for later requests; otherwise freed when its sequence advances
    used: int  # the step in which it was last read or written


class StateTable:
    """Maps states to slots. running: the number of sequences that may run at once."""

    def __init__(self, block_size: int, slots: int = SLOTS, every: int = EVERY, running: int = SLOTS // 4) -> None:
        if every < 1 or every % block_size:
            raise RequestError(f"state_every is {every} tokens, and must be a multiple of the block of {block_size}")
        self.block_size, self.slots, self.every, self.running = block_size, slots, every, running
        self.spare = slots - RUNNING * running  # slots for states that are kept for later requests
        self.reached = 0  # 1 + the highest slot ever used
        self.dropped = 0  # kept states that were evicted
        self.reset()

    def reset(self) -> None:
        self._entries: dict[Name, Entry] = {}  # least recently used first
        self._fills: dict[int, set[int]] = defaultdict(set)
        self._free = list(range(self.slots - 1, -1, -1))
        self._vacated: list[Name] = []  # positions that sequences have advanced from
        self._current: set[Name] = set()  # the sequences' current positions
        self._step = 0
        self._kept_now = 0

    @property
    def in_use(self) -> int:
        return len(self._entries)

    def begin(self, current: set[Name]) -> None:
        """Begin a step; `current` are the positions of the running sequences."""
        self._step += 1
        self._current, self._kept_now = current, 0
        for name in self._vacated:
            if name in self._entries and not self._entries[name].kept and name not in current:
                self._drop(name)
        self._vacated = []

    def name(self, blocks: Sequence[int] | np.ndarray, position: int) -> Name:
        """The name of the state after this many tokens."""
        at = (position - 1) // self.block_size
        return int(blocks[at]), position - at * self.block_size

    def find(self, name: Name) -> int | None:
        """The slot of a state, or None; it is not evicted in this step."""
        entry = self._entries.pop(name, None)
        if entry is None:
            return None
        entry.used = self._step
        self._entries[name] = entry
        return entry.slot

    def longest(self, block: int, tokens: int) -> int:
        """The largest fill up to `tokens` for which the block has a state; 0 if there is none."""
        fill = max((fill for fill in self._fills.get(block, ()) if fill <= tokens), default=0)
        if fill:
            self.find((block, fill))
        return fill

    def keep(self, name: Name) -> int | None:
        """A slot for a state that later requests may continue from; None if there is no spare one."""
        if name in self._entries:
            self._entries[name].kept = True
            return self.find(name)
        if self._kept_now >= self.spare:
            return None
        self._kept_now += 1
        return self._add(name, kept=True)

    def advance(self, name: Name, before: Name | None = None) -> int:
        """The slot of the state a sequence advances to. before: the state it advances from, which nothing else in this
        step continues from."""
        slot = self.find(name)
        if slot is None and before is not None and self._can_move(before):
            entry = self._entries.pop(before)
            self._forget_fill(before)
            entry.used = self._step
            self._entries[name] = entry
            self._fills[name[0]].add(name[1])
            slot = entry.slot
        elif before is not None and before != name:
            self._vacated.append(before)
        return self._add(name, kept=False) if slot is None else slot

    def vacate(self, name: Name) -> None:
        """A sequence advances from this state in this step."""
        self._vacated.append(name)

    def planned(self, blocks: Sequence[int] | np.ndarray, start: int, end: int) -> list[int]:
        """Positions in (start, end] at which a state is to be stored."""
        positions: list[int] = []
        for at in range(start // self.block_size, (end - 1) // self.block_size + 1):
            fills = self._fills.get(int(blocks[at]), ())
            positions += [at * self.block_size + fill for fill in sorted(fills)]
        return [position for position in positions if start < position <= end]

    def forget(self, block: int) -> None:
        """Free the states of a freed block."""
        for fill in list(self._fills.get(block, ())):
            self._drop((block, fill))

    def move(self, block: int, to: int) -> None:
        """Transfer the states to another block with the same tokens."""
        for fill in list(self._fills.get(block, ())):
            entry = self._entries.pop((block, fill))
            self._forget_fill((block, fill))
            if (to, fill) in self._entries:
                self._free.append(entry.slot)
            else:
                self._entries[to, fill] = entry
                self._fills[to].add(fill)

    def _can_move(self, name: Name) -> bool:
        """Whether the slot can be reused for the next state: only one sequence uses it, in a block not yet full."""
        entry = self._entries.get(name)
        return entry is not None and not entry.kept and name[1] < self.block_size

    def _add(self, name: Name, kept: bool) -> int:
        if not self._free:
            self._evict()
        slot = self._free.pop()
        self.reached = max(self.reached, slot + 1)
        self._entries[name] = Entry(slot, kept, self._step)
        self._fills[name[0]].add(name[1])
        return slot

    def _evict(self) -> None:
        for name, entry in self._entries.items():
            if entry.used < self._step and name not in self._current:
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
        """Raise unless every slot is free or has one state, and every state's block is in use."""
        slots = [entry.slot for entry in self._entries.values()]
        if sorted(slots + self._free) != list(range(self.slots)):
            raise RuntimeError(f"{len(slots)} states and {len(self._free)} free slots do not add up to {self.slots}")
        if {(block, fill) for block, fills in self._fills.items() for fill in fills} != set(self._entries):
            raise RuntimeError("states and the blocks they belong to disagree")
        if dead := [name for name in self._entries if not live(name[0])]:
            raise RuntimeError(f"block {dead[0][0]} is free and has a state")


class StateBank:
    """The states' memory: per layer, tensors of (slots + rows, ...). The rows after the slots are for a batch that
    decodes in place, at the same addresses for any sequences."""

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
        """A copy of one state for another engine: its tensors in the order of `shapes`."""
        return [tensor[slot].clone() for parts in self._layers.values() for tensor in parts.values()]

    def restore(self, slot: int, state: Sequence[Tensor]) -> None:
        """Store a state that another engine's `copy` returned."""
        mine = (tensor for parts in self._layers.values() for tensor in parts.values())
        for tensor, incoming in zip(mine, state, strict=True):
            tensor[slot].copy_(incoming)

    def rows(self, layer: int, count: int) -> Carry:
        """A view of the first rows after the slots."""
        return Carry({name: self._rows(tensor, count) for name, tensor in self._layers[layer].items()})

    def load_rows(self, slots: Tensor) -> None:
        """Copy the states of these slots into the first rows."""
        for parts in self._layers.values():
            for tensor in parts.values():
                self._rows(tensor, len(slots)).copy_(tensor.index_select(0, slots))

    def keep_rows(self, layer: int, carry: Carry) -> None:
        """Store a mixer's new states in the rows, unless it has written them in place."""
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
        """Store the states of a call's sequences, or of some `rows` of them, in these slots."""
        state = carry.state
        for name, tensor in self._layers[layer].items():
            new = state[name] if rows is None else state[name].index_select(0, rows)
            tensor.index_copy_(0, slots, new.to(tensor.dtype))
