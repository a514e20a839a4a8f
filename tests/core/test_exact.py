"""Engine and learner are bit-identical on a CPU in float32: the order of summation does not depend on the batch.

Guaranteed on ARM, on Intel x86-64 with AVX-512, and on Intel where MKL is set to a fixed order (MKL_CBWR). Where a
platform's library sums few rows in another order than many, the numbers are only close."""

from __future__ import annotations

import os
import platform
import subprocess
import sys
from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from transformers import LlamaConfig, LlamaForCausalLM

from plaudit.algo.tokens import products
from plaudit.core import Engine, SamplingParams
from plaudit.core.device import cpu_decode
from plaudit.core.model import attention
from plaudit.core.model.operations import elementwise
from plaudit.records import Sample
from plaudit.train.policy.forward import hidden_of, logprobs_and_entropy, pack_responses
from tests.core import tiny
from tests.rotation import mostly_slow


def intel() -> bool:
    processor = Path("/proc/cpuinfo")
    return torch.backends.mkl.is_available() and processor.exists() and "GenuineIntel" in processor.read_text()


def bits_guaranteed() -> bool:
    if platform.machine() in ("aarch64", "arm64"):
        return True
    strict = os.environ.get("MKL_CBWR", "").endswith(",STRICT")
    return intel() and (strict or torch.backends.cpu.get_cpu_capability() == "AVX512")


BITS_GUARANTEED = bits_guaranteed()
DENSE = ["llama", "qwen2", "qwen3", "mistral", "gemma2", "gemma3", "gpt_neox", "olmo2", "deepseek_v3"]
TEMPERATURE = 0.7
FREE = SamplingParams(temperature=TEMPERATURE, max_tokens=50, ignore_eos=True, seed=4)


def same(actual: Sequence[float] | np.ndarray, expected: Sequence[float] | np.ndarray) -> None:
    first, second = (np.asarray(values, dtype=np.float32) for values in (actual, expected))
    np.testing.assert_allclose(first, second, rtol=0, atol=1e-4)
    if BITS_GUARANTEED:
        assert first.view(np.int32).tolist() == second.view(np.int32).tolist()


def learner_logprobs(
    module: nn.Module, engine: Engine, samples: Sequence[Sample], grad: bool = True, temperature: float = TEMPERATURE
) -> list[float]:
    """The learner's log-probs of all sampled tokens, concatenated."""
    with torch.set_grad_enabled(grad):
        responses = pack_responses(samples, torch.device("cpu"))
        logp, _ = logprobs_and_entropy(engine.decoder, responses, hidden_of(module, responses), temperature)
    return logp.tolist()


def sampled_logprobs(samples: Sequence[Sample]) -> list[float]:
    return [value for sample in samples for value in sample.logprobs]


@pytest.mark.parametrize("family", mostly_slow(DENSE))
def test_learner_logprobs_are_bit_identical_to_the_engines(family: str) -> None:
    module = tiny.model(family)
    engine = Engine(module)
    samples = engine.generate(tiny.sequences(3, 6, 1, 60), replace(FREE, n=3))
    for grad in (True, False):
        same(learner_logprobs(module, engine, samples, grad), sampled_logprobs(samples))
    same([p for s in samples[:5] for p in learner_logprobs(module, engine, [s])], sampled_logprobs(samples[:5]))
    sequences = [[*s.prompt_ids, *s.token_ids] for s in samples]
    expected = [
        float(p)
        for s, logprobs in zip(samples, engine.logprobs(sequences), strict=True)
        for p in logprobs[-len(s.token_ids) :]
    ]
    same(learner_logprobs(module, engine, samples, temperature=1.0), expected)


PROMPT = tiny.sequences(5, 1, 50, 50)[0]
OTHERS = tiny.sequences(6, 69, 1, 60)


@pytest.fixture(scope="module")
def llama() -> nn.Module:
    return tiny.model("llama")


@pytest.fixture(scope="module")
def alone(llama: nn.Module) -> tuple[float, ...]:
    return Engine(llama).generate([PROMPT], FREE)[0].logprobs


