"""Chooses the replica of a work: the one that has its prefix cached, unless another is much less loaded.

A replica keeps the KV cache of what it computed, so samples of one prompt, siblings in a search and turns of a
conversation should go to the same one. Hashes of prefixes of 16, 32, 64 ... tokens are stored with their replica; the
longest known prefix decides. Load takes precedence: a replica with more than `ESCAPE` budgets of tokens more than the
least loaded one is skipped, and the prefix is assigned to the other one.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Sequence
from typing import Protocol, TypeVar

SHORTEST = 16  # the shortest prefix stored: a block of the CPU's KV cache
MAX_PREFIXES = 1 << 16  # prefixes stored
ESCAPE = 1.0


class Loaded(Protocol):
    number: int
    in_flight_tokens: int
    budget: int


R = TypeVar("R", bound=Loaded)


class Affinity:
    def __init__(self) -> None:
        self._replica_by_prefix: OrderedDict[int, int] = OrderedDict()  # prefix hash -> replica's number

    def choose(self, tokens: Sequence[int], salt: str, replicas: Sequence[R]) -> R:
        """Chooses among the replicas with capacity."""
        beginnings = _beginnings(tokens, salt)
        preferred = next(
            (self._replica_by_prefix[b] for b in reversed(beginnings) if b in self._replica_by_prefix), None
        )
        chosen = min(replicas, key=lambda r: (r.in_flight_tokens, r.number))
        for replica in replicas:
            if (
                replica.number == preferred
                and replica.in_flight_tokens <= chosen.in_flight_tokens + ESCAPE * replica.budget
            ):
                chosen = replica
        for beginning in beginnings:
            self._replica_by_prefix[beginning] = chosen.number
            self._replica_by_prefix.move_to_end(beginning)
        while len(self._replica_by_prefix) > MAX_PREFIXES:
            self._replica_by_prefix.popitem(last=False)
        return chosen


def _beginnings(tokens: Sequence[int], salt: str) -> list[int]:
    """Hashes of the first 16, 32, 64 ... tokens, each computed from the previous one."""
    hashes, length, before, whole = [], SHORTEST, 0, hash(salt)
    while length <= len(tokens):
        whole = hash((whole, *tokens[before:length]))
        hashes.append(whole)
        before, length = length, 2 * length
    return hashes
