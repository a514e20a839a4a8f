"""The learner's numbers: positions of log-probs, the effect of the temperature, and independence of batching."""

from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch

from plaudit.algo.kl import kl_estimate
from plaudit.core import Engine, SamplingParams
from plaudit.core.model.fused import recompute_contexts
from plaudit.core.proof.support import inspect
from plaudit.errors import ConfigError
from plaudit.models import load_policy, new_llama
from plaudit.records import Batch
from plaudit.train.optim.optimizer import Optimizer, spread
from plaudit.train.policy.advantages import estimate
from plaudit.train.policy.critic import LocalCritic, SharedCritic
from plaudit.train.policy.experience import Experience, flat, minibatches, own_tokens
from plaudit.train.policy.policy import Policy
from plaudit.train.policy.rl_learner import RlLearner
from plaudit.train.policy.rl_models import value_head
from plaudit.train.run.clock import Clock
from tests.train.rl_world import gradients, made_up, policy, recipe, relative, tiny

ALGORITHMS = [
    {"name": "ppo"}, {"name": "reinforce"}, {"name": "reinforce++"}, {"name": "reinforce++-baseline"}, {"name": "rloo"},
    {"name": "grpo"}, {"name": "dr-grpo"}, {"name": "dapo"}, {"name": "gspo"}, {"name": "cispo"},
    {"name": "grpo", "entropy": 0.01, "correction": {"mode": "truncate", "level": "sequence"}},
    {"name": "grpo", "kl": {"coef": 0.1, "estimator": "k2", "importance": True}},
]  # fmt: skip


def experience(learner: Policy, off_policy: bool = True) -> Experience:
    samples = tuple(made_up())
    old = learner.logprobs(samples)
    own = own_tokens(samples)
    shift = 0.15 * torch.randn(len(old), generator=torch.Generator().manual_seed(5))
    old = torch.where(own, old + shift, 0.0) if off_policy else old
    noise = torch.randn(len(old), generator=torch.Generator().manual_seed(6))
    reference = torch.where(own, old + 0.2 * noise, 0.0)
    advantages = torch.where(own, noise, 0.0)
    returns = torch.where(own, noise.flip(0), 0.0)
    return Experience(
        samples, own, flat(samples, "logprobs"), advantages, old, reference, torch.zeros_like(old), returns
    )


@pytest.mark.parametrize("temperature", [1.0, 0.7])
def test_a_tokens_logprob_comes_from_the_row_before_it_at_the_sampling_temperature(temperature: float) -> None:
    module = tiny()
    logprobs = policy(module, {"name": "grpo"}, temperature=temperature).logprobs(made_up())
    expected: list[float] = []
    module.set_attn_implementation("sdpa")
    for sample in made_up():
        ids = torch.tensor([sample.prompt_ids + sample.token_ids])
        with torch.no_grad():
            table = (module(ids).logits[0] / temperature).log_softmax(-1)
        for t, (token, own) in enumerate(zip(sample.token_ids, sample.mask, strict=True)):
            expected.append(table[len(sample.prompt_ids) + t - 1, token].item() if own else 0.0)
    assert torch.allclose(logprobs, torch.tensor(expected), atol=1e-5)


def test_a_value_is_read_before_its_token_and_after_the_last() -> None:
    model = tiny("value")
    critic = LocalCritic(model, None, Optimizer(model, recipe().train), clip=None, micro_batch_tokens=64)  # type: ignore[arg-type]
    before, after = critic.values(made_up())
    model.set_attn_implementation("sdpa")
    expected, ends = [], []
    for sample in made_up():
        with torch.no_grad():
            row = model(torch.tensor([sample.prompt_ids + sample.token_ids]))[0]
        expected.append(row[len(sample.prompt_ids) - 1 : -1])
        ends.append(row[-1:])
    assert torch.allclose(before, torch.cat(expected), atol=1e-5)
    assert torch.allclose(after, torch.cat(ends), atol=1e-5)


