"""Computes rewards of samples, on a server or in this process. A failure is an error, never a number."""

from __future__ import annotations

import math
import os
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import replace
from itertools import accumulate, pairwise
from typing import Protocol

from plaudit.client.client import RewardClient
from plaudit.config.reward import BlendTable, RewardTable, RlRewardTable
from plaudit.errors import ConfigError, RunError
from plaudit.records import Item, ItemError, Prompt, Sample, StepScores
from plaudit.reward import load_reward
from plaudit.reward.directory import complete
from plaudit.reward.reward import Result, Reward
from plaudit.train.run.overdue import Warn, ignore_warning, overdue

LARGEST = 1e18  # training computes variances of rewards in float32, whose largest number is 3.4e38


class RewardFailed(RunError):
    """Rewards are unavailable: the state is saved, and `--resume` continues."""


class Source(Protocol):
    def score(self, items: Sequence[Item]) -> Sequence[Result]: ...

    def close(self) -> None: ...


class Scorer:
    """Assigns each sample its reward or its error, in order."""

    def __init__(self, table: RlRewardTable, source: Source | None = None, warn: Warn = ignore_warning) -> None:
        """`source`: replaces the table's reward. `warn` is called while a server is slow."""
        self.table = table
        self.source = source or (ServerReward(table, warn) if table.url is not None else local_reward(table))

    def score(self, prompts: Sequence[Prompt], samples: Sequence[Sample]) -> list[Sample]:
        scored = self.request_scores(prompts, samples)
        self.check(scored)
        return scored

    def request_scores(self, prompts: Sequence[Prompt], samples: Sequence[Sample]) -> list[Sample]:
        """Score `samples[i]`, a response to `prompts[i]`. Samples that failed, or that have a reward from an agent, are
        skipped."""
        ended = ("stop", "length")
        finished = [i for i, s in enumerate(samples) if s.finish_reason in ended and s.reward is None]
        groups = [0, *accumulate(int(a is not b) for a, b in pairwise(prompts))]
        results = self.source.score([_item(prompts[i], samples[i], groups[i]) for i in finished])
        scored = list(samples)
        for i, result in zip(finished, results, strict=True):
            scored[i] = _with(samples[i], result)
        return scored

    def close(self) -> None:
        self.source.close()

    def check(self, samples: Sequence[Sample]) -> None:
        """Raise RewardFailed if more samples of a step have no reward than the recipe allows."""
        errors = Counter(f"{s.error.type}: {s.error.message}" for s in samples if s.error is not None)
        failed = errors.total()
        share = failed / max(1, len(samples))
        if failed and (self.table.on_error == "halt" or share > self.table.max_errors):
            limit = "on_error = halt" if self.table.on_error == "halt" else f"max_errors = {self.table.max_errors:g}"
            most, count = errors.most_common(1)[0]
            raise RewardFailed(
                f"{failed} of {len(samples)} responses have no reward ({limit}); {count} times: {most}; fix the reward"
            )


class ServerReward:
    """A reward on a `plaudit serve` server, retried while it is unreachable."""

    def __init__(self, table: RlRewardTable, warn: Warn) -> None:
        assert table.url is not None
        self.patience = table.patience
        self.warn = warn
        key = None
        if table.key_env is not None:
            key = os.environ.get(table.key_env)
            if key is None:
                raise ConfigError(f"reward.key_env names {table.key_env}, which is not set: export {table.key_env}=…")
        # Retries are limited by time, not by number: a server restart may take a minute.
        self.client = RewardClient(
            table.url, model=table.model, api_key=key, timeout=table.patience, retries=1_000_000
        )  # fmt: skip
        self.urls = (table.url,) if isinstance(table.url, str) else table.url

    def score(self, items: Sequence[Item]) -> list[Result]:
        with overdue("the reward server", self.urls, self.patience, "reward.patience", self.warn):
            return [*self.client.score(items)]

    def close(self) -> None:
        self.client.close()


def local_reward(table: RlRewardTable) -> Reward:
    tables = {name: _completed(keys, name) for name, keys in table.tables().items()}
    blend = table.blend()
    if blend is None:
        return load_reward(tables["reward"])
    assert isinstance(blend, BlendTable)
    return load_reward(blend, tables)


def _completed(keys: RewardTable | Mapping[str, object], name: str) -> RewardTable:
    return complete(keys, f"reward {name!r}") if isinstance(keys, Mapping) else keys


def _item(prompt: Prompt, sample: Sample, group: int) -> Item:
    messages = prompt.extra.get("messages")
    return Item(
        prompt=prompt.text if messages is None else tuple(messages), response=sample.text, truth=prompt.truth,
        cut=sample.finish_reason == "length", columns=prompt.columns, group=group,
    )  # fmt: skip


def _with(sample: Sample, result: Result) -> Sample:
    if result.error is not None:
        return replace(sample, error=result.error)
    value = result.aggregate if isinstance(result, StepScores) else result.value
    assert value is not None
    if not math.isfinite(value):
        return replace(sample, error=ItemError("nonfinite_score", f"the reward is {value}"))
    if abs(value) > LARGEST:
        message = (
            f"the reward is {value:g}, whose square float32 cannot represent; scale rewards to at most {LARGEST:g}"
        )
        return replace(sample, error=ItemError("reward_too_large", message))
    # Rewards of an environment's turns are in token_rewards; this one is added at the end.
    return replace(sample, reward=value)
