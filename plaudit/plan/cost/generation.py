"""Seconds of a whole generation phase: prefill, waves when the cache is small, and the tail of the longest responses.

The batch is simulated by events, as a replica lives it: sequences enter when there is room, decode together, and the
step gets cheaper as they leave. A few dozen particles stand for the sequences.
"""

from __future__ import annotations

import heapq
from dataclasses import dataclass, replace
from functools import lru_cache

from plaudit.plan.cost.decode import FORMULAS, Replica
from plaudit.plan.cost.term import Term, total
from plaudit.plan.shape.lengths import Lengths

PARTICLES = 48
DECODE = "sum over stretches of steps · decode step(sequences alive, context), by part"
PREFILL = "prompts of a replica · (2 · active parameters · tokens + attention) / rate"


@dataclass(frozen=True, slots=True)
class Generation:
    """What one phase of generation came to."""

    seconds: Term
    waves: float


def mixed(lengths: list[float]) -> list[float]:
    """The same lengths in an order in which long and short alternate, as drawn prompts do."""
    count = len(lengths)
    stride = next(s for s in range(max(1, int(count * 0.618)), count + 2) if _coprime(s, count))
    return [lengths[(i * stride) % count] for i in range(count)]


def _coprime(a: int, b: int) -> bool:
    while b:
        a, b = b, a % b
    return a == 1


def generate(
    replica: Replica, replicas: int, batch: float, prompt: float, lengths: Lengths, concurrency: float, group: int = 1
) -> Generation:
    """`batch` responses over `replicas` alike, `group` of them to each prompt (its prefill is shared)."""
    # Many plans differ in training alone, and a cache that holds more than the replica's share is as good as any other.
    own = max(1.0, batch / replicas)
    return _generate(replica, replicas, batch, prompt, lengths, min(own, concurrency), group)


@lru_cache(maxsize=1024)
def _generate(
    replica: Replica, replicas: int, batch: float, prompt: float, lengths: Lengths, concurrency: float, group: int
) -> Generation:
    own = max(1.0, batch / replicas)
    count = max(1, min(PARTICLES, int(own)))
    weight = own / count
    waiting = mixed(lengths.quantiles(count, batch))[::-1]
    slots = max(1, int(min(own, concurrency) / weight))
    weight_now = min(weight, concurrency)
    prefill = replica.prefill_seconds(prompt) / max(1, group)
    active: list[tuple[float, float]] = []
    """(step at which it ends, its length)"""
    now = reading = 0.0
    spent: dict[str, float] = {}
    """Seconds of decoding by what they go into."""
    while waiting or active:
        while waiting and len(active) < slots:
            length = waiting.pop()
            heapq.heappush(active, (now + length, length))
            reading += weight * prefill
        ends = active[0][0]
        alive = len(active)
        # In the middle of the stretch the sequences have grown by so much on average.
        context = prompt + (now + ends) / 2 - sum(end - length for end, length in active) / alive
        for name, seconds in replica.step_parts(alive * weight_now, context).items():
            spent[name] = spent.get(name, 0.0) + (ends - now) * seconds
        now = ends
        while active and active[0][0] <= now:
            heapq.heappop(active)
    # Where even one particle does not fit at once, it passes in parts.
    again = weight / weight_now
    decoded = [Term(name, again * value, "s", FORMULAS[name]) for name, value in spent.items() if value]
    inputs = (("responses", batch), ("replicas", replicas), ("at once", min(own, concurrency)), ("prompt", prompt))
    parts = (
        Term("prefill", reading, "s", PREFILL, inputs),
        replace(total("decode", decoded, "s", DECODE), inputs=inputs),
    )
    whole = replace(total("generation", parts, "s", "prefill + decode"), inputs=inputs)
    return Generation(whole, own / min(own, concurrency))