@pytest.mark.parametrize("algorithm", ALGORITHMS, ids=lambda a: "-".join(map(str, a)) if len(a) > 1 else a["name"])
@pytest.mark.parametrize("budget", [60, 30, 1])
def test_gradient_does_not_depend_on_the_micro_batch_size(algorithm: dict, budget: int) -> None:
    module = tiny()
    unsplit = policy(module, algorithm, micro_batch_tokens=4096)
    data = experience(unsplit)
    expected_loss = unsplit.gradient(data, 0.1).metrics()["policy/loss"]
    expected = gradients(module)
    module.zero_grad()
    split = policy(module, algorithm, micro_batch_tokens=budget)
    loss = split.gradient(data, 0.1).metrics()["policy/loss"]
    assert loss == pytest.approx(expected_loss, rel=1e-5, abs=1e-6)  # a mean of terms of size 1 that nearly cancel
    assert relative(gradients(module), expected) < 5e-6


def test_critic_gradient_does_not_depend_on_the_micro_batch_size() -> None:
    results = []
    for budget in (4096, 30, 1):
        model = tiny("value")
        critic = LocalCritic(model, None, Optimizer(model, recipe().train), clip=0.2, micro_batch_tokens=budget)  # type: ignore[arg-type]
        critic.gradient(experience(policy(tiny(), {"name": "ppo"})))
        results.append(gradients(model))
    assert max(relative(other, results[0]) for other in results[1:]) < 5e-6


@pytest.mark.parametrize("parts", [1, 2, 3])
def test_the_first_ratio_is_exactly_one(parts: int) -> None:
    """π_old is the learner's own, computed in the micro-batches of the first epoch."""
    learner = policy(tiny(), {"name": "dapo"}, temperature=0.8, micro_batch_tokens=40)
    data = experience(learner, off_policy=False)
    first = minibatches(len(data.samples), parts, "1 0 0")[0]
    chosen = data.select(first)
    chosen = replace(chosen, old=learner.logprobs(chosen.samples))
    metrics = learner.gradient(chosen, 0.0).metrics()
    assert metrics["policy/ratio_min"] == metrics["policy/ratio_max"] == 1.0
    assert metrics["policy/kl_old"] == 0.0
    assert metrics["policy/clip_low"] == metrics["policy/clip_high"] == 0.0


def test_one_update_needs_no_old_logprobs() -> None:
    """Old log-probs taken from the pass itself give the same gradient as those of a separate pass."""
    module = tiny()
    learner = policy(module, {"name": "grpo", "kl": {"coef": 0.0}})
    data = experience(learner, off_policy=False)
    learner.gradient(data, 0.0)
    expected = gradients(module)
    module.zero_grad()
    learner.gradient(replace(data, old=None), 0.0)
    assert relative(gradients(module), expected) == 0.0


def test_tool_tokens_do_not_affect_the_gradient() -> None:
    """Neither their advantages nor their engine log-probs reach the gradient or a denominator."""
    module = tiny()
    learner = policy(module, {"name": "grpo"})
    data = experience(learner)
    learner.gradient(data, 0.1)
    expected = gradients(module)
    module.zero_grad()
    spoiled = replace(
        data, advantages=torch.where(data.mask, data.advantages, 99.0),
        behaviour=torch.where(data.mask, data.behaviour, -99.0),
    )  # fmt: skip
    learner.gradient(spoiled, 0.1)
    assert relative(gradients(module), expected) == 0.0


def test_batch_with_only_tool_tokens_has_no_gradient() -> None:
    module = tiny()
    learner = policy(module, {"name": "grpo"})
    data = experience(learner)
    learner.gradient(replace(data, mask=torch.zeros_like(data.mask)), 0.0)
    assert all(not g.any() for g in gradients(module).values())


def test_recomputing_activations_changes_no_gradient() -> None:
    module = tiny()
    learner = policy(module, {"name": "grpo"})
    data = experience(learner)
    learner.gradient(data, 0.1)
    expected = gradients(module)
    module.zero_grad()
    module.gradient_checkpointing_enable({"use_reentrant": False, "context_fn": recompute_contexts})
    module.train()
    learner.gradient(data, 0.1)
    assert relative(gradients(module), expected) < 1e-6


