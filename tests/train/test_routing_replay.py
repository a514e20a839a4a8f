"""A learner that replays the engine's experts has log-probs and gradients of plain transformers with these experts."""

import copy
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from plaudit.config.prompting import SamplingTable
from plaudit.config.rl import EnvironmentTable
from plaudit.config.supervised import PolicyModelTable
from plaudit.core import Engine, SamplingParams
from plaudit.core.proof.support import inspect
from plaudit.core.routing import Routing
from plaudit.errors import ConfigError, DataError
from plaudit.models import load_tokenizer, resolve
from plaudit.records import Batch, Prompt, Sample, Turn
from plaudit.rl.loop import RlTraining
from plaudit.train.agents.episodes import Episodes
from plaudit.train.policy.experience import Experience, flat, own_tokens
from plaudit.train.policy.forward import pack_responses
from plaudit.train.policy.policy import Policy
from plaudit.train.policy.rl_models import check_routing, prepare
from plaudit.train.rollouts.dump import Dump
from plaudit.train.run.proof import batch_proof
from plaudit.train.run.run import Run
from tests.core.mixtures import CONFIGS, decoded, forced_logprobs, mixture, own_experts, routers
from tests.rotation import mostly_slow
from tests.train.rl_world import Silent, gradients, recipe, relative

PROMPTS = [[5, 6, 7, 8, 9, 10], [5, 6, 7, 30], [40]]


def drawn(module: Any, tokens: int = 10) -> tuple[Sample, ...]:
    engine = Engine(module, record_experts=True, kv_bytes=1 << 22)
    return tuple(engine.generate(PROMPTS, SamplingParams(n=2, max_tokens=tokens, seed=1)))


def learner(module: Any, replays: bool = True, budget: int = 4096) -> Policy:
    decoder = inspect(module)
    return Policy(
        decoder, recipe(algorithm={"name": "grpo"}).algorithm, temperature=1.0, max_tokens=16,
        micro_batch_tokens=budget, routing=Routing(decoder) if replays else None,
    )  # fmt: skip


def with_other_routers(module: Any, family: str) -> Any:
    """A copy with other routers: about half of the experts that they choose are different."""
    other = copy.deepcopy(module)
    generator = torch.Generator().manual_seed(5)
    with torch.no_grad():
        for router in routers(other, family):
            router.weight.add_(0.15 * torch.randn(router.weight.shape, generator=generator))
    return other


def experience(samples: tuple[Sample, ...]) -> Experience:
    behaviour = flat(samples, "logprobs")
    advantages = torch.randn(len(behaviour), generator=torch.Generator().manual_seed(6))
    return Experience(samples, own_tokens(samples), behaviour, advantages)


def forced(module: Any, family: str, samples: tuple[Sample, ...]) -> torch.Tensor:
    """(T,) log-probs of the response tokens, one sample at a time."""
    return torch.cat([_forced(module, family, s)[0][len(s.prompt_ids) - 1 :] for s in samples])


def _forced(module: Any, family: str, sample: Sample) -> tuple[torch.Tensor, torch.Tensor]:
    assert sample.experts is not None
    ids = sample.prompt_ids + sample.token_ids
    return forced_logprobs(module, family, ids, decoded(sample.experts, module, family))


@pytest.mark.parametrize("family", mostly_slow(CONFIGS))
def test_replay_with_the_weights_of_the_engine_changes_no_bit(family: str) -> None:
    module = mixture(family)
    samples = drawn(module)
    replayed, plain = learner(module), learner(module, replays=False)
    expected = plain.logprobs(samples)
    assert torch.equal(replayed.logprobs(samples), expected)
    assert (expected - flat(samples, "logprobs")).abs().max() < 1e-4
    tally = replayed.gradient(experience(samples), 0.0)
    assert tally.metrics()["mismatch/routing"] == 0
    actual = gradients(module)
    module.zero_grad()
    assert "mismatch/routing" not in plain.gradient(experience(samples), 0.0).metrics()
    assert relative(actual, gradients(module)) < 1e-6


