"""The scheduler for models with recurrent layers: it plans which states a step stores before the step is computed, so
that chunks planned after a prompt can continue from them."""

from __future__ import annotations

from collections.abc import Hashable
from typing import Any

from plaudit.core.device.backend import Backend
from plaudit.core.device.lockstep import Leader
from plaudit.core.kv.blocks import BlockPool
from plaudit.core.kv.memory import pool_bytes
from plaudit.core.kv.prefix import PrefixTree
from plaudit.core.kv.stateful import StatefulPool, StatefulTree
from plaudit.core.model.decoder import Decoder
from plaudit.core.scheduler import Chunk, Plan, Scheduler
from plaudit.core.sequence import Sequence
from plaudit.core.states import RUNNING, Name, StateTable, states_for
from plaudit.errors import RequestError


def reserve_states(backend: Backend, kv_bytes: int | float | None, max_running: int, every: int) -> tuple[int, int]:
    """Reserve slots for the states of recurrent layers; returns how many sequences may run with them, and the bytes."""
    decoder, block_size = backend.decoder, backend.block_size
    if not decoder.states:
        return max_running, 0
    if isinstance(backend, Leader):
        raise RequestError(
            f"{decoder.name} has recurrent layers, whose states cannot be sharded over ranks: set tensor_parallel = 1 "
            "and pipeline_parallel = 1"
        )
    size, each = pool_bytes(decoder, kv_bytes), decoder.state_bytes()
    least = RUNNING + backend.state_rows(1)
    states = states_for(each, size, block_size * decoder.token_bytes(), max_running, least)
    max_running = min(max_running, states // least)
    while (slots := states - backend.state_rows(max_running)) < RUNNING * max_running:
        max_running -= 1  # state_rows rounds up
    backend.states = StateTable(block_size, slots, every, max_running)
    return max_running, states * each


def refuse_handover(decoder: Decoder) -> None:
    if decoder.record_bytes:
        raise RequestError(
            "recorded experts are not transferred with the KV of their tokens: let one engine compute the prompts and "
            "generate, or leave out train.routing_replay"
        )


def scheduler_for(backend: Backend, blocks: int, **limits: Any) -> Scheduler:
    """Create the scheduler with its blocks and its tree; `limits` are the Scheduler's arguments."""
    if backend.states is None:
        pool = BlockPool(blocks)
        return Scheduler(pool, PrefixTree(pool, backend.block_size), **limits)
    stateful = StatefulPool(blocks, backend.states)
    return RecurrentScheduler(stateful, StatefulTree(stateful, backend.block_size), **limits)


class RecurrentScheduler(Scheduler):
    def __init__(self, pool: StatefulPool, tree: StatefulTree, **limits: Any) -> None:
        super().__init__(pool, tree, **limits)
        self.states: StateTable = pool.states

    def plan(self, key: Hashable, alone: bool = False) -> Plan:
        self.states.begin({self._name(s, s.computed) for s in self.running if s.computed})
        return super().plan(key, alone)

    def _name(self, sequence: Sequence, position: int) -> Name:
        return self.states.name(sequence.chain.blocks, position)

    def _insert(self, key: Hashable, chunk: Chunk) -> None:
        super()._insert(key, chunk)
        sequence, every = chunk.sequence, self.states.every
        start, end = sequence.computed, sequence.computed + chunk.tokens
        # Where the samples of a prompt diverge, or where the same scoring request would resume.
        branch = min(sequence.shareable, sequence.prompt_len - 1)
        for position in sorted({branch, *range(every * (start // every + 1), end + 1, every)}):
            if start < position <= end and sequence.cacheable:
                self.states.keep(self._name(sequence, position))

    def _share_prefix(self, sequence: Sequence, key: Hashable, plan: Plan, reserve: int) -> bool:
        copied = super()._share_prefix(sequence, key, plan, reserve)
        if sequence.computed and not copied and self.states.find(self._name(sequence, sequence.computed)) is None:
            self._undo_share(sequence, plan, copied)  # the state is in a block that could not be copied
        return copied
