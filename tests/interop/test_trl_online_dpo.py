"""Our learner and TRL's OnlineDPOTrainer give the same loss and gradient for the same pairs.

Two responses of 2 to 12 tokens for each of eight prompts; TRL computes log-probs at temperature 1."""

from __future__ import annotations

from dataclasses import asdict, replace
from pathlib import Path

import pytest
from safetensors.torch import load_file

from plaudit.records import Batch
from plaudit.train.optim.optimizer import Optimizer
from plaudit.train.policy.policy import Policy
from plaudit.train.policy.rl_learner import RlLearner
from plaudit.train.run.clock import Clock
from tests.interop.environments import run_client
from tests.interop.test_trl_losses import Case, make_model, make_samples, policy_of, recipe_for

pytestmark = pytest.mark.interop
BETA = 0.3


def test_loss_and_gradient(tmp_path: Path) -> None:
    models = {"policy": make_model(tmp_path / "policy", 3), "reference": make_model(tmp_path / "reference", 4)}
    samples = make_samples(tools=False)
    # Each prompt has four responses: they are split into two prompts of two, and no two rewards are equal.
    samples = tuple(replace(s, group=i // 2, reward=(7.0 * i) % 16 + 0.1 * i) for i, s in enumerate(samples))
    keys = ("prompt_ids", "token_ids", "reward")
    inputs = {
        **{name: str(path) for name, path in models.items()}, "out": str(tmp_path), "beta": BETA,
        "samples": [{key: asdict(sample)[key] for key in keys} for sample in samples],
    }  # fmt: skip
    theirs = run_client(".venv-interop", "trl_online_dpo", inputs, 400)["loss"]
    expected = load_file(tmp_path / "online-dpo.safetensors")
    recipe = recipe_for(Case("online-dpo", {}, {"name": "online-dpo", "kl": {"coef": BETA}}), models["policy"])
    for budget in (10**6, 40):
        policy, reference = (at_one(policy_of(path, recipe.algorithm, budget)) for path in models.values())
        learner = RlLearner(recipe, policy, Optimizer(policy.module, recipe.train), None, reference, Clock())
        loss = learner.update(Batch(samples), 0)[0]["policy/loss"]
        gradients = {n: p.grad for n, p in policy.module.named_parameters() if p.grad is not None}
        assert expected.keys() == gradients.keys()
        scale = max(gradient.abs().max() for gradient in expected.values())
        diff = max(((gradients[n] - g).abs().max() / scale).item() for n, g in expected.items())
        print(f"budget {budget}: loss {loss:+.7f} TRL {theirs:+.7f} gradient {diff:.1e} of the largest")
        assert loss == pytest.approx(theirs, rel=1e-6, abs=1e-6)
        assert diff < 5e-6


def at_one(policy: Policy) -> Policy:
    policy.temperature = 1.0
    return policy