@pytest.mark.parametrize("family", mostly_slow(CONFIGS))
def test_replay_with_other_routers_equals_transformers_with_these_experts(family: str) -> None:
    samples = drawn(mixture(family))
    module = with_other_routers(mixture(family), family)
    reference = copy.deepcopy(module)
    replaying = learner(module)
    expected = forced(reference, family, samples)
    assert torch.allclose(replaying.logprobs(samples), expected, atol=2e-5)
    assert (learner(copy.deepcopy(module), replays=False).logprobs(samples) - expected).abs().max() > 0.01
    # The gradients, too, also those of the routers, which are trained through the recorded experts.
    data = experience(samples)
    replaying.gradient(data, 0.0)
    weights = data.advantages / len(data.advantages)
    (-(expected - expected.detach()).exp() * weights).sum().backward()
    expected_gradients = gradients(reference)
    assert relative(gradients(module), expected_gradients) < 1e-4
    assert all(router.weight.grad.abs().max() > 1e-6 for router in routers(module, family))


@pytest.mark.parametrize("family", mostly_slow(CONFIGS))
def test_routing_mismatch_is_the_share_of_different_choices(family: str) -> None:
    """The samples have different prompts, so that they share no row."""
    samples = drawn(mixture(family))[::2]
    samples = (samples[0], samples[2])
    module = with_other_routers(mixture(family), family)
    different = torch.cat([_forced(module, family, sample)[1] for sample in samples])
    assert 0.05 < different.float().mean() < 0.95
    mismatch = learner(module).gradient(experience(samples), 0.0).metrics()["mismatch/routing"]
    assert mismatch == pytest.approx(different.float().mean().item(), abs=1e-6)


def test_rows_are_shared_only_where_the_experts_are_equal() -> None:
    """Three samples of the same tokens; the last one has other experts for the third token of its prompt."""
    module = mixture("qwen3_moe")
    (first, *_) = drawn(module)
    assert first.experts is not None
    record = decoded(first.experts, module, "qwen3_moe").copy()
    record[2, 1] = (record[2, 1] + 1) % 8
    samples = (first, first, replace(first, experts=record.tobytes()))
    replaying = learner(module)
    tokens = len(first.prompt_ids + first.token_ids)
    packed = pack_responses(samples, torch.device("cpu"), replaying.routing).packed
    assert packed.input_ids.shape[1] == tokens + 1 + tokens - 2  # the last token of a sample is never shared
    assert torch.allclose(replaying.logprobs(samples), forced(module, "qwen3_moe", samples), atol=2e-5)


@pytest.mark.slow
@pytest.mark.parametrize("family", ["qwen3_moe", "deepseek_v3"])
def test_batched_separate_and_recomputed_passes_are_equal(family: str) -> None:
    samples = drawn(mixture(family))
    module = with_other_routers(mixture(family), family)
    data = experience(samples)
    batched = learner(module)
    logp = batched.logprobs(samples)
    metrics = batched.gradient(data, 0.0).metrics()
    expected = gradients(module)
    module.zero_grad()
    separate = learner(module, budget=1)
    assert torch.allclose(separate.logprobs(samples), logp, atol=1e-5)
    separate.gradient(data, 0.0)
    assert relative(gradients(module), expected) < 1e-5
    module.zero_grad()
    prepare(module, PolicyModelTable(path="x", recompute=True), 0, None)
    recomputed = batched.gradient(data, 0.0).metrics()
    assert relative(gradients(module), expected) < 1e-6
    assert recomputed["mismatch/routing"] == metrics["mismatch/routing"]


def test_experts_of_a_sample_are_dumped_bit_for_bit(tmp_path: Path) -> None:
    samples = drawn(mixture("qwen3_moe"))
    Dump(tmp_path).write(1, Batch(samples), 3)
    assert Dump(tmp_path).read(1)[0] == samples
    changed = replace(samples[0], experts=bytes(len(samples[0].experts or b"")))
    proof, other = batch_proof(samples), batch_proof((changed, *samples[1:]))
    assert {name for name in proof if proof[name] != other[name]} == {"samples"}


def test_samples_without_valid_experts_are_rejected() -> None:
    module = mixture("qwen3_moe")
    (sample, *_) = drawn(module)
    replaying = learner(module)
    with pytest.raises(DataError, match="a sample has no experts: generate samples with it on"):
        replaying.logprobs([replace(sample, experts=None)])
    with pytest.raises(DataError, match="it was recorded with another model"):
        replaying.logprobs([replace(sample, experts=b"12345")])


