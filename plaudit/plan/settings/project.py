"""Shared by all projects' settings: the sizes of a plan, and what a project does not support."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass

from plaudit.plan.cost.parts import MOST_SEQUENCES, OWN_ENGINE_SHARE, Parts
from plaudit.plan.cost.plans import Plan
from plaudit.plan.cost.prediction import Prediction
from plaudit.plan.shape.constants import Constants
from plaudit.plan.shape.workload import Workload

Lacks = Mapping[str, bool]
"""What a plan asks for, and whether it does."""


@dataclass(frozen=True, slots=True)
class Project:
    name: str
    form: str
    """The end of a file's name: sh or yaml."""
    lacks: Callable[[Prediction], Lacks]
    render: Callable[[Prediction], str]
    checked: str
    """By what, and of which version: our tests with the project's own parser, or nothing but its source."""

    def missing(self, prediction: Prediction) -> list[str]:
        return [name for name, true in self.lacks(prediction).items() if true]


@dataclass(frozen=True, slots=True)
class Sizes:
    """Of a plan, as trainers ask for them."""

    prediction: Prediction

    @property
    def plan(self) -> Plan:
        return self.prediction.plan

    @property
    def work(self) -> Workload:
        return self.prediction.workload

    @property
    def prompts(self) -> int:
        return max(1, self.work.batch // self.work.group)

    @property
    def minibatches(self) -> int:
        return max(1, self.work.updates // self.work.epochs)

    @property
    def longest_prompt(self) -> int:
        """Only the mean is planned: twice that, in whole blocks."""
        return max(64, math.ceil(2 * self.work.prompt / 64) * 64)

    @property
    def longest_response(self) -> int:
        return math.ceil(self.work.longest)

    @property
    def longest(self) -> int:
        return self.longest_prompt + self.longest_response

    @property
    def micro_tokens(self) -> int:
        """Of a device: no project takes fewer than its longest sequence has."""
        cut = self.plan.training
        return max(cut.micro_tokens, math.ceil(self.longest / cut.cp))

    @property
    def engine_share(self) -> float:
        """Of a device's memory: all that an engine alone may take; beside a trainer what the plan has for it, since
        the rest is needed."""
        if not self.plan.shared:
            return OWN_ENGINE_SHARE
        memory = self.prediction.phase("generation").memory
        held = sum(part.value for part in memory.parts if part.name in ("cache", "graphs", "reserve"))
        engine = Parts(self.work, self.plan, Constants()).replica.weight_bytes()
        return math.ceil(100 * (held + engine) / self.plan.cluster.accelerator.memory) / 100

    @property
    def sequences(self) -> int:
        """That an engine decodes together, in each of its attention groups."""
        groups = self.plan.generation.attention_groups
        return max(1, int(min(MOST_SEQUENCES, self.prediction.concurrency / groups)))

    @property
    def sleeps(self) -> bool:
        """Whether the engine gives its memory back while the trainer works."""
        return self.plan.placement in ("swapped", "hybrid")


def command(program: str, options: Mapping[str, object], join: str = " ") -> str:
    """A shell command, an option a line. True: the flag alone; False and None: left out."""
    lines = []
    for name, value in options.items():
        if value is True and join == " ":
            lines.append(name)
        elif value is not None and (value is not False or join == "="):
            lines.append(f"{name}{join}{value}")
    return " \\\n    ".join([program, *lines]) + "\n"
