"""Computes advantages from scored samples: reward shaping, KL in the reward, the recipe's estimator."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from plaudit.algo.kl import kl_estimate
from plaudit.algo.method import RewardBatch
from plaudit.algo.methods import estimators
from plaudit.algo.methods.dapo import overlong_penalty
from plaudit.algo.rewards import RunningNorm, at_last_token, length_penalty
from plaudit.algo.tokens.ragged import policy_tokens
from plaudit.algo.whiten import whiten
from plaudit.config import RlAlgorithm
from plaudit.config.algorithm import ShapingTable
from plaudit.records import Sample
from plaudit.train.policy.experience import own_tokens


def usable(samples: Sequence[Sample], grouped: bool) -> tuple[Sample, ...]:
    """Return the samples to train on: scored, finished or truncated, with at least one policy token. If responses are
    compared within groups, groups of one are excluded."""
    fit = [s for s in samples if s.reward is not None and s.finish_reason in ("stop", "length") and any(s.mask)]
    if grouped:
        sizes = Counter(sample.group for sample in fit)
        fit = [sample for sample in fit if sizes[sample.group] > 1]
    return tuple(fit)


def shaped(table: ShapingTable, samples: Sequence[Sample], limit: int, norm: RunningNorm | None) -> Tensor:
    """Return the shaped rewards (N,)."""
    rewards = torch.tensor([sample.reward for sample in samples], dtype=torch.float32)
    if norm is not None:
        norm.update(rewards)
        rewards = norm.normalise(rewards)
    if table.clip is not None:
        rewards = rewards.clamp(*table.clip)
    lengths: list[int] = policy_tokens(own_tokens(samples), [len(s.token_ids) for s in samples]).tolist()
    if table.length_penalty:
        rewards = rewards + length_penalty(lengths, table.length_penalty)
    if table.overlong is not None:
        rewards = rewards + overlong_penalty(lengths, limit, table.overlong.buffer, table.overlong.factor)
    return rewards


@dataclass(frozen=True)
class Estimate:
    advantages: Tensor  # (T,)
    token_rewards: Tensor  # (T,) with the KL, where it is in the reward
    returns: Tensor | None = None  # (T,) value targets for the critic


def estimate(
    algorithm: RlAlgorithm, samples: Sequence[Sample], rewards: Tensor, *, kl_coef: float = 0.0,
    old: Tensor | None = None, reference: Tensor | None = None, values: Tensor | None = None,
    after: Tensor | None = None,
) -> Estimate:  # fmt: skip
    """Return the advantages. rewards (N,) shaped; old, reference, values (T,) if the recipe needs them; after (N,) the
    critic's value after the last token."""
    lengths = [len(sample.token_ids) for sample in samples]
    mask = own_tokens(samples)
    bootstrap = None
    if after is not None:
        cut = torch.tensor([algorithm.bootstrap and sample.finish_reason == "length" for sample in samples])
        bootstrap = torch.where(cut, after, 0.0)
        # The response's reward and the value at the truncation point both cover the rest: only one is used.
        rewards = torch.where(cut, 0.0, rewards)
    per_token = at_last_token(rewards, mask, lengths) + _token_rewards(samples, mask)
    if algorithm.kl.where == "reward" and kl_coef:
        assert old is not None
        assert reference is not None
        kl = kl_estimate(old, reference, algorithm.kl.estimator)
        per_token = per_token - kl_coef * torch.where(mask, kl, 0.0)
    advantages, returns = estimators()[algorithm.advantage.estimator].compute(
        RewardBatch(
            per_token, mask, lengths, [sample.group for sample in samples], algorithm.gamma, algorithm.lam,
            algorithm.advantage.scale, values, bootstrap, [sample.extra.get("branches", ()) for sample in samples],
        )
    )  # fmt: skip
    if algorithm.advantage.whiten:
        advantages = whiten(advantages, mask)
    return Estimate(advantages, per_token, returns)


def _token_rewards(samples: Sequence[Sample], mask: Tensor) -> Tensor:
    """Return token-level rewards (T,), such as those of an environment's turns."""
    rewards = [r for s in samples for r in (s.token_rewards or (0.0,) * len(s.token_ids))]
    return torch.tensor(rewards, dtype=torch.float32)
