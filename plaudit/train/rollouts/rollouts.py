"""Rollouts: prompts in, scored samples of whole groups out."""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from dataclasses import replace
from typing import Any, Protocol

import torch

from plaudit.algo.methods.dapo import informative
from plaudit.config import RlRecipe
from plaudit.config.rl import SamplingTable
from plaudit.core import SamplingParams
from plaudit.records import Batch, Prompt, Sample
from plaudit.train.data.answered import with_prompt
from plaudit.train.data.prompts import Prompts
from plaudit.train.run.clock import Clock


class Generator(Protocol):
    """The engine as a player sees it: `core.Engine`, or one of another process."""

    def generate(self, prompts: list[list[int]], params: list[SamplingParams]) -> list[Sample]: ...


class Player(Protocol):
    """Plays prompts out to the end: one answer, or turns with an environment."""

    def play(self, prompts: Sequence[Prompt], n: int, seed: str, first: int = 0) -> list[Sample]:
        """n samples of each prompt, in order; `group` is the prompt's index. What is sampled depends on the seed and
        the prompt's place in the step, `first` + index, alone."""


class SampleScorer(Protocol):
    """The rewards of this process, or of all ranks together."""

    def score(self, prompts: Sequence[Prompt], samples: Sequence[Sample]) -> list[Sample]:
        """`ask`, then `check`."""

    def ask(self, prompts: Sequence[Prompt], samples: Sequence[Sample]) -> list[Sample]: ...

    def check(self, samples: Sequence[Sample]) -> None: ...

    def close(self) -> None: ...


class RolloutSource(Protocol):
    """Scored samples, a step's worth at a time. `drawn` is how many training prompts were asked for them so far."""

    drawn: int

    def next(self, step: int, version: int) -> Batch:
        """Raises without having changed `drawn`, so that a run that ends here can go on from here."""

    def heldout(self, prompts: Sequence[Prompt], n: int, seed: str) -> list[Sample]: ...


class Rollouts:
    """`drawn` is how many training prompts were asked so far: the position in the data."""

    def __init__(self, recipe: RlRecipe, player: Player, prompts: Prompts, scorer: SampleScorer, clock: Clock) -> None:
        self.recipe = recipe
        self.player = player
        self.prompts = prompts
        self.scorer = scorer
        self.clock = clock
        self.drawn = 0

    def next(self, step: int, version: int) -> Batch:
        """The samples of one step. With dynamic sampling, groups whose rewards are all equal are replaced by others,
        as long as the rounds last. Where it fails, nothing was drawn."""
        drawn = self.drawn
        try:
            return Batch(tuple(self._step(step)), version)
        except BaseException:
            self.drawn = drawn
            raise

    def _step(self, step: int) -> list[Sample]:
        wanted, dynamic = self.recipe.train.prompts_per_step, self.recipe.algorithm.dynamic
        rounds = dynamic.rounds if dynamic is not None else 1
        kept: list[list[Sample]] = []
        spare: list[list[Sample]] = []
        for _ in range(rounds):
            for group in self._round(step):
                (kept if dynamic is None or _differ(group) else spare).append(group)
            if len(kept) >= wanted:
                break
        # A batch keeps its size; groups that teach nothing fill it where the rounds gave too few that do.
        chosen = (kept + spare)[:wanted]
        return [
            sample if sample.group == i else replace(sample, group=i)
            for i, group in enumerate(chosen)
            for sample in group
        ]

    def heldout(self, prompts: Sequence[Prompt], n: int, seed: str) -> list[Sample]:
        """Scored answers to held-out prompts."""
        samples = self.player.play(prompts, n, seed)
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
    """One answer to each prompt."""

    def __init__(self, engine: Generator, sampling: SamplingTable, seed: int) -> None:
        self.engine = engine
        self.sampling = sampling
        self.seed = seed

    def play(self, prompts: Sequence[Prompt], n: int, seed: str, first: int = 0) -> list[Sample]:
        token_ids = [list(prompt.token_ids or ()) for prompt in prompts]
        params = [
            sampling_params(self.sampling, n, f"{self.seed} {seed} {first + index}") for index in range(len(prompts))
        ]
        return self.engine.generate(token_ids, params)


