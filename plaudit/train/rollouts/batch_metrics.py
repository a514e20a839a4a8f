"""Metrics of a step's samples."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterable, Sequence
from statistics import correlation, fmean
from typing import Any

import torch

from plaudit.records import Batch, Sample


def batch_metrics(samples: Sequence[Sample]) -> dict[str, float]:
    """Return metrics of a step's samples: rewards, groups, lengths, truth."""
    scored = totals(samples)
    rewards = torch.tensor(scored, dtype=torch.float64)
    lengths = torch.tensor([float(sum(sample.mask)) for sample in samples], dtype=torch.float64)
    stopped = [float(sum(sample.mask)) for sample in samples if sample.finish_reason == "stop"]
    figures: dict[str, float] = {
        "reward/errors": sum(sample.error is not None for sample in samples) / len(samples),
        "length/mean": lengths.mean().item(),
        "length/min": lengths.min().item(),
        "length/max": lengths.max().item(),
        "length/prompt_mean": sum(len(sample.prompt_ids) for sample in samples) / len(samples),
        "length/truncated": sum(s.finish_reason == "length" and not _out_of_turns(s) for s in samples) / len(samples),
        "length/aborted": sum(sample.finish_reason == "abort" for sample in samples) / len(samples),
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
        if (total := sample.total_reward) is not None:
            groups.setdefault(sample.group, []).append(total)
    if any(len(group) > 1 for group in groups.values()):
        figures["reward/zero_std_groups"] = sum(len(set(group)) == 1 for group in groups.values()) / len(groups)
    figures |= integrity(samples)
    judged: list[Any] = [sample.extra.get("right") for sample in samples]
    verdicts = [right for right in judged if right is not None]
    if verdicts:
        figures["accuracy"] = sum(verdicts) / len(verdicts)
        by_group: dict[int, bool] = {}
        for sample in samples:
            by_group[sample.group] = by_group.get(sample.group, False) or bool(sample.extra.get("right"))
        figures["pass_at_k"] = sum(by_group.values()) / len(by_group)
    kept = [math.exp(p - q) for sample in samples for p, q in _truncated(sample)]
    if kept:
        figures["rollout/truncated_mass"] = 1 - sum(kept) / len(kept)
    figures |= branching(samples)
    turns = [float(sample.extra["turns"]) for sample in samples if "turns" in sample.extra]
    if turns:
        figures["turns/mean"] = sum(turns) / len(turns)
        figures["turns/out_of_turns"] = sum(map(_out_of_turns, samples)) / len(samples)
        figures |= reward_parts(samples)
    return figures


def totals(samples: Iterable[Sample]) -> list[float]:
    """Return the rewards of all samples that have one, those of turns included."""
    return [total for sample in samples if (total := sample.total_reward) is not None]


def reward_parts(samples: Sequence[Sample]) -> dict[str, float]:
    """Return the means of what the environment gave for turns, and of what [reward] gave; nothing without turns."""
    if not any("turns" in sample.extra for sample in samples):
        return {}
    own = [sample.reward for sample in samples if sample.reward is not None]
    parts = {"turns/reward": fmean(sample.turn_rewards for sample in samples)}
    return parts | ({"reward/rule": fmean(own)} if own else {})


def integrity(samples: Sequence[Sample]) -> dict[str, float]:
    """Return metrics that indicate reward hacking (`report.rules.integrity`).

    reward/length_correlation  of length and reward among the responses to a prompt, the mean over prompts
    response/repetition        fraction of a response's 4-grams that occurred before in it
    response/common            fraction of prompts with the most common response
    """
    repeated = [1 - len({*runs}) / len(runs) for sample in samples if (runs := _fours(sample))]
    figures = {"response/repetition": fmean(repeated)} if repeated else {}
    groups: dict[int, list[Sample]] = {}
    for sample in samples:
        groups.setdefault(sample.group, []).append(sample)
    if len(groups) > 1:
        common = Counter(text for group in groups.values() for text in {sample.text for sample in group})
        figures["response/common"] = max(common.values()) / len(groups)
    ties = []
    for group in groups.values():
        scored = [(float(sum(s.mask)), total) for s in group if (total := s.total_reward) is not None]
        lengths, rewards = [length for length, _ in scored], [reward for _, reward in scored]
        if len({*lengths}) > 1 and len({*rewards}) > 1:
            ties.append(correlation(lengths, rewards))
    return figures | ({"reward/length_correlation": fmean(ties)} if ties else {})


def branching(samples: Sequence[Sample]) -> dict[str, float]:
    """Return metrics of trees of responses: tokens sampled, with shared segments counted once. For searched trees also
    what the search used and discarded (`extra["search"]`, the same in all samples of a group)."""
    parts: dict[tuple[int, int], int] = {}
    searched = {sample.group: sample.extra["search"] for sample in samples if "search" in sample.extra}
    leaves, tokens = set(), 0
    for sample in samples:
        begin = 0
        for node, end in sample.extra.get("branches", ()):
            parts[sample.group, node] = end - begin
            begin = end
        if begin:
            leaves.add((sample.group, node))
            tokens += begin
    if not tokens:
        return {}
    kept = sum(parts.values())
    figures = {
        "tree/generated_tokens": float(kept),
        "tree/shared": 1 - kept / tokens,
        "tree/early": 1 - len(leaves) / sum(1 for sample in samples if sample.extra.get("branches")),
    }
    if searched:
        generated = sum(spent["generated"] for spent in searched.values())
        figures |= {
            "tree/generated_tokens": float(generated),
            "tree/discarded": 1 - kept / generated,
            "tree/prm_tokens": float(sum(spent["prm_tokens"] for spent in searched.values())),
        }
    return figures


def _fours(sample: Sample) -> list[tuple[int, ...]]:
    own = [token for token, kept in zip(sample.token_ids, sample.mask, strict=True) if kept]
    return list(zip(own, own[1:], own[2:], own[3:], strict=False))


def filtered(kept: Sequence[Sequence[Sample]], spare: Sequence[Sequence[Sample]]) -> dict[str, float]:
    """Return metrics of dynamic sampling: the rewards of all samples, which describe the policy, and the fraction
    filtered out because their groups have equal rewards."""
    rewards = totals(s for group in (*kept, *spare) for s in group)
    learned = totals(s for group in kept for s in group)
    figures = {"dynamic/drawn": float(len(kept) + len(spare)), "dynamic/filtered": len(spare) / len([*kept, *spare])}
    if rewards:
        figures["reward/mean"] = sum(rewards) / len(rewards)
    return figures | ({"dynamic/kept_reward": sum(learned) / len(learned)} if learned else {})


def staleness(batch: Batch) -> dict[str, float]:
    """Return how many versions the oldest token of each sample lags behind the learner."""
    ages = [batch.version - min(sample.versions) for sample in batch.samples if sample.versions]
    return {"staleness/mean": sum(ages) / len(ages), "staleness/max": float(max(ages))} if ages else {}


def _truncated(sample: Sample) -> list[tuple[float, float]]:
    """Return the log-probs of the policy's tokens under the whole softmax and after top-k and top-p, whose ratio is the
    mass kept."""
    if sample.tempered_logprobs is None:
        return []
    pairs = zip(sample.tempered_logprobs, sample.logprobs, strict=True)
    return [pair for pair, own in zip(pairs, sample.mask, strict=True) if own]


def _out_of_turns(sample: Sample) -> bool:
    """Whether the episode ended because it had `environment.max_turns`, not because its tokens were used up."""
    return sample.extra.get("end") == "turns"
