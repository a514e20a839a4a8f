"""The queue of async rollouts over several training ranks: the main rank owns it, and all get the same batches.

The main rank alone plays and scores what goes into the queue, at any time: the others train meanwhile and cannot help.
Whether a batch is young enough is checked there, before any rank has it. Every rank computes the same advantages of a
batch, and learns from its share of each minibatch.
"""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import nullcontext
from dataclasses import replace

from plaudit.place.async_rollouts import AsyncRollouts
from plaudit.records import Batch, Prompt, Sample
from plaudit.train.rollouts.rollouts import Player, SampleScorer
from plaudit.train.rollouts.sharing import Share, share_of
from plaudit.train.run.clock import Clock
from plaudit.train.run.orders import Orders


class SharedQueue:
    """queue           the main rank's; None on the others
    player, scorer  of all ranks together, for evaluations
    """

    def __init__(
        self, queue: AsyncRollouts | None, player: Player, scorer: SampleScorer, clock: Clock, orders: Orders
    ) -> None:
        self.queue = queue
        self.player = player
        self.scorer = scorer
        self.clock = clock
        self.orders = orders
        self._drawn = 0  # as last reported by the main rank

    @property
    def drawn(self) -> int:
        return self._drawn if self.queue is None else self.queue.drawn

    @drawn.setter
    def drawn(self, count: int) -> None:
        self._drawn = count
        if self.queue is not None:
            self.queue.drawn = count

    def next(self, step: int, version: int) -> Batch:
        mine = Share() if self.queue is None else _taken(self.queue, step, version)
        with self.clock("wait"):
            share: Share = self.orders.value(mine, Share)
        share.check(0)
        self._drawn = share.drawn
        return Batch(share.samples, version, share.metrics)

    def heldout(self, prompts: Sequence[Prompt], n: int, seed: str) -> list[Sample]:
        samples = self.player.play(prompts, n, seed, evaluate=True)
        # The main rank's rewards may be at work for the queue.
        with nullcontext() if self.queue is None else self.queue.scoring:
            return self.scorer.score([prompts[sample.group] for sample in samples], samples)


def _taken(queue: AsyncRollouts, step: int, version: int) -> Share:
    batch = Batch(())

    def take() -> tuple[Sample, ...]:
        nonlocal batch
        batch = queue.next(step, version)
        return batch.samples

    return replace(share_of(take), metrics=batch.metrics, drawn=queue.drawn)