def sampling_params(table: SamplingTable, n: int, seed: str) -> SamplingParams:
    number = int.from_bytes(hashlib.sha256(seed.encode()).digest()[:7], "big")
    return SamplingParams(
        n=n, temperature=table.temperature, top_p=table.top_p, top_k=table.top_k, max_tokens=table.max_tokens,
        stop=table.stop, seed=number,
    )  # fmt: skip


def _differ(group: Sequence[Sample]) -> bool:
    rewards = [sample.reward + _on_the_way(sample) for sample in group if sample.reward is not None]
    return bool(informative(torch.tensor(rewards), [0] * len(rewards)))


def batch_metrics(samples: Sequence[Sample]) -> dict[str, float]:
    """What the samples of a step are like: rewards, groups, lengths, truth."""
    scored: list[float] = [sample.reward for sample in samples if sample.reward is not None]
    rewards = torch.tensor(scored, dtype=torch.float64)
    lengths = torch.tensor([float(sum(sample.mask)) for sample in samples], dtype=torch.float64)
    stopped = [float(sum(sample.mask)) for sample in samples if sample.finish_reason == "stop"]
    figures: dict[str, float] = {
        "reward/errors": sum(sample.error is not None for sample in samples) / len(samples),
        "length/mean": lengths.mean().item(),
        "length/min": lengths.min().item(),
        "length/max": lengths.max().item(),
        "length/prompt_mean": sum(len(sample.prompt_ids) for sample in samples) / len(samples),
        "length/truncated": _share(samples, "length"),
        "length/aborted": _share(samples, "abort"),
    }
    if stopped:
        figures["length/stopped_mean"] = sum(stopped) / len(stopped)
    if scored:
        figures |= {
            "reward/mean": rewards.mean().item(),
            "reward/std": rewards.std(correction=0).item(),
            "reward/min": rewards.min().item(),
            "reward/max": rewards.max().item(),
        }
    groups: dict[int, list[float]] = {}
    for sample in samples:
        if sample.reward is not None:
            groups.setdefault(sample.group, []).append(sample.reward + _on_the_way(sample))
    if any(len(group) > 1 for group in groups.values()):
        figures["reward/zero_std_groups"] = sum(len(set(group)) == 1 for group in groups.values()) / len(groups)
    judged: list[Any] = [sample.extra.get("right") for sample in samples]
    verdicts = [right for right in judged if right is not None]
    if verdicts:
        figures["accuracy"] = sum(verdicts) / len(verdicts)
        by_group: dict[int, bool] = {}
        for sample in samples:
            by_group[sample.group] = by_group.get(sample.group, False) or bool(sample.extra.get("right"))
        figures["pass_at_k"] = sum(by_group.values()) / len(by_group)
    turns = [float(sample.extra["turns"]) for sample in samples if "turns" in sample.extra]
    if turns:
        figures["turns/mean"] = sum(turns) / len(turns)
        figures["turns/reward"] = sum(map(_on_the_way, samples)) / len(samples)
    return figures


def staleness(batch: Batch) -> dict[str, float]:
    """Versions between the learner and the oldest token of each sample."""
    ages = [batch.version - min(sample.versions) for sample in batch.samples if sample.versions]
    return {"staleness/mean": sum(ages) / len(ages), "staleness/max": float(max(ages))} if ages else {}


def _on_the_way(sample: Sample) -> float:
    """What an environment gave for single turns."""
    return sum(sample.token_rewards or (), 0.0)


def _share(samples: Sequence[Sample], reason: str) -> float:
    return sum(sample.finish_reason == reason for sample in samples) / len(samples)
