"""Responses as trees: their tokens and log-probs, training on them, reproducible runs, and rejected settings."""

from __future__ import annotations

import math
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.nn import functional as F

from plaudit.core import Engine
from plaudit.errors import ConfigError
from plaudit.events import read_events
from plaudit.models import load_policy
from plaudit.records import Batch, Prompt, Sample
from plaudit.train.optim.optimizer import Optimizer
from plaudit.train.policy.rl_learner import RlLearner
from plaudit.train.rollouts.batch_metrics import branching
from plaudit.train.rollouts.rollouts import SingleTurn
from plaudit.train.rollouts.tree_turn import TreeTurn
from plaudit.train.run.clock import Clock
from tests.command import plaudit_here
from tests.train.rl_world import gradients, made_up, policy, recipe, relative, tiny

LOADED = load_policy("sums-policy")
PROMPTS = [
    Prompt(text, tuple(LOADED.tokenizer.encode(text, add_special_tokens=False)))
    for text in ("7+8+4+9+2+6=", "9+1=", "3+4+5+6+7=")
]
TREE = {"branch": [2, 2, 2], "step": ";"}
SMALL = {
    "train.steps": 4, "train.prompts_per_step": 4, "train.eval_every": 50, "train.checkpoint.every": 2,
    "data.eval_items": 8, "sampling.max_tokens": 48,
}  # fmt: skip


def played(branch: list[int], **sampling: Any) -> list[Sample]:
    n = math.prod(branch)
    table = recipe(sampling={"branch": branch, "step": ";", **sampling}, train={"samples_per_prompt": n})
    single = SingleTurn(Engine(LOADED.module, LOADED.tokenizer, seed=1), table.sampling, 1)
    return TreeTurn(single, LOADED.tokenizer).play(PROMPTS, n, "0 0")


def test_tree_of_one_level_equals_single_responses() -> None:
    table = recipe(train={"samples_per_prompt": 4})
    single = SingleTurn(Engine(LOADED.module, LOADED.tokenizer, seed=1), table.sampling, 1).play(PROMPTS, 4, "0 0")
    tree = played([4])
    for sample, expected in zip(tree, single, strict=True):
        assert sample.extra["branches"] == [[sample.index, len(sample.token_ids)]]
        assert replace(sample, extra=expected.extra) == expected


def test_responses_share_steps_and_each_token_has_the_policys_own_logprob() -> None:
    samples = played([2, 2, 2])
    assert [(s.group, s.index) for s in samples] == [(g, i) for g in range(3) for i in range(8)]
    module = LOADED.module
    module.set_attn_implementation("sdpa")
    parts: dict[tuple[int, int], tuple[int, ...]] = {}
    for sample in samples:
        begin = 0
        for number, (node, end) in enumerate(sample.extra["branches"]):
            tokens = sample.token_ids[begin:end]
            assert parts.setdefault((sample.group, node), tokens) == tokens, "a node is one part"
            begin = end
            if number < len(sample.extra["branches"]) - 1:
                assert LOADED.tokenizer.decode(list(tokens)).endswith(";")
        assert begin == len(sample.token_ids)
        assert sample.text == LOADED.tokenizer.decode(list(sample.token_ids), skip_special_tokens=True)
        with torch.no_grad():
            logits = module(torch.tensor([sample.prompt_ids + sample.token_ids])).logits[0].log_softmax(-1)
        rows = range(len(sample.prompt_ids) - 1, len(sample.prompt_ids) + len(sample.token_ids) - 1)
        plain = [logits[row, token].item() for row, token in zip(rows, sample.token_ids, strict=True)]
        assert sample.logprobs == pytest.approx(plain, abs=1e-4)
    metrics = branching(samples)
    assert metrics["tree/generated_tokens"] == sum(map(len, parts.values())) < sum(len(s.token_ids) for s in samples)
    assert 0 < metrics["tree/shared"] < 1


def test_node_that_ends_early_stands_for_all_its_responses() -> None:
    """Three tokens are fewer than the first step has: every first step is truncated and is four of eight responses."""
    samples = played([2, 2, 2], max_tokens=3)
    assert all(s.finish_reason == "length" and len(s.extra["branches"]) == 1 for s in samples)
    assert [s.extra["branches"][0][0] for s in samples[:8]] == [0] * 4 + [1] * 4
    assert branching(samples)["tree/early"] == 1 - 2 / 8


def test_expert_iteration_is_sft_on_the_best_responses() -> None:
    """The gradient equals that of plain transformers on the best response of each group, in float64."""
    drawn, plain = made_up(), tiny().double()
    plain.set_attn_implementation("sdpa")  # type: ignore[operator]
    best = [max((s for s in drawn if s.group == g), key=lambda s: s.reward or 0.0) for g in range(3)]
    losses = []
    for sample in best:
        logits = plain(torch.tensor([sample.prompt_ids + sample.token_ids])).logits[0]
        positions = [t for t, own in enumerate(sample.mask) if own]
        rows = torch.stack([logits[len(sample.prompt_ids) + t - 1] for t in positions])
        losses.append(F.cross_entropy(rows, torch.tensor([sample.token_ids[t] for t in positions])))
    torch.stack(losses).mean().backward()
    module = tiny()
    table = recipe(algorithm={"name": "expert-iteration"}, train={"lr": 1e-9, "clip_norm": 1e9})
    learner = RlLearner(
        table, policy(module, {"name": "expert-iteration"}), Optimizer(module, table.train), None, None, Clock()
    )
    metrics, experience = learner.update(Batch(tuple(drawn)), 0)
    assert experience is not None
    tokens = sum(sum(s.mask) for s in drawn)
    assert metrics["advantage/zero"] == pytest.approx(1 - sum(sum(s.mask) for s in best) / tokens)
    assert relative({n: g.double() for n, g in gradients(module).items()}, gradients(plain)) < 1e-5


@pytest.mark.parametrize(
    ("tables", "message"),
    [
        ({"sampling": TREE}, r"gives 2 × 2 × 2 = 8 responses to a prompt, and train.samples_per_prompt = 4"),
        ({"algorithm": {"name": "tree-grpo"}}, "there is no tree: set sampling.branch"),
        ({"sampling": {"branch": [4], "step": "\n", "stop": ["\n\n"]}}, "must delimit steps"),
        (
            {"sampling": {"branch": [4]}, "environment": {"name": "calculator"}},
            "sampling.branch is for single-turn responses",
        ),
    ],
)
def test_invalid_settings_are_rejected(tables: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        recipe(**tables)


@pytest.mark.slow
@pytest.mark.parametrize("name", ["sums-tree-grpo", "sums-expert"])
def test_run_is_reproduced_bit_for_bit(name: str, tmp_path: Path) -> None:
    sets = [word for key, value in SMALL.items() for word in ("--set", f"{key}={value}")]
    done = plaudit_here("train", name, "--out", str(tmp_path / "run"), *sets)
    assert done.returncode == 0, done.stderr
    verified = plaudit_here("verify", str(tmp_path / "run"))
    assert verified.returncode == 0, verified.stdout
    assert "equal to the bit: steps 3 to 4, recomputed from step-000002: samples, log-probs, rewards" in verified.stdout
    steps = [e for e in read_events(tmp_path / "run") if e["kind"] == "metric" and "tree/shared" in e["values"]]
    assert len(steps) == 4
    assert all(e["values"]["tree/generated_tokens"] < e["values"]["progress/tokens"] for e in steps)
