"""The engine's counters and gauges."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Stats:
    """Counters since the engine was created, and its current use of memory and slots."""

    tokens_computed: int
    tokens_shared: int
    tokens_resident: int
    blocks_in_use: int
    blocks_total: int
    kv_bytes: int
    running: int
    waiting: int
    preemptions: int
    evictions: int
    states_in_use: int  # of recurrent layers
    states_total: int
    states_dropped: int  # stored states that were evicted
    steps: int
    version: int
