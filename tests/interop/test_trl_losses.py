"""Our learner and TRL's trainers give the same loss and gradient for the same samples, or a documented difference.

TRL pads 16 samples of 2 to 12 tokens after prompts of 3 to 9; ours are packed. The old log-probs are not
the policy's own, the reference is another model, the temperature is 0.7. Two responses contain tool tokens, five were
truncated."""

from __future__ import annotations

import random
from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from torch import Tensor

from plaudit.config import RlAlgorithm, RlRecipe, parse_recipe
from plaudit.core.model.decoder import Decoder
from plaudit.core.model.packing import use_packed_attention
from plaudit.models import load_policy, load_tokenizer, new_llama, save
from plaudit.records import Batch, FinishReason, Sample
from plaudit.train.optim.optimizer import Optimizer
from plaudit.train.policy.experience import Experience
from plaudit.train.policy.policy import Policy
from plaudit.train.policy.rl_learner import RlLearner
from plaudit.train.run.clock import Clock
from tests.interop.environments import run_client

pytestmark = pytest.mark.interop
GROUP = 4
LIMIT = 16
TEMPERATURE = 0.7
END = 2
BETA = 0.1


@dataclass(frozen=True)
class Case:
    """One setting in the options of both. `on_policy`: the old log-probs are the policy's own."""

    name: str
    theirs: Mapping[str, Any]
    ours: Mapping[str, Any]
    trainer: str = "grpo"
    samples: str = "tools"
    on_policy: bool = False
    per_token: bool = False
    """Advantages of single tokens, as a critic gives them; TRL is handed ours."""
    factor: float = 1.0
    """Their loss and gradient are ours times this."""


NO_KL = {"coef": 0.0}
K3 = {"coef": BETA, "where": "loss", "estimator": "k3"}
PLAIN_KL = {"beta": BETA, "use_bias_correction_kl": False}
CASES = [
    Case("grpo", {"loss_type": "grpo", **PLAIN_KL}, {"name": "grpo", "kl": K3}),
    Case("grpo-unbiased-kl", {"loss_type": "grpo", "beta": BETA}, {"name": "grpo", "kl": {**K3, "importance": True}}),
    Case("grpo-batch", {"loss_type": "grpo", "scale_rewards": "batch"},
         {"name": "grpo", "kl": NO_KL, "advantage": {"scale": "batch"}}),
    # A fully masked response stays in TRL's denominator; ours counts only responses with a loss: 11 of 16.
    Case("grpo-truncated", {"loss_type": "grpo", "mask_truncated_completions": True},
         {"name": "grpo", "kl": NO_KL, "mask_truncated": True}, factor=11 / 16),
    Case("token-mean-truncated", {"loss_type": "bnpo", "mask_truncated_completions": True},
         {"name": "grpo", "kl": NO_KL, "aggregate": "token", "mask_truncated": True}),
    Case("dapo", {"loss_type": "dapo", "epsilon_high": 0.28, **PLAIN_KL}, {"name": "dapo", "kl": K3}),
    Case("token-mean", {"loss_type": "bnpo"}, {"name": "grpo", "aggregate": "token", "kl": NO_KL}),
    Case("dr-grpo", {"loss_type": "dr_grpo", "scale_rewards": "none"}, {"name": "dr-grpo"}),
    Case("gspo", {"loss_type": "grpo", "importance_sampling_level": "sequence", "epsilon": 0.02, "epsilon_high": 0.03,
                  **PLAIN_KL},
         {"name": "gspo", "clip": {"low": 0.02, "high": 0.03}, "kl": K3}),
    # TRL's bound is on the weight itself, ours on its distance from 1.
    Case("cispo", {"loss_type": "cispo", "epsilon_high": 1.1}, {"name": "cispo", "clip": {"low": 1.0, "high": 0.1}}),
    Case("two-sided", {"loss_type": "bnpo", "delta": 1.3},
         {"name": "grpo", "aggregate": "token", "kl": NO_KL, "clip": {"dual": 1.3}}),
    Case("entropy", {"loss_type": "bnpo", "entropy_coef": 0.05},
         {"name": "grpo", "aggregate": "token", "kl": NO_KL, "entropy": 0.05}),
    Case("ppo", {"loss_type": "bnpo"}, {"name": "ppo", "kl": NO_KL, "advantage": {"estimator": "return"}},
         per_token=True),
    Case("rloo", {"beta": BETA}, {"name": "rloo", "kl": {"coef": BETA}}, trainer="rloo", samples="plain",
         on_policy=True),
]  # fmt: skip


