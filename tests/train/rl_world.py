"""Helpers shared by the tests of RL training: a tiny policy, hand-made samples, and small recipes."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import nn

from plaudit.config import RlRecipe, parse_recipe
from plaudit.config.algorithm import over
from plaudit.core.proof.support import inspect
from plaudit.models import new_llama
from plaudit.models.weights import read_directory
from plaudit.records import Sample
from plaudit.train.policy.policy import Policy

VOCABULARY = 24
# (prompt length, response mask): different lengths, some with a tool's tokens, one with a single token.
SHAPES = [(4, [1] * 7), (2, [1, 1, 0, 0, 0, 1, 1]), (6, [1]), (3, [1] * 12), (1, [1, 0, 1]), (5, [1] * 4)]


def tiny(kind: str = "policy", seed: int = 3) -> nn.Module:
    return new_llama(
        kind, vocab_size=VOCABULARY, hidden_size=32, layers=2, heads=4, kv_heads=2, intermediate_size=64,
        max_positions=64, seed=seed,
    )  # fmt: skip


def made_up(seed: int = 1) -> list[Sample]:
    draw = np.random.default_rng(seed)
    samples = []
    for index, (prompt, mask) in enumerate(SHAPES):
        count = len(mask)
        logprobs = tuple((-draw.uniform(0.5, 4.0, count) * mask).tolist())
        samples.append(
            Sample(
                prompt_ids=tuple(draw.integers(0, VOCABULARY, prompt).tolist()),
                token_ids=tuple(draw.integers(0, VOCABULARY, count).tolist()), text="", logprobs=logprobs,
                raw_logprobs=logprobs, versions=(0,) * count, mask=tuple(mask),
                finish_reason="length" if index == 3 else "stop", group=index // 2, index=index % 2,
                reward=float(draw.normal()),
            )
        )  # fmt: skip
    return samples


def policy(
    module: nn.Module, algorithm: dict[str, Any], *, temperature: float = 1.0, micro_batch_tokens: int = 4096,
    max_tokens: int = 16,
) -> Policy:  # fmt: skip
    return Policy(
        inspect(module), recipe(algorithm=algorithm).algorithm, temperature=temperature, max_tokens=max_tokens,
        micro_batch_tokens=micro_batch_tokens,
    )  # fmt: skip


def recipe(**tables: Any) -> RlRecipe:
    base: dict[str, Any] = {
        "task": "rl",
        "seed": 1,
        "model": {"path": "sums-policy"},
        "data": {"world": "sums", "eval_items": 8},
        "reward": {"rule": "exact", "answer": r"#(\d+)$"},
        "algorithm": {"name": "grpo"},
        "train": {
            "steps": 2, "prompts_per_step": 4, "samples_per_prompt": 4, "lr": 1e-4, "eval_every": 50, "threads": 1,
            "checkpoint": {"every": 50},
        },
        "sampling": {"max_tokens": 48},
    }  # fmt: skip
    tree = over(base, tables)
    if tables.get("reward"):
        tree["reward"] = tables["reward"]
    if tree["algorithm"]["name"] == "ppo":
        tree.setdefault("critic", {})
    parsed = parse_recipe(tree, "test")
    assert isinstance(parsed, RlRecipe)
    return parsed


def gradients(module: nn.Module) -> dict[str, torch.Tensor]:
    return {name: p.grad.clone() for name, p in module.named_parameters() if p.grad is not None}


def relative(actual: dict[str, torch.Tensor], expected: dict[str, torch.Tensor]) -> float:
    """The largest difference of two sets of gradients, relative to the largest gradient."""
    assert actual.keys() == expected.keys()
    size = max(g.abs().max().item() for g in expected.values())
    return max((actual[n] - expected[n]).abs().max().item() for n in expected) / size


class Silent:
    """A viewer that records its warnings and metrics."""

    def __init__(self) -> None:
        self.warnings: list[str] = []
        self.seen: list[dict[str, float]] = []

    def bar(self, done: int, total: int) -> Any:
        from contextlib import nullcontext

        return nullcontext()

    def step(self, step: int, metrics: dict[str, float]) -> None:
        self.seen.append(dict(metrics))

    def figures(self, step: int, figures: dict[str, float]) -> None: ...

    def warn(self, message: str) -> None:
        self.warnings.append(message)


def weights(run: Path) -> dict[str, torch.Tensor]:
    return {name: at.read() for name, at in read_directory(run / "final").items()}
