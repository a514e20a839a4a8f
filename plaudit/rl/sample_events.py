"""Samples for the event log, token by token, for inspecting what was rewarded."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

from torch import Tensor

from plaudit.algo.kl import kl_estimate
from plaudit.records import Sample
from plaudit.train.policy.experience import Experience


def sample_events(tokenizer: Any, experience: Experience, count: int) -> Iterator[dict[str, Any]]:
    """Yield `count` samples spread over the rewards from the worst to the best."""
    order = sorted(range(len(experience.samples)), key=lambda i: experience.samples[i].total_reward or 0.0)
    count = min(count, len(order))
    chosen = sorted({order[round(k * (len(order) - 1) / max(1, count - 1))] for k in range(count)})
    assert experience.token_rewards is not None
    policy = experience.behaviour if experience.old is None else experience.old
    kl = None if experience.reference is None else kl_estimate(policy, experience.reference, "k1")
    for i in chosen:
        sample = experience.samples[i]
        rows = experience.rows(i, i)
        yield _described(tokenizer, sample) | {
            "token_rewards": _rounded(experience.token_rewards[rows]),
            "kl": None if kl is None else _rounded(kl[rows]),
            "logprobs": _rounded(experience.behaviour[rows]),
            "advantages": _rounded(experience.advantages[rows]),
        }


def failed_events(tokenizer: Any, samples: Sequence[Sample], count: int) -> Iterator[dict[str, Any]]:
    """Yield samples without a reward, with the error."""
    failed = [sample for sample in samples if sample.error is not None]
    for sample in failed[:count]:
        assert sample.error is not None
        error = {"type": sample.error.type, "message": sample.error.message}
        yield _described(tokenizer, sample) | {"error": error, "logprobs": [round(x, 5) for x in sample.behaviour]}


def _described(tokenizer: Any, sample: Sample) -> dict[str, Any]:
    return {
        "group": sample.group,
        "index": sample.index,
        "prompt": sample.extra.get("prompt", ""),
        "response": sample.text,
        "tokens": [tokenizer.decode([token]) for token in sample.token_ids],
        "mask": list(sample.mask),
        "reward": sample.total_reward,
        "error": None,
        "right": sample.extra.get("right"),
        "finish_reason": sample.finish_reason,
        "token_rewards": None,
        "kl": None,
        "advantages": None,
    }


def _rounded(values: Tensor) -> list[float]:
    return [round(value, 5) for value in values.tolist()]