@pytest.mark.parametrize("count", [6, pytest.param(69, marks=pytest.mark.slow)])
def test_row_does_not_depend_on_the_rest_of_the_batch(llama: nn.Module, alone: tuple[float, ...], count: int) -> None:
    for at in (0, count):
        prompts = [*OTHERS[:at], PROMPT, *OTHERS[at:count]]
        same(Engine(llama).generate(prompts, FREE)[at].logprobs, alone)


@pytest.mark.parametrize("shared", [1, 15, 16, 17, 31, 32, 33, 48, 49])
def test_cached_prefix_does_not_change_a_bit(llama: nn.Module, alone: tuple[float, ...], shared: int) -> None:
    engine = Engine(llama)
    engine.generate([PROMPT[:shared]], replace(FREE, max_tokens=3))
    same(engine.generate([PROMPT], FREE)[0].logprobs, alone)
    assert engine.stats().tokens_shared >= shared - shared % engine.backend.block_size


def small(engine: Engine) -> Engine:
    return Engine(engine.decoder.module, kv_bytes=9 * 16 * engine.decoder.token_bytes(), max_running=4, budget=16)


def narrow(patch: pytest.MonkeyPatch, steps: int, workspace: int) -> None:
    patch.setattr(cpu_decode, "STEPS", steps)
    patch.setattr(cpu_decode, "WORKSPACE", workspace)


@pytest.mark.parametrize(
    "change",
    [lambda patch: narrow(patch, 8, 2**26), lambda patch: narrow(patch, 64, 0), lambda patch: None],
    ids=["short windows", "blocks gathered", "preempted, prompts in parts"],
)
def test_logprobs_do_not_depend_on_decode_windows_or_preemption(
    llama: nn.Module, alone: tuple[float, ...], monkeypatch: pytest.MonkeyPatch,
    change: Callable[[pytest.MonkeyPatch], None],
) -> None:  # fmt: skip
    change(monkeypatch)
    engine = small(Engine(llama))
    samples = engine.generate([PROMPT, *OTHERS[:5]], FREE)
    assert engine.stats().preemptions > 0
    same(samples[0].logprobs, alone)


