"""A taskset for verifiers: sums with one answer each, right or wrong."""

from __future__ import annotations

import random
from collections.abc import Iterable

import verifiers.v1 as vf

__all__ = ["SumsTaskset"]


class SumsConfig(vf.TasksetConfig):
    numbers: int = 6


class SumsData(vf.TaskData):
    answer: int


class SumsTask(vf.Task[SumsData]):
    @vf.reward
    async def right(self, trace: vf.Trace) -> float:
        return float(trace.last_reply.endswith(f"#{self.data.answer}"))


class SumsTaskset(vf.Taskset[SumsTask, SumsConfig]):
    def load(self) -> Iterable[SumsTask]:
        rng = random.Random(0)
        for _ in range(256):
            numbers = [rng.randint(1, 9) for _ in range(self.config.numbers)]
            data = SumsData(prompt="+".join(map(str, numbers)) + "=", answer=sum(numbers))
            yield SumsTask(data, self.config.task)
