"""Which replica computes a work: the one that has its beginning, unless another has much less to do.

A replica keeps the KV of what it computed, so samples of one prompt, siblings in a search and turns of a conversation
should meet again. Beginnings of 16, 32, 64 ... tokens are remembered with the replica they went to; the longest that is
known decides. Load wins over memory: a replica that holds more than `ESCAPE` budgets more than the least loaded one is
passed by, and the beginning moves with the work.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Sequence
from typing import Protocol, TypeVar

SHORTEST = 16  # tokens of a beginning that is worth remembering: a block of the CPU's cache
MOST_PREFIXES = 1 << 16  # beginnings that are remembered
ESCAPE = 1.0


class Loaded(Protocol):
    number: int
    in_flight_tokens: int
    budget: int


R = TypeVar("R", bound=Loaded)


class Affinity:
    def __init__(self) -> None:
        self._replica_by_prefix: OrderedDict[int, int] = OrderedDict()  # beginning -> replica's number

    def choose(self, tokens: Sequence[int], salt: str, replicas: Sequence[R]) -> R:
        """One of the replicas that have capacity."""
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
        while len(self._replica_by_prefix) > MOST_PREFIXES:
            self._replica_by_prefix.popitem(last=False)
        return chosen


def _beginnings(tokens: Sequence[int], salt: str) -> list[int]:
    """Hashes of the first 16, 32, 64 ... tokens, each made from the one before it."""
    hashes, length, before, whole = [], SHORTEST, 0, hash(salt)
    while length <= len(tokens):
        whole = hash((whole, *tokens[before:length]))
        hashes.append(whole)
        before, length = length, 2 * length
    return hashes