def test_engine_and_learner_agree_and_the_end_token_is_the_policys_own() -> None:
    loaded = load_policy("sums-policy")
    engine = Engine(loaded.module, loaded.tokenizer, seed=4)
    for temperature in (1.0, 0.6):
        samples = engine.generate(["7+8+4=", "9+9="], SamplingParams(n=4, temperature=temperature, max_tokens=40))
        learner = policy(loaded.module, {"name": "grpo"}, temperature=temperature)
        assert (learner.logprobs(samples) - flat(samples, "logprobs")).abs().max() < 1e-5
        for sample in samples:
            ended = sample.token_ids[-1] == loaded.tokenizer.eos_token_id
            assert ended == (sample.finish_reason == "stop")
            assert sample.token_ids.count(loaded.tokenizer.eos_token_id) == ended
            assert set(sample.mask) == {1}


def test_bfloat16_weights_accumulate_small_steps_in_float32_copies() -> None:
    """A float32 copy takes the step; without one a weight of 1 never changes by 1e-3."""
    layer = torch.nn.Linear(4, 1, bias=False, dtype=torch.bfloat16)
    torch.nn.init.ones_(layer.weight)
    optimizer = Optimizer(layer, recipe(train={"lr": 1e-3}).train)
    start = optimizer.masters["weight"].detach().clone()
    for step in range(8):
        optimizer.zero()
        layer(torch.ones(1, 4, dtype=torch.bfloat16)).sum().backward()
        optimizer.step(step)
    assert torch.allclose(optimizer.masters["weight"], start - 8e-3, atol=1e-4)
    assert layer.weight.dtype == torch.bfloat16
    assert (layer.weight < 1).all()
    again = Optimizer(layer, recipe(train={"lr": 1e-3}).train)
    again.load(optimizer.state())
    assert torch.equal(again.masters["weight"], optimizer.masters["weight"])


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_float32_copies_start_spread_over_the_rounding_interval(dtype: torch.dtype) -> None:
    """A step of 1e-5, far below the rounding of most weights, changes the weights by 1e-5 on average. With copies that
    start at the weights themselves a bfloat16 model changes by a tenth of that."""
    edge = [0.0, -0.0, 1.0, -1.0, 2.0**-14, 2.0**-24, torch.finfo(dtype).max, torch.finfo(dtype).min]
    weights = torch.cat([torch.randn(100_000) * 0.05, torch.tensor(edge)]).to(dtype)
    copies = spread(weights)
    assert copies.dtype == torch.float32
    assert torch.equal(copies.to(dtype), weights)
    assert torch.equal(spread(weights[40_000:]), copies[40_000:])  # a rank with a shard of them gets the same
    usual = weights[:100_000].float()
    moved = ((copies[:100_000] + 1e-5).to(dtype).float() - usual).mean().item()
    assert moved == pytest.approx(1e-5, rel=0.1)
    if dtype == torch.bfloat16:
        assert ((usual + 1e-5).to(dtype).float() - usual).mean().item() < 2e-6


def test_the_kl_in_the_reward_and_gae_by_hand() -> None:
    """Two tokens, γ = λ = 1, critic values 0.5 and 1.0: an advantage is the return minus the value."""
    sample = replace(made_up()[0], token_ids=(1, 2), mask=(1, 1), logprobs=(-1.0, -1.0), raw_logprobs=(-1.0, -1.0),
                     versions=(0, 0), reward=2.0)  # fmt: skip
    algorithm = recipe(
        algorithm={"name": "ppo", "lam": 1.0, "advantage": {"whiten": False}, "kl": {"coef": 0.1}}
    ).algorithm  # fmt: skip
    estimated = estimate(
        algorithm, [sample], torch.tensor([2.0]), kl_coef=0.1, old=torch.tensor([-1.0, -2.0]),
        reference=torch.tensor([-2.0, -1.0]), values=torch.tensor([0.5, 1.0]), after=torch.tensor([7.0]),
    )  # fmt: skip
    assert torch.allclose(estimated.token_rewards, torch.tensor([-0.1, 2.1]))  # k1 is 1 and -1
    assert torch.allclose(estimated.advantages, torch.tensor([1.5, 1.1]))
    assert estimated.returns is not None
    assert torch.allclose(estimated.returns, torch.tensor([2.0, 2.1]))
    assert kl_estimate(torch.tensor([-1.0]), torch.tensor([-2.0]), "k1").item() == 1.0


