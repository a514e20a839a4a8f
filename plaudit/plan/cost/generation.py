"""Time of a whole generation phase: prefill, waves if the cache is small, and the tail of the longest responses.

The batch is simulated event by event on one replica: sequences enter when there is cache capacity, decode together, and
steps get cheaper as sequences finish. A few dozen particles represent the sequences.
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
    """Time and number of waves of one generation phase."""

    seconds: Term
    waves: float


def mixed(lengths: list[float]) -> list[float]:
    """Reorder the lengths so that long and short alternate, as in randomly drawn prompts."""
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
    """Time to generate `batch` responses on `replicas` replicas; the `group` responses to a prompt share a prefill."""
    # Many plans differ only in training, and KV cache beyond the replica's share changes nothing: with the concurrency
    # clamped, they share one lru_cache entry.
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
    """Decode seconds by component."""
    while waiting or active:
        while waiting and len(active) < slots:
            length = waiting.pop()
            heapq.heappush(active, (now + length, length))
            reading += weight * prefill
        ends = active[0][0]
        alive = len(active)
        # Mean context at the midpoint of this interval.
        context = prompt + (now + ends) / 2 - sum(end - length for end, length in active) / alive
        for name, seconds in replica.step_parts(alive * weight_now, context).items():
            spent[name] = spent.get(name, 0.0) + (ends - now) * seconds
        now = ends
        while active and active[0][0] <= now:
            heapq.heappop(active)
    # If not even one particle fits at once, its sequences are processed in several passes.
    again = weight / weight_now
    decoded = [Term(name, again * value, "s", FORMULAS[name]) for name, value in spent.items() if value]
    inputs = (("responses", batch), ("replicas", replicas), ("at once", min(own, concurrency)), ("prompt", prompt))
    parts = (
        Term("prefill", reading, "s", PREFILL, inputs),
        replace(total("decode", decoded, "s", DECODE), inputs=inputs),
    )
    whole = replace(total("generation", parts, "s", "prefill + decode"), inputs=inputs)
    return Generation(whole, own / min(own, concurrency))