SERVED = {"placement": {"name": "disaggregated"}, "engine": {"name": "vllm", "url": "http://localhost:1"}}


@pytest.mark.parametrize(
    ("tables", "why"),
    [
        (SERVED, 'engine.name = "vllm" does not report them'),
        ({"resources": {"data_parallel": 2}}, "resources set 2 training ranks"),
        (
            {"placement": {"name": "disaggregated"}, "resources": {"rollout": {"pipeline_parallel": 2}}},
            "rank 0 of an engine of 2 stages has only the routers of its own layers",
        ),
        (
            {"placement": {"name": "disaggregated"}, "resources": {"rollout": {"processes": 2, "prefill": 1}}},
            "prefill transfers KV without them",
        ),
    ],
)  # fmt: skip
def test_setups_that_record_no_experts_are_rejected(tables: dict[str, Any], why: str) -> None:
    with pytest.raises(ConfigError, match=why):
        recipe(**tables, train={"routing_replay": True})


def test_unsupported_runs_are_rejected_before_a_model_is_loaded(tmp_path: Path) -> None:
    tree = recipe(train={"routing_replay": True})
    with Run(tmp_path / "run", tree) as run, pytest.raises(ConfigError, match="sums-policy has no experts: remove it"):
        RlTraining(tree, run, Silent())
    with pytest.raises(ConfigError, match=r'on a CPU, and this run is on cuda: set model\.device = "cpu"'):
        check_routing(recipe(model={"device": "cuda"}, train={"routing_replay": True}))


def test_shared_critic_replays_the_engines_experts() -> None:
    samples = drawn(mixture("qwen3_moe"))
    module = with_other_routers(mixture("qwen3_moe"), "qwen3_moe")
    replaying = learner(module)
    replaying.value_head = torch.nn.Linear(32, 1, bias=False)
    values, _ = replaying.values(samples)
    rows = []
    handle = module.model.norm.register_forward_hook(lambda _, __, out: rows.append(out[0].detach()))
    for sample in samples:
        _forced(module, "qwen3_moe", sample)
    handle.remove()
    expected = [replaying.value_head(r)[len(s.prompt_ids) - 1 :, 0] for r, s in zip(rows, samples, strict=True)]
    assert torch.allclose(values, torch.cat(expected), atol=2e-5)
    replaying.routing = None
    assert not torch.allclose(replaying.values(samples)[0], torch.cat(expected), atol=1e-3)


class Says:
    """An environment that answers every turn with two or three tokens."""

    def reset(self, prompt: Prompt) -> None: ...

    def step(self, text: str) -> Turn:
        return Turn("1+2" if len(text) % 2 else "7=")


@pytest.mark.slow
def test_multi_turn_response_has_the_experts_of_all_its_tokens() -> None:
    module, tokenizer = mixture("qwen3_moe"), load_tokenizer(resolve("sums-policy"))
    engine = Engine(module, tokenizer, record_experts=True, kv_bytes=1 << 22)
    sampling, table = SamplingTable(max_tokens=60, stop=tuple("0123456789+=")), EnvironmentTable(name="x", max_turns=4)
    player = Episodes(engine, tokenizer, 256, sampling, table, 1, make=Says)
    samples = tuple(player.play([Prompt("7+8=", (1, 9, 8, 7)), Prompt("1=", (1, 5))], 3, "seed"))
    assert any(sample.extra["turns"] > 2 for sample in samples)
    for sample in samples:
        assert sample.experts is not None
        ids = sample.prompt_ids + sample.token_ids
        recorded = np.sort(decoded(sample.experts, module, "qwen3_moe"), axis=-1)
        # A final observation is left out: the last token is the policy's.
        assert np.array_equal(recorded, own_experts(module, "qwen3_moe", ids)[:-1])
    other = with_other_routers(module, "qwen3_moe")
    mask = own_tokens(samples)
    assert torch.allclose(learner(other).logprobs(samples)[mask], forced(other, "qwen3_moe", samples)[mask], atol=2e-5)