def test_reward_of_a_truncated_response_counts_once() -> None:
    """The reward covers the whole response, also if it was truncated: a critic that has learned it is right, and stays
    so. With bootstrap the critic's value after the cut replaces the reward; with both no critic could be right."""
    sample = replace(made_up()[0], token_ids=(1, 2), mask=(1, 1), logprobs=(-1.0, -1.0), raw_logprobs=(-1.0, -1.0),
                     versions=(0, 0), reward=2.0, finish_reason="length")  # fmt: skip

    def returns(value: float, **keys: Any) -> list[float]:
        algorithm = recipe(algorithm={"name": "ppo", "lam": 1.0, **keys}).algorithm
        values = torch.full((2,), value)
        estimated = estimate(algorithm, [sample], torch.tensor([2.0]), values=values, after=values[:1]).returns
        assert estimated is not None
        return estimated.tolist()

    assert returns(0.5) == [2.0, 2.0]
    assert returns(2.0) == [2.0, 2.0]
    assert returns(0.5, bootstrap=True, gamma=0.5) == [0.125, 0.25]
    assert returns(4.0, bootstrap=True, gamma=0.5) == [1.0, 2.0]
    with pytest.raises(ConfigError, match=r"bootstrap = true with gamma = 1: .* Remove bootstrap, or set gamma"):
        returns(0.5, bootstrap=True)


def test_bootstrapped_values_have_a_fixed_point_also_with_token_rewards() -> None:
    """Every response is truncated after two tokens with reward 1 each: V = 1 + gamma (1 + gamma V) at the first one."""
    truncated = replace(made_up()[0], token_ids=(1, 2), mask=(1, 1), logprobs=(-1.0, -1.0), raw_logprobs=(-1.0, -1.0),
                  versions=(0, 0), reward=9.0, token_rewards=(1.0, 1.0), finish_reason="length")  # fmt: skip
    algorithm = recipe(algorithm={"name": "ppo", "lam": 1.0, "bootstrap": True, "gamma": 0.9}).algorithm
    value = 0.0
    for _ in range(200):
        values = torch.full((2,), value)
        estimated = estimate(algorithm, [truncated], torch.tensor([9.0]), values=values, after=values[:1]).returns
        assert estimated is not None
        value = estimated[0].item()
    assert value == pytest.approx((1 + 0.9) / (1 - 0.9**2), rel=1e-4)


def test_long_responses_have_the_same_bits_with_and_without_gradients() -> None:
    """An engine attends to long sequences one by one; both passes of the learner must do the same."""
    module = new_llama(
        "policy", vocab_size=24, hidden_size=32, layers=2, heads=4, kv_heads=2, intermediate_size=64,
        max_positions=256, seed=3,
    )  # fmt: skip
    draw = np.random.default_rng(2)
    samples = []
    for group, count in enumerate((100, 150, 120, 90)):
        ids = tuple(draw.integers(0, 24, count).tolist())
        empty = (0.0,) * count
        samples.append(
            replace(
                made_up()[0], prompt_ids=(group, 1), token_ids=ids, logprobs=empty, raw_logprobs=empty,
                versions=(0,) * count, mask=(1,) * count, group=group,
            )
        )  # fmt: skip
    learner = policy(module, {"name": "dapo"})
    old = learner.logprobs(samples)
    data = Experience(tuple(samples), own_tokens(samples), flat(samples, "logprobs"), torch.ones(len(old)), old)
    metrics = learner.gradient(data, 0.0).metrics()
    assert metrics["policy/ratio_min"] == metrics["policy/ratio_max"] == 1.0


