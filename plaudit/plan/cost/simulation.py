"""Event simulation of generation that overlaps training, for which there is no closed formula."""

from __future__ import annotations

import heapq
from dataclasses import dataclass

from plaudit.plan.cost.decode import Replica
from plaudit.plan.cost.generation import mixed
from plaudit.plan.shape.lengths import Lengths

PARTICLES = 24
BATCHES = 6


@dataclass(frozen=True, slots=True)
class AsyncRun:
    step_seconds: float
    """Seconds between two updates in steady state."""
    trainer_waits: float
    """Share of the time in which the trainer waits for responses."""
    staleness: float
    """Mean number of updates between the weights that a response started with and the update that trains on it."""


def overlap(
    replica: Replica, replicas: int, batch: float, prompt: float, lengths: Lengths, concurrency: float,
    train_seconds: float, sync_seconds: float, staleness: int, group: int = 1, ahead: int = 0,
) -> AsyncRun:  # fmt: skip
    """Simulate async. A response of batch k may start once update k - staleness is published; with staleness 0
    generation and training alternate.

    `ahead`: batches that generate concurrently; by default as many as staleness allows. With one, the next batch starts
    when the last response of a batch is finished, and a step takes the longer of both sides plus the publication.

    One replica represents all. It pauses while weights arrive; sequences in flight continue with the new weights.
    """
    own = max(1.0, batch / replicas)
    count = max(1, min(PARTICLES, int(own)))
    weight = own / count
    order = mixed(lengths.quantiles(count, batch))
    ahead = ahead or staleness + 1
    slots = max(1, int(min(concurrency, own * ahead) / weight))
    scale = max(1.0, weight / concurrency)
    prefill = replica.prefill_seconds(prompt) * weight / max(1, group)
    total = BATCHES + 2 * staleness
    waiting = [(k, length) for k in range(total) for length in order][::-1]
    active: list[tuple[float, float, int, int]] = []
    missing = [count] * total
    now = clock = 0.0
    version, training, trainer_done = 0, False, 0.0
    published: list[float] = []
    idle, aged = 0.0, 0.0
    free_since = 0.0
    while version < total:
        oldest = next((k for k in range(version, total) if missing[k]), total)
        while (
            waiting
            and len(active) < slots
            and waiting[-1][0] - version <= staleness
            and waiting[-1][0] - oldest < ahead
        ):
            k, length = waiting.pop()
            heapq.heappush(active, (now + length, length, k, version))
            clock += prefill
        if not training and missing[version] == 0:
            training, trainer_done = True, clock + train_seconds
            idle += clock - free_since if published else 0.0
        alive = len(active)
        until = trainer_done if training else float("inf")
        if alive:
            ends = active[0][0]
            context = prompt + (now + ends) / 2 - sum(end - length for end, length, _, _ in active) / alive
            step = scale * replica.step_seconds(min(alive * weight, concurrency), context)
            if clock + (ends - now) * step <= until:
                clock += (ends - now) * step
                now = ends
                while active and active[0][0] <= now:
                    _, _, k, began = heapq.heappop(active)
                    missing[k] -= 1
                    aged += k - began
                continue
            now += max(0.0, until - clock) / step
        clock = max(clock, until) + sync_seconds
        version, training = version + 1, False
        published.append(clock)
        free_since = clock
    settled = published[len(published) // 2 - 1 :]
    step_seconds = (settled[-1] - settled[0]) / max(1, len(settled) - 1) if len(settled) > 1 else published[-1]
    return AsyncRun(step_seconds, min(1.0, idle / max(clock, 1e-9)), aged / max(1, total * count))
