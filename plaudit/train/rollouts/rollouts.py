"""Rollouts: prompts in, scored samples of whole groups out."""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from dataclasses import replace
from typing import Protocol

import torch

from plaudit.algo.methods.dapo import informative
from plaudit.config import RlRecipe
from plaudit.config.prompting import SamplingTable
from plaudit.core import SamplingParams
from plaudit.records import Batch, Prompt, Sample
from plaudit.train.data.answered import with_prompt
from plaudit.train.data.prompts import Prompts
from plaudit.train.rollouts.batch_metrics import filtered, totals
from plaudit.train.run.clock import Clock


class Generator(Protocol):
    """The engine interface for players: `core.Engine`, or one in another process."""

    def generate(self, prompts: list[list[int]], params: list[SamplingParams]) -> list[Sample]: ...


class Player(Protocol):
    """Produces complete responses: single-turn, or multi-turn with an environment."""

    def play(
        self, prompts: Sequence[Prompt], n: int, seed: str, first: int = 0, evaluate: bool = False
    ) -> list[Sample]:
        """Return n samples per prompt, in order; `group` is the prompt's index. Sampling depends only on the seed and
        the prompt's index in the step, `first` + index. `evaluate`: use the evaluation's sampling parameters."""


class SampleScorer(Protocol):
    """Computes rewards in this process, or over all ranks together."""

    def score(self, prompts: Sequence[Prompt], samples: Sequence[Sample]) -> list[Sample]:
        """`ask`, then `check`."""

    def request_scores(self, prompts: Sequence[Prompt], samples: Sequence[Sample]) -> list[Sample]: ...

    def check(self, samples: Sequence[Sample]) -> None: ...

    def close(self) -> None: ...


class RolloutSource(Protocol):
    """Scored samples, one step at a time. `drawn` is the number of training prompts used so far."""

    drawn: int

    def next(self, step: int, version: int) -> Batch:
        """Return a step's batch. On an error `drawn` is unchanged, so that the run can be resumed here."""

    def heldout(self, prompts: Sequence[Prompt], n: int, seed: str) -> list[Sample]: ...


class Rollouts:
    """`drawn` is the number of training prompts used so far: the position in the data."""

    def __init__(self, recipe: RlRecipe, player: Player, prompts: Prompts, scorer: SampleScorer, clock: Clock) -> None:
        self.recipe = recipe
        self.player = player
        self.prompts = prompts
        self.scorer = scorer
        self.clock = clock
        self.drawn = 0

    def next(self, step: int, version: int) -> Batch:
        """Return the samples of one step. With dynamic sampling, groups whose rewards are all equal are replaced, up to
        the maximum number of rounds. On an error `drawn` is unchanged."""
        drawn = self.drawn
        try:
            samples, metrics = self._step(step)
            return Batch(tuple(samples), version, metrics)
        except BaseException:
            self.drawn = drawn
            raise

    def _step(self, step: int) -> tuple[list[Sample], dict[str, float]]:
        wanted, dynamic = self.recipe.train.prompts_per_step, self.recipe.algorithm.dynamic
        rounds = dynamic.rounds if dynamic is not None else 1
        kept: list[list[Sample]] = []
        spare: list[list[Sample]] = []
        for _ in range(rounds):
            for group in self._round(step):
                (kept if dynamic is None or rewards_differ(group) else spare).append(group)
            if len(kept) >= wanted:
                break
        # The batch size is constant; groups with equal rewards fill it if the rounds gave too few others.
        chosen = (kept + spare)[:wanted]
        samples = [
            sample if sample.group == i else replace(sample, group=i)
            for i, group in enumerate(chosen)
            for sample in group
        ]
        return samples, {} if dynamic is None else filtered(kept, spare)

    def heldout(self, prompts: Sequence[Prompt], n: int, seed: str) -> list[Sample]:
        """Return scored responses to held-out prompts."""
        samples = self.player.play(prompts, n, seed, evaluate=True)
        return self.scorer.score([prompts[sample.group] for sample in samples], samples)

    def _round(self, step: int) -> list[list[Sample]]:
        first, count = self.drawn, self.recipe.train.prompts_per_step
        self.drawn += count
        with self.clock("prompts"):
            prompts = self.prompts.train(range(first, self.drawn))
        with self.clock("generate"):
            samples = self.player.play(prompts, self.recipe.train.samples_per_prompt, f"{step} {first}")
        with self.clock("reward"):
            samples = self.scorer.score([prompts[sample.group] for sample in samples], samples)
        groups: list[list[Sample]] = [[] for _ in prompts]
        for sample in samples:
            groups[sample.group].append(with_prompt(sample, prompts[sample.group], self.prompts))
        return groups


class SingleTurn:
    """Single-turn responses."""

    def __init__(self, engine: Generator, sampling: SamplingTable, seed: int) -> None:
        self.engine = engine
        self.sampling = sampling
        self.seed = seed

    def play(
        self, prompts: Sequence[Prompt], n: int, seed: str, first: int = 0, evaluate: bool = False
    ) -> list[Sample]:
        token_ids = [list(prompt.token_ids or ()) for prompt in prompts]
        table = self.sampling.evaluating() if evaluate else self.sampling
        params = [sampling_params(table, n, f"{self.seed} {seed} {first + index}") for index in range(len(prompts))]
        return self.engine.generate(token_ids, params)


def sampling_params(table: SamplingTable, n: int, seed: str) -> SamplingParams:
    number = int.from_bytes(hashlib.sha256(seed.encode()).digest()[:7], "big")
    return SamplingParams(
        n=n, temperature=table.temperature, top_p=table.top_p, top_k=table.top_k, max_tokens=table.max_tokens,
        stop=table.stop, seed=number,
    )  # fmt: skip


def rewards_differ(group: Sequence[Sample]) -> bool:
    rewards = totals(group)
    return bool(informative(torch.tensor(rewards), [0] * len(rewards)))