def test_second_minibatch_ratio_uses_the_policy_before_the_first() -> None:
    """The most common PPO setting. Without π_old the ratio would be 1 for both, and nothing would ever be clipped."""
    module = tiny()
    tree = recipe(algorithm={"name": "dapo", "dynamic": None}, train={"epochs": 1, "minibatches": 2, "lr": 3e-2})
    learner_policy = policy(module, {"name": "dapo"})
    learner = RlLearner(tree, learner_policy, Optimizer(module, tree.train), None, None, Clock())
    samples = [replace(s, finish_reason="stop") for s in made_up()]
    before = learner_policy.logprobs(samples)
    metrics, experience = learner.update(Batch(tuple(samples), 0), 0)
    assert experience is not None
    assert experience.old is not None
    # Computed in the epoch's micro-batches, so not bit for bit equal to this pass.
    assert torch.allclose(experience.old, before, atol=1e-5)
    moved = (learner_policy.logprobs(samples) - before).abs().max()
    assert moved > 0.1
    # The first mini-batch's ratio is 1 and the second's is not.
    assert metrics["policy/kl_old"] != 0.0


def test_tokens_rejected_by_a_correction_are_in_no_denominator() -> None:
    """At sequence level, the gradient equals that of a batch without the rejected sequences."""
    module = tiny()
    algorithm = {"name": "grpo", "kl": {"coef": 0.0}, "correction": {"mode": "mask", "level": "sequence", "cap": 1.5}}
    tree = recipe(algorithm=algorithm)
    learner = RlLearner(tree, policy(module, algorithm), Optimizer(module, tree.train), None, None, Clock())
    samples = [replace(s, finish_reason="stop") for s in made_up()]
    logprobs = learner.policy.logprobs(samples)
    ends = torch.tensor([len(s.token_ids) for s in samples]).cumsum(0).tolist()
    engine_logprobs = [logprobs[end - len(s.token_ids) : end] for s, end in zip(samples, ends, strict=True)]
    engine_logprobs[1] = engine_logprobs[1] - 1.0  # the engine reports a low probability: a weight far above the cap
    drawn = [replace(s, logprobs=tuple(lp.tolist())) for s, lp in zip(samples, engine_logprobs, strict=True)]
    experience, _ = learner._experience(Batch(tuple(drawn), 0), torch.tensor([s.reward for s in drawn]), 0)
    assert experience.kept is not None
    for aggregate in ("token", "sequence", "constant"):
        changed = {**algorithm, "aggregate": aggregate}
        module.zero_grad()
        metrics = policy(module, changed).gradient(experience, 0.0).metrics()
        actual = gradients(module)
        assert 0 < metrics["mismatch/masked"] < 1
        module.zero_grad()
        others = experience.select([0, 2, 3, 4, 5])
        policy(module, changed).gradient(replace(others, kept=None), 0.0)
        assert relative(actual, gradients(module)) < 1e-5, aggregate


def test_shared_critic_trains_during_warmup_and_the_policy_does_not() -> None:
    module = tiny()
    head = value_head(module)
    algorithm = {"name": "ppo", "kl": {"coef": 0.0}}
    tree = recipe(algorithm=algorithm, critic={"shared": True, "warmup": 1}, train={"lr": 1e-2})
    trained = Policy(
        inspect(module), tree.algorithm, temperature=1.0, max_tokens=16, micro_batch_tokens=4096, value_head=head,
        value_coef=0.5,
    )  # fmt: skip
    optimizer = Optimizer(module, tree.train, {"value_head.weight": head.weight})
    learner = RlLearner(tree, trained, optimizer, SharedCritic(trained), None, Clock())
    samples = tuple(replace(s, finish_reason="stop") for s in made_up())
    before = {name: p.clone() for name, p in module.named_parameters()}
    metrics, _ = learner.update(Batch(samples, 0), 0)
    assert head.weight.abs().max() > 0
    assert all(torch.equal(p, before[name]) for name, p in module.named_parameters())
    assert metrics["value/loss"] > 0
    learner.update(Batch(samples, 0), 1)
    assert not all(torch.equal(p, before[name]) for name, p in module.named_parameters())