@dataclass(frozen=True)
class World:
    policy: Path
    reference: Path
    samples: Mapping[str, tuple[Sample, ...]]
    found: Mapping[str, Mapping[str, Any]]
    out: Path


def make_model(directory: Path, seed: int) -> Path:
    tokenizer = load_tokenizer("sums-policy")
    module = new_llama(
        "policy", vocab_size=len(tokenizer), hidden_size=32, layers=2, heads=4, kv_heads=2, intermediate_size=64,
        max_positions=64, seed=seed, tie_embeddings=False, pad_token_id=0, bos_token_id=1, eos_token_id=END,
    )  # fmt: skip
    with torch.no_grad():
        for parameter in module.parameters():  # initial weights are so small that all tokens are about equally likely
            if parameter.ndim > 1:
                parameter.mul_(6.0)
    return save(module, tokenizer, directory)


def policy_of(directory: Path, algorithm: RlAlgorithm, budget: int = 10**6) -> Policy:
    module = load_policy(directory, "float32", "cpu").module
    use_packed_attention(module)
    return Policy(
        Decoder(module, "causal"), algorithm, temperature=TEMPERATURE, max_tokens=LIMIT, micro_batch_tokens=budget
    )


def make_samples(tools: bool) -> tuple[Sample, ...]:
    """Four prompts with four responses each; in one group all rewards are equal."""
    rng = random.Random(5)
    samples = []
    for group in range(4):
        prompt = tuple(rng.randrange(3, 18) for _ in range(rng.randint(3, 9)))
        for index in range(GROUP):
            truncated = (group * GROUP + index) % 3 == 1
            count = rng.randint(2, 12)
            ids = tuple(rng.randrange(3, 18) for _ in range(count - (not truncated))) + (() if truncated else (END,))
            mask = [1] * count
            if tools and index == 0 and group < 2:
                mask[1 : count - 1] = [0] * (count - 2)
            zeros = (0.0,) * count
            reward = 0.5 if group == 3 else rng.random()
            finish_reason: FinishReason = "length" if truncated else "stop"
            samples.append(
                Sample(prompt, ids, "", zeros, zeros, (0,) * count, tuple(mask), finish_reason, group, index, reward)
            )
    return tuple(samples)


def with_old(policy: Path, samples: tuple[Sample, ...]) -> tuple[Sample, ...]:
    """The samples with log-probs as of an older policy: up to 0.4 away."""
    rng = random.Random(6)
    current = policy_of(policy, RlAlgorithm(name="grpo")).logprobs(samples).tolist()
    old = []
    for sample in samples:
        logprobs = [current.pop(0) + rng.uniform(-0.4, 0.4) for _ in sample.token_ids]
        old.append(replace(sample, logprobs=tuple(logprobs)))
    return tuple(old)


def token_advantages(samples: tuple[Sample, ...]) -> Tensor:
    """(T,), one value per token."""
    count = sum(len(sample.token_ids) for sample in samples)
    return torch.randn(count, generator=torch.Generator().manual_seed(9))


@pytest.fixture(scope="module")
def world(tmp_path_factory: pytest.TempPathFactory) -> World:
    root = tmp_path_factory.mktemp("trl")
    policy, reference = make_model(root / "policy", 3), make_model(root / "reference", 4)
    samples = {name: with_old(policy, make_samples(name == "tools")) for name in ("tools", "plain")}
    cases = []
    for case in CASES:
        entry: dict[str, Any] = {"name": case.name, "trainer": case.trainer, "samples": case.samples}
        entry["config"] = {
            "temperature": TEMPERATURE, "max_completion_length": LIMIT, **case.theirs,
        }  # fmt: skip
        if case.per_token:
            lengths = [len(sample.token_ids) for sample in samples[case.samples]]
            entry["token_advantages"] = [a.tolist() for a in token_advantages(samples[case.samples]).split(lengths)]
        cases.append(entry)
    inputs = {
        "policy": str(policy), "reference": str(reference), "out": str(root), "group": GROUP, "cases": cases,
        "samples": {
            name: [
                {"prompt_ids": s.prompt_ids, "token_ids": s.token_ids, "mask": s.mask, "old": s.logprobs,
                 "reward": s.reward}
                for s in batch
            ]
            for name, batch in samples.items()
        },
    }  # fmt: skip
    return World(policy, reference, samples, run_client(".venv-interop", "trl_losses", inputs, 400), root)


