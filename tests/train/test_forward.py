"""Samples with a common prefix share its rows; their log-probs and gradients equal those of separate samples."""

from dataclasses import replace

import pytest
import torch

from plaudit.config.supervised import PolicyModelTable
from plaudit.core.model import varlen
from plaudit.core.model.fused import fused_rows
from plaudit.core.model.packing import use_packed_attention
from plaudit.records import Sample
from plaudit.train.optim.repeatable import repeatable
from plaudit.train.policy.experience import Experience, flat, own_tokens
from plaudit.train.policy.forward import pack_responses
from plaudit.train.policy.rl_models import prepare
from tests.train.rl_world import gradients, made_up, policy, relative, tiny


def samples_with_common_prefixes() -> tuple[Sample, ...]:
    """Two prompts, one a prefix of the other; responses share prefixes, are prefixes of others, or are equal."""
    first, second = (3, 1, 4, 1), (3, 1, 4, 1, 5)
    responses = [(2, 6, 5), (2, 6, 5, 3), (2, 6), (2, 6, 5), (7, 1, 8), (2, 7)]
    samples = []
    for i, response in enumerate(responses):
        empty = (0.0,) * len(response)
        samples.append(
            replace(
                made_up()[0], prompt_ids=second if i % 4 == 3 else first, token_ids=response, logprobs=empty,
                raw_logprobs=empty, versions=(0,) * len(response), mask=(1,) * len(response),
            )
        )  # fmt: skip
    return (*samples, samples[0])


@pytest.mark.parametrize("temperature", [1.0, 0.7])
def test_log_probs_equal_those_of_separate_samples(temperature: float) -> None:
    module = tiny()
    logprobs = policy(module, {"name": "grpo"}, temperature=temperature).logprobs(samples_with_common_prefixes())
    module.set_attn_implementation("sdpa")
    expected = []
    for sample in samples_with_common_prefixes():
        ids = torch.tensor([sample.prompt_ids + sample.token_ids])
        with torch.no_grad():
            table = (module(ids).logits[0] / temperature).log_softmax(-1)
        expected += [table[len(sample.prompt_ids) + t - 1, token] for t, token in enumerate(sample.token_ids)]
    assert torch.allclose(logprobs, torch.stack(expected), atol=1e-5)


@pytest.mark.parametrize("algorithm", ["grpo", "gspo", "cispo", "rloo"])
def test_gradient_equals_that_of_separate_samples(algorithm: str) -> None:
    samples, module = samples_with_common_prefixes(), tiny()
    together = policy(module, {"name": algorithm}, micro_batch_tokens=4096)
    old = together.logprobs(samples) + 0.1
    advantages = torch.randn(len(old), generator=torch.Generator().manual_seed(6))
    data = Experience(samples, own_tokens(samples), flat(samples, "logprobs"), advantages, old)
    together.gradient(data, 0.0)
    expected = gradients(module)
    module.zero_grad()
    policy(module, {"name": algorithm}, micro_batch_tokens=1).gradient(data, 0.0)
    assert relative(gradients(module), expected) < 1e-6


def test_common_prefix_is_computed_once() -> None:
    samples = samples_with_common_prefixes()
    responses = pack_responses(samples, torch.device("cpu"))
    alone = sum(len(sample.prompt_ids + sample.token_ids) for sample in samples)
    assert responses.packed.input_ids.shape[1] < alone / 2
    ids = responses.packed.input_ids[0]
    lasts = [sample.token_ids[-1] for sample in samples]
    assert ids[responses.ends].tolist() == lasts
    assert responses.targets.tolist() == [token for sample in samples for token in sample.token_ids]


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device")
@pytest.mark.parametrize(("dtype", "close"), [(torch.float32, 1e-4), (torch.bfloat16, 3e-2)])
def test_gpu_kernels_support_fewer_queries_than_keys(dtype: torch.dtype, close: float) -> None:
    """A response has fewer queries than keys, and the keys are elsewhere in the row."""
    samples, module = samples_with_common_prefixes(), tiny().to("cuda", dtype)
    together = policy(module, {"name": "grpo"}, micro_batch_tokens=4096)
    old = together.logprobs(samples) + 0.1
    advantages = torch.randn(len(old), generator=torch.Generator().manual_seed(6))
    data = Experience(samples, own_tokens(samples), flat(samples, "logprobs"), advantages, old)
    together.gradient(data, 0.0)
    expected = gradients(module)
    module.zero_grad()
    policy(module, {"name": "grpo"}, micro_batch_tokens=1).gradient(data, 0.0)
    assert relative(gradients(module), expected) < close


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
def test_fused_gpu_kernels_give_the_gradients_of_a_cpu() -> None:
    """The GPU computes in bfloat16; only its rounding may differ."""
    packed = {
        device: pack_responses(samples_with_common_prefixes(), torch.device(device)) for device in ("cpu", "cuda")
    }

    def learn(device: str, dtype: torch.dtype) -> dict[str, torch.Tensor]:
        module = tiny().to(device, dtype)
        use_packed_attention(module)
        rows = fused_rows(module, packed[device].packed)
        torch.manual_seed(0)
        (rows.float() * torch.randn(rows.shape).to(device)).sum().backward()
        return {name: gradient.float().cpu() for name, gradient in gradients(module).items()}

    assert relative(learn("cuda", torch.bfloat16), learn("cpu", torch.float32)) < 0.03


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
def test_recomputed_layers_on_a_gpu_are_equal_bit_for_bit() -> None:
    """Both passes run on the fused kernels, also at the first use of a kernel."""
    responses = pack_responses(samples_with_common_prefixes(), torch.device("cuda"))

    def learn(recompute: bool) -> dict[str, torch.Tensor]:
        varlen._backward_fits.cache_clear()
        module = tiny().to("cuda", torch.bfloat16)
        prepare(module, PolicyModelTable(path="tiny", recompute=recompute), 0, None)
        use_packed_attention(module)
        with repeatable(responses.packed.input_ids.device):
            rows = fused_rows(module, responses.packed)
            rows.float().square().sum().backward()
        return {"rows": rows.detach(), **gradients(module)}

    stored, recomputed = learn(recompute=False), learn(recompute=True)
    assert [name for name in stored if not torch.equal(stored[name], recomputed[name])] == []