@pytest.mark.slow
@pytest.mark.parametrize("kv_heads", [1, 4])
def test_long_rows_with_several_partial_sums_are_bit_identical(kv_heads: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Values are summed in several matmuls; with as many key-value heads as heads, a matmul has one row."""
    monkeypatch.setattr(attention, "SCORES", 2**20)  # queries also in several tiles
    torch.manual_seed(1)
    sizes = {"vocab_size": 89, "hidden_size": 64, "intermediate_size": 96, "max_position_embeddings": 2048}
    heads = {"num_hidden_layers": 2, "num_attention_heads": 4, "num_key_value_heads": kv_heads}
    module = LlamaForCausalLM(LlamaConfig(**sizes, **heads, initializer_range=0.25)).eval()
    engine = Engine(module)
    samples = engine.generate(tiny.sequences(8, 4, 480, 1200), replace(FREE, max_tokens=60))
    same(learner_logprobs(module, engine, samples), sampled_logprobs(samples))
    same(engine.generate([list(samples[0].prompt_ids)], replace(FREE, max_tokens=60))[0].logprobs, samples[0].logprobs)


@pytest.mark.parametrize(
    ("inner", "width", "bias"), [(32, 16, False), (32, 16, True), (576, 64, True), (1536, 64, False)]
)
def test_few_row_matmuls_are_padded_to_be_bit_identical_to_many_rows(inner: int, width: int, bias: bool) -> None:
    """Also where the current weights are zeros, as in a new adapter: the self-check does not use them."""
    zeros = torch.zeros(width, inner)
    products.steady_linear(torch.ones(1, inner), zeros, torch.zeros(width) if bias else None)
    generator = torch.Generator().manual_seed(0)
    x, weight = (torch.randn(n, inner, generator=generator) for n in (300, width))
    added = torch.randn(width, generator=generator) if bias else None
    many = products.steady_linear(x, weight, added)
    for rows in (*range(1, 20), 33, 64, 65):
        for first in (0, 117):
            few = products.steady_linear(x[first : first + rows], weight, added)
            same(few.flatten().numpy(), many[first : first + rows].flatten().numpy())


def test_half_precision_and_classifiers_use_the_faster_path() -> None:
    assert Engine(tiny.model("llama")).backend.steady  # type: ignore[attr-defined]
    assert not Engine(tiny.model("llama"), exact=False).backend.steady  # type: ignore[attr-defined]
    assert not Engine(tiny.model("llama", "sequence")).backend.steady  # type: ignore[attr-defined]
    assert not Engine(tiny.model("llama", dtype=torch.bfloat16)).backend.steady  # type: ignore[attr-defined]


@pytest.mark.parametrize(
    ("keys", "rows"), [(60, 2), (200, 1), (256, 3), (257, 2), (266, 1), (300, 16), (400, 2), (520, 1)]
)
def test_summation_order_of_values_does_not_depend_on_trailing_masked_keys(keys: int, rows: int) -> None:
    """Also where the last sum has only a few keys, which torch would sum in a separate loop."""
    generator = torch.Generator().manual_seed(0)
    weights = torch.rand(3, 40, 1024, generator=generator)
    weights[..., keys:] = 0
    values = torch.randn(3, 1024, 8, generator=generator)
    many = attention.weighted(weights, values)[:, :rows]
    for trailing in (0, 1, 7, 56, 100, 300):
        end = max(attention.LEAST_KEYS, keys + trailing)
        few = attention.weighted(weights[:, :rows, :end], values[:, :end])
        same(few.flatten().numpy(), many.flatten().numpy())


@pytest.mark.parametrize("threads", [1, 2, 3])
@pytest.mark.parametrize(
    "function",
    [F.silu, F.gelu, partial(F.gelu, approximate="tanh"), torch.sigmoid],
    ids=["silu", "gelu", "gelu by tanh", "sigmoid"],
)
@pytest.mark.parametrize("width", [1, 48, 89, 1000])
def test_activation_does_not_depend_on_the_following_rows(
    width: int, function: Callable[[Tensor], Tensor], threads: int
) -> None:
    """A thread computes the elements after its last full vector one by one, with different rounding."""
    x = torch.randn(200, 2 * width, generator=torch.Generator().manual_seed(0))[:, :width]
    before = torch.get_num_threads()
    torch.set_num_threads(threads)
    try:
        many = elementwise(function, x)
        np.testing.assert_allclose(many.numpy(), function(x).numpy(), rtol=1e-5, atol=1e-6)
        for rows in (1, 2, 3, 5, 17, 99):
            for first in (0, 100):
                few = elementwise(function, x[first : first + rows].clone())
                same(few.flatten().numpy(), many[first : first + rows].flatten().numpy())
    finally:
        torch.set_num_threads(before)


def test_elementwise_activation_has_the_correct_gradient() -> None:
    x = torch.randn(3, 7, dtype=torch.float64, requires_grad=True)
    assert torch.autograd.gradcheck(partial(elementwise, F.silu), (x,))


ROWS = """
import torch
torch.set_num_threads(2)
torch.manual_seed(0)
for inner, width in (64, 89), (896, 128):
    x, weight = torch.randn(600, inner), torch.randn(width, inner)
    many = torch.nn.functional.linear(x, weight)
    for rows in (1, 2, 3, 8, 20, 64, 100, 513):
        assert torch.equal(torch.nn.functional.linear(x[:rows], weight), many[:rows]), (inner, rows)
"""


@pytest.mark.slow
@pytest.mark.skipif(not intel(), reason="needs MKL on a processor of Intel's")
@pytest.mark.parametrize("instructions", ["AVX2", "AVX512"])
def test_mkl_strict_mode_keeps_one_summation_order(instructions: str) -> None:
    """The claims of docs/proof.md on several threads and wide layers, and on processors without AVX-512."""
    settings = {"MKL_CBWR": "AUTO,STRICT", "MKL_ENABLE_INSTRUCTIONS": instructions}
    subprocess.run([sys.executable, "-c", ROWS], env={**os.environ, **settings}, check=True, timeout=200)
