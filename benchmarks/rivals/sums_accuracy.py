"""Accuracy of a policy of the sums world on held-out problems, measured by the same code for every trainer."""

from __future__ import annotations

from typing import Any

from plaudit.config.supervised import SumsTable
from plaudit.core import Engine, SamplingParams
from plaudit.models import load_policy
from plaudit.worlds import get_world
from plaudit.worlds.sums import Problem, judge


class SumsAccuracy:
    """Uses its own copy of the policy, into which the trainer's weights are copied, so the trainer's module is not
    changed."""

    def __init__(self, policy: str, items: int) -> None:
        self.loaded = load_policy(policy)
        self.engine = Engine(self.loaded.module, self.loaded.tokenizer, seed=1)
        self.problems: list[Problem] = get_world("sums", 1, SumsTable()).heldout(items)
        self.version = 0

    def of(self, module: Any) -> float:
        """The accuracy of one sampled answer per problem, at temperature 1, with the same random draws every time."""
        self.loaded.module.load_state_dict(module.state_dict())
        self.version += 1
        self.engine.new_version(self.version)
        params = [SamplingParams(max_tokens=96, seed=i) for i in range(len(self.problems))]
        samples = self.engine.generate([problem.prompt for problem in self.problems], params)
        right = [judge(problem, sample.text).right for problem, sample in zip(self.problems, samples, strict=True)]
        return sum(right) / len(right)
