"""Online DPO in the learner equals plain transformers in float64 for any split; invalid settings are rejected."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

from plaudit.errors import ConfigError
from plaudit.records import Batch, Sample
from plaudit.train.optim.optimizer import Optimizer
from plaudit.train.policy.experience import minibatches, pairs
from plaudit.train.policy.forward import micro_batches
from plaudit.train.policy.rl_learner import RlLearner
from plaudit.train.run.clock import Clock
from plaudit.train.run.ranks import ONE
from tests.command import plaudit_here
from tests.train.rl_world import gradients, made_up, policy, recipe, relative, tiny

BETA = 0.4
ALGORITHM = {"name": "online-dpo", "kl": {"coef": BETA}}


def samples() -> list[Sample]:
    """Groups of four, two and two; the last two rewards are equal."""
    made = made_up() + made_up(2)[:2]
    groups, rewards = [0, 0, 0, 0, 1, 1, 2, 2], [0.2, 1.0, -1.0, 0.5, 0.0, 3.0, 0.7, 0.7]
    return [replace(s, group=g, reward=r) for s, g, r in zip(made, groups, rewards, strict=True)]


def learner(budget: int, module: nn.Module, **train: Any) -> RlLearner:
    table = recipe(algorithm=ALGORITHM, train={"lr": 1e-9, "clip_norm": 1e9, **train})
    reference = policy(tiny(seed=10), ALGORITHM, temperature=0.7)
    trained = policy(module, ALGORITHM, temperature=0.7, micro_batch_tokens=budget)
    return RlLearner(table, trained, Optimizer(module, table.train), None, reference, Clock())


def plain_logp(module: nn.Module, sample: Sample) -> Tensor:
    """The log-prob of the policy's own tokens, by plain transformers, in float64 at the sampling temperature."""
    module.set_attn_implementation("sdpa")  # type: ignore[operator]
    table = (module(torch.tensor([sample.prompt_ids + sample.token_ids])).logits[0] / 0.7).log_softmax(-1)
    positions = [(len(sample.prompt_ids) + t - 1, token) for t, token in enumerate(sample.token_ids) if sample.mask[t]]
    return torch.stack([table[row, token] for row, token in positions]).sum()


@pytest.mark.parametrize("budget", [4096, 30, 1])
def test_loss_and_gradient_equal_those_of_plain_transformers(budget: int) -> None:
    drawn, plain, reference = samples(), tiny().double(), tiny(seed=10).double()
    losses = []
    for better, worse in ((1, 2), (5, 4)):
        with torch.no_grad():
            reference_lead = plain_logp(reference, drawn[better]) - plain_logp(reference, drawn[worse])
        losses.append(
            -F.logsigmoid(BETA * (plain_logp(plain, drawn[better]) - plain_logp(plain, drawn[worse]) - reference_lead))
        )
    expected = torch.stack(losses).mean()
    expected.backward()
    module = tiny()
    metrics, experience = learner(budget, module).update(Batch(tuple(drawn)), 0)
    assert experience is not None
    assert metrics["pairs/count"] == 2
    assert metrics["policy/loss"] == pytest.approx(expected.item(), abs=1e-6)
    actual = {name: gradient.double() for name, gradient in gradients(module).items()}
    assert relative(actual, gradients(plain)) < 1e-5


def test_step_with_equal_rewards_changes_nothing() -> None:
    module = tiny()
    before = {name: p.clone() for name, p in module.named_parameters()}
    metrics, experience = learner(4096, module).update(Batch(tuple(replace(s, reward=1.0) for s in samples())), 0)
    assert experience is None
    assert metrics["pairs/count"] == 0
    assert all(torch.equal(before[name], p) for name, p in module.named_parameters())


def test_pairs_stay_together_in_minibatches_micro_batches_and_ranks() -> None:
    drawn = samples()
    chosen, rewards = pairs(drawn, torch.tensor([s.reward for s in drawn]))
    assert chosen == tuple(drawn[i] for i in (1, 2, 4, 5))
    assert rewards.tolist() == [1.0, -1.0, 0.0, 3.0]
    for part in minibatches(10, 3, "seed", 2):
        assert [b - a for a, b in zip(part[::2], part[1::2], strict=True)] == [1] * (len(part) // 2)
    group = replace(ONE, size=2)
    for rank in (0, 1):
        for batch in micro_batches(drawn, 1, replace(group, index=rank), 2):
            assert [i // 2 for i in batch.indices] == [batch.indices[0] // 2] * 2


def test_later_updates_use_the_current_policy() -> None:
    """Two epochs on the same pairs: the second one sees the update of the first."""
    metrics = [learner(4096, tiny(), lr=lr, epochs=2).update(Batch(tuple(samples())), 0)[0] for lr in (1e-9, 1e-2)]
    assert metrics[1]["policy/loss"] < metrics[0]["policy/loss"] - 0.01
    assert metrics[1]["policy/updates"] == 2


@pytest.mark.parametrize(
    ("keys", "message"),
    [
        ({"kl": {"coef": 0.0}}, 'kl.coef = 0: loss = "dpo" needs its β'),
        ({"kl": {"where": "loss"}}, 'set kl.where = "pairs"'),
        ({"aggregate": "token"}, 'a pair is one item, set "sequence"'),
        ({"mask_truncated": True}, "mask_truncated applies to single responses"),
        ({"correction": {"mode": "truncate"}}, "correction.mode applies to single responses"),
        ({"advantage": {"estimator": "group"}}, 'set advantage.estimator = "best-worst"'),
        ({"name": "grpo", "kl": {"where": "pairs", "coef": 0.1}}, 'kl.where = "pairs" is for loss = "dpo"'),
    ],
)
def test_invalid_settings_are_rejected(keys: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError) as raised:
        recipe(algorithm={**ALGORITHM, **keys})
    assert message in str(raised.value)


def test_stale_pairs_need_no_correction() -> None:
    tree = recipe(algorithm=ALGORITHM, placement={"name": "async", "staleness": 2})
    assert tree.algorithm.correction.mode == "none"


@pytest.mark.slow
def test_shipped_recipe_raises_the_accuracy(tmp_path: Path) -> None:
    """Starts at 65 % right answers; the full recipe is in docs/preferences.md."""
    sets = ["train.steps=12", "train.prompts_per_step=32", "data.eval_items=200", "train.eval_every=100"]
    words = [word for each in sets for word in ("--set", each)]
    done = plaudit_here("train", "sums-online-dpo", "--out", str(tmp_path / "run"), *words)
    assert done.returncode == 0, done.stderr
    summary = json.loads((tmp_path / "run" / "summary.json").read_text())
    assert summary["accuracy_after"] > summary["accuracy_before"] + 0.05