def recipe_for(case: Case, policy: Path) -> RlRecipe:
    """One update on all samples, without gradient clipping."""
    recipe = parse_recipe(
        {
            "task": "rl",
            "model": {"path": str(policy)},
            "data": {"world": "sums"},
            "reward": {"rule": "exact", "answer": "(.*)"},
            "algorithm": {"old_logprobs": "learner" if case.on_policy else "engine", **case.ours},
            "train": {"steps": 1, "prompts_per_step": 4, "samples_per_prompt": GROUP, "lr": 1e-9, "clip_norm": 1e9},
            "sampling": {"max_tokens": LIMIT, "temperature": TEMPERATURE},
        },
        case.name,
    )
    assert isinstance(recipe, RlRecipe)
    return recipe


def ours(case: Case, world: World, budget: int) -> tuple[float, dict[str, Tensor], Tensor]:
    """Loss, gradients by name, and the advantage of each sample."""
    recipe, samples = recipe_for(case, world.policy), world.samples[case.samples]
    policy = policy_of(world.policy, recipe.algorithm, budget)
    reference = policy_of(world.reference, recipe.algorithm) if recipe.algorithm.kl.coef else None
    if case.per_token:
        mask = torch.tensor([bool(trained) for sample in samples for trained in sample.mask])
        old = torch.tensor([x for sample in samples for x in sample.logprobs])
        metrics = policy.gradient(Experience(samples, mask, old, token_advantages(samples), old), 0.0).metrics()
        per_sample = torch.empty(0)
    else:
        learner = RlLearner(recipe, policy, Optimizer(policy.module, recipe.train), None, reference, Clock())
        metrics, experience = learner.update(Batch(samples), 0)
        assert experience is not None
        ends = torch.tensor(experience.lengths).cumsum(0) - 1  # the last token is always the policy's
        per_sample = experience.advantages[ends]
    loss = metrics["policy/loss"] + recipe.algorithm.kl.coef * metrics.get("kl/loss", 0.0)
    loss -= recipe.algorithm.entropy * metrics["policy/entropy"]
    if not case.on_policy:  # a clip bound that is never reached would test nothing
        assert metrics["policy/clip_low"] + metrics["policy/clip_high"] > 0
    return loss, {n: p.grad for n, p in policy.module.named_parameters() if p.grad is not None}, per_sample


@pytest.mark.parametrize("budget", [10**6, 60], ids=["whole", "split"])
@pytest.mark.parametrize("case", CASES, ids=lambda case: case.name)
def test_loss_and_gradient(world: World, case: Case, budget: int) -> None:
    theirs = world.found[case.name]
    loss, gradients, advantages = ours(case, world, budget)
    expected = load_file(world.out / f"{case.name}.safetensors")
    assert theirs["padding"] > 40  # padding that ours does not compute
    if not case.per_token:
        assert advantages.tolist() == pytest.approx(theirs["advantages"], abs=2e-6)
    if case.trainer != "rloo":
        assert theirs["loss"] == pytest.approx(case.factor * loss, rel=1e-5, abs=1e-6)
    assert expected.keys() == gradients.keys()
    scale = max(gradient.abs().max() for gradient in expected.values())
    diffs = {n: ((case.factor * gradients[n] - g).abs().max() / scale).item() for n, g in expected.items()}
    print(
        f"{case.name:22} loss {loss:+.7f} TRL {theirs['loss']:+.7f} gradient {max(diffs.values()):.1e} of the largest"
    )
    assert max(diffs.values()) < 2e-5, diffs


def test_rloo_differs_only_in_the_value_of_its_loss(world: World) -> None:
    """TRL has one ratio per response, ours has one per token; on the policy's own samples all are 1. The loss is then
    -mean(A) in TRL and -mean(A · length) in ours; the gradient, which is compared above, is the same."""
    case = next(case for case in CASES if case.name == "rloo")
    loss, _, advantages = ours(case, world, 10**6)
    lengths = torch.tensor([float(len(sample.token_ids)) for sample in world.samples["plain"]])
    assert world.found["rloo"]["loss"] == pytest.approx(-advantages.mean().item(), abs=1e-6)
    assert loss == pytest.approx(-(advantages * lengths).mean().item(), abs=5e-5)


def test_equal_rewards_give_zero_advantages(world: World) -> None:
    """The last group's rewards are equal: our advantages are exactly 0, TRL's are 0 up to the rounding of the mean."""
    _, _, advantages = ours(CASES[0], world, 10**6)
    assert advantages[-GROUP:].tolist() == [0.0] * GROUP
    assert world.found["grpo"]["advantages"][-GROUP:] == pytest.approx([0.0] * GROUP, abs=1e-3)
