"""Kernels of recurrent layers: equal to transformers' functions and modules, and bit-identical alone, in a batch and in
chunks of any length. Without a GPU they run in Triton's interpreter."""

from __future__ import annotations

import copy
from collections.abc import Iterator
from contextlib import AbstractContextManager, nullcontext
from itertools import pairwise
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from transformers.models.falcon_h1 import modeling_falcon_h1
from transformers.models.granitemoehybrid import modeling_granitemoehybrid
from transformers.models.kimi_linear import modeling_kimi_linear
from transformers.models.qwen3_5 import modeling_qwen3_5
from transformers.models.zamba2 import modeling_zamba2

triton = pytest.importorskip("triton")
kernels = pytest.importorskip("plaudit.core.kernels")

from plaudit.core import SamplingParams  # noqa: E402
from plaudit.core import engine as engine_module  # noqa: E402
from plaudit.core.device.backend import DecodeBatch, Decoded  # noqa: E402
from plaudit.core.model import differentiable, fusion, operations  # noqa: E402
from plaudit.core.model.decoder import Decoder  # noqa: E402
from plaudit.core.model.fusion import Fusion  # noqa: E402
from plaudit.core.model.packing import use_packed_attention  # noqa: E402
from plaudit.train.policy.forward import hidden_of, logprobs_and_entropy, pack_responses  # noqa: E402
from tests.core import interpreter, tiny  # noqa: E402, F401
from tests.core import test_recurrent as recurrent  # noqa: E402
from tests.core.test_exact import same as equal  # noqa: E402
from tests.core.test_kernels import DEVICE, DTYPES, close, randn  # noqa: E402

pytestmark = pytest.mark.filterwarnings("ignore:overflow encountered:RuntimeWarning")
NO_LIMITS = (0.0, float("inf"))
RULES = {
    "gated": (modeling_qwen3_5.torch_recurrent_gated_delta_rule, modeling_qwen3_5.torch_chunk_gated_delta_rule),
    "by channel": (
        modeling_kimi_linear.recurrent_kimi_delta_attention, modeling_kimi_linear.chunk_kimi_delta_attention
    ),
}  # fmt: skip
DELTA = {"torch_recurrent_gated_delta_rule", "torch_chunk_gated_delta_rule"}
KDA = {"recurrent_kimi_delta_attention", "chunk_kimi_delta_attention"}
MAMBA = {"mamba2_selective_state_update", "mamba2_chunk_scan"}
REPLACED_FUNCTIONS = {
    "qwen3_next": DELTA, "kimi_linear": KDA, "granitemoehybrid": MAMBA, "bamba": MAMBA, "falcon_h1": MAMBA,
    "nemotron_h": MAMBA, "zamba2": MAMBA,
}  # fmt: skip
SLOW = [pytest.param(family, marks=pytest.mark.slow) for family in REPLACED_FUNCTIONS]


def parts_of(inputs: list[torch.Tensor], length: int, stops: tuple[int, ...]) -> list[list[torch.Tensor]]:
    """The inputs (B, L, ...) split along L at these positions."""
    borders = [0, *(stop for stop in stops if stop < length), length]
    return [[x[:, a:b] for x in inputs] for a, b in pairwise(borders)]


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("rule", RULES)
@pytest.mark.parametrize(
    ("sizes", "length"),
    [((16, 16), 1), ((24, 40), 1), ((16, 16), 11), pytest.param((16, 16), 70, marks=pytest.mark.slow)],
)
def test_delta_rule_kernels_match_transformers_and_any_chunking(
    dtype: torch.dtype, rule: str, sizes: tuple[int, int], length: int
) -> None:
    """The results equal transformers' recurrent and chunked rules, and are bit-identical in parts of any length and for
    a single row."""
    keys, values = sizes
    rows, heads = (3, 4) if length == 1 else (2, 1)
    query, key, value = (randn(rows, length, heads, n, dtype=dtype) for n in (keys, keys, values))
    beta = randn(rows, length, heads, dtype=dtype).sigmoid()
    decay = -randn(rows, length, heads, *([keys] if rule == "by channel" else [])).abs()
    state = randn(rows, heads, keys, values)
    for norm in (True, False):
        final_state = state.clone()
        if not norm:
            key = key / 4  # without normalization the state must not blow up
        inputs = [query, key, value, decay, beta]
        out = kernels.delta_rule(*inputs, final_state, norm)
        for original in RULES[rule]:
            expected, expected_state = original(
                *inputs, initial_state=state.clone(), output_final_state=True, use_qk_l2norm_in_kernel=norm
            )
            close(out, expected)
            close(final_state, expected_state)
        chunked_state = state.clone()
        chunks = [kernels.delta_rule(*part, chunked_state, norm) for part in parts_of(inputs, length, (1, 9))]
        assert torch.equal(torch.cat(chunks, 1), out)
        assert torch.equal(chunked_state, final_state)
        row_state = state[1:2].clone()
        assert torch.equal(kernels.delta_rule(*(x[1:2] for x in inputs), row_state, norm), out[1:2])
        assert torch.equal(row_state, final_state[1:2])


def mamba_inputs(rows: int, length: int, groups: int, dtype: torch.dtype) -> list[torch.Tensor]:
    """Inputs of four heads with 24 values and 16 keys, as views of two wide tensors, as in a layer."""
    inner, width = 4 * 24, groups * 16
    mixed = randn(rows, length, inner + 2 * width, dtype=dtype)
    projected = randn(rows, length, inner + 4, dtype=dtype)
    x, key, query = mixed.split([inner, width, width], -1)
    rate, skip, bias = -randn(4).exp(), randn(4, dtype=dtype), randn(4, dtype=dtype) - 2
    return [
        x.view(rows, length, 4, 24), projected[..., inner:], rate, key.view(rows, length, groups, 16),
        query.view(rows, length, groups, 16), skip, bias,
    ]  # fmt: skip


def of_tokens(inputs: list[torch.Tensor], part: list[torch.Tensor]) -> list[torch.Tensor]:
    x, step, key, query = part
    return [x, step, inputs[2], key, query, *inputs[5:]]


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(
    ("groups", "length"), [(1, 1), (2, 3), *(pytest.param(*n, marks=pytest.mark.slow) for n in ((1, 20), (2, 70)))]
)
def test_mamba_scan_matches_transformers_and_any_chunking(dtype: torch.dtype, groups: int, length: int) -> None:
    """Equal to transformers' chunked scan in float32; bit-identical in parts of any length and for a single row."""
    inputs, state = mamba_inputs(3, length, groups, dtype), randn(3, 4, 24, 16)
    for limits in (NO_LIMITS, (0.05, 0.3)):
        final_state = state.clone()
        out = kernels.state_space(*inputs, final_state, limits)
        x, step, rate, key, query, skip, bias = (tensor.float() for tensor in inputs)
        expected, expected_state = modeling_granitemoehybrid.mamba2_chunk_scan(
            x, step, rate, key, query, chunk_size=8, D=skip, dt_bias=bias, dt_softplus=True, dt_limit=limits,
            initial_states=state, return_final_states=True,
        )  # fmt: skip
        assert out.dtype == torch.float32
        close(out, expected)
        close(final_state, expected_state)
        chunked_state = state.clone()
        tokens = [inputs[i] for i in (0, 1, 3, 4)]
        chunks = [
            kernels.state_space(*of_tokens(inputs, part), chunked_state, limits)
            for part in parts_of(tokens, length, (1, 9))
        ]
        assert torch.equal(torch.cat(chunks, 1), out)
        assert torch.equal(chunked_state, final_state)
        row_state = state[1:2].clone()
        row = of_tokens(inputs, [tensor[1:2] for tensor in tokens])
        assert torch.equal(kernels.state_space(*row, row_state, limits), out[1:2])
        assert torch.equal(row_state, final_state[1:2])


def test_mamba_is_accurate_for_small_and_large_step_sizes() -> None:
    """A head whose state only accumulates steps: one token adds softplus(step), from 1e-13 to 30."""
    step = torch.linspace(-30, 30, 61, device=DEVICE).view(-1, 1, 1)
    one, none = torch.ones(1, device=DEVICE), torch.zeros(1, device=DEVICE)
    ones, state = torch.ones(61, 1, 1, 1, device=DEVICE), torch.zeros(61, 1, 1, 1, device=DEVICE)
    out = kernels.state_space(ones, step, none, ones, ones, none, none, state, NO_LIMITS)
    expected = torch.nn.functional.softplus(step.double()).view(-1, 1, 1, 1)
    torch.testing.assert_close(out.double(), expected, rtol=1e-6, atol=0)
    assert torch.equal(out, state)
    assert float(kernels.state_space(ones, step, one, ones, ones, one, one, state, (0.0, 0.0))[0]) > 0  # only D


@pytest.mark.parametrize("dtype", DTYPES)
def test_mamba_step_equals_a_scan_of_one_token(dtype: torch.dtype) -> None:
    inputs, state = mamba_inputs(3, 1, 2, dtype), randn(3, 4, 24, 16)
    scanned_state, fused_state, expected_state = state.clone(), state.clone(), state.clone()
    out = kernels.state_space(*inputs, scanned_state, NO_LIMITS)[:, 0]
    x, step, rate, key, query, skip, bias = inputs
    gate = randn(3, 4, 24, dtype=dtype)
    arguments: list[torch.Tensor] = [
        x[:, 0], step.transpose(1, 2).expand(-1, -1, 24), rate[:, None, None].expand(-1, 24, 16), key[:, 0],
        query[:, 0], skip[:, None].expand(-1, 24),
    ]  # fmt: skip
    original = modeling_granitemoehybrid.mamba2_selective_state_update
    fused = fusion.REPLACED["mamba2_selective_state_update"](original, kernels.state_space)
    named: dict[str, Any] = {"dt_bias": bias[:, None].expand(-1, 24), "dt_softplus": True}
    with torch.no_grad():
        assert torch.equal(fused(fused_state, *arguments, **named), out)
        assert torch.equal(fused_state, scanned_state)
        assert torch.equal(fused(state.clone(), *arguments, z=gate, **named), out * torch.nn.functional.silu(gate))
        close(out.to(dtype), original(expected_state, *arguments, **named))
        close(scanned_state, expected_state)
        named["dt_softplus"] = False  # not supported by the kernel
        assert torch.equal(fused(state.clone(), *arguments, **named), original(state.clone(), *arguments, **named))


@pytest.mark.parametrize("dtype", DTYPES)
def test_convolution_of_full_sequences_matches_transformers_and_single_steps(dtype: torch.dtype) -> None:
    """Equal to transformers, and bit-identical to single-token steps."""
    x, weight = randn(3, 9, 50, dtype=dtype).transpose(1, 2), randn(50, 4, dtype=dtype)
    for bias, activation in ((None, None), (randn(50, dtype=dtype), "silu")):
        out = kernels.convolution(x, weight, bias, activation is not None)
        close(out, modeling_qwen3_5.causal_conv1d_fn(x, weight, bias, activation=activation))
        tail = torch.zeros(3, 50, 4, dtype=dtype, device=DEVICE)
        silu = activation is not None
        steps = [kernels.convolution_step(x[..., i : i + 1], tail, weight, bias, silu) for i in range(9)]
        assert torch.equal(torch.cat(steps, -1), out)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("width", [3, 4])
def test_convolution_step_matches_transformers(dtype: torch.dtype, width: int) -> None:
    x, tail, weight = randn(3, 50, 1, dtype=dtype), randn(3, 50, width, dtype=dtype), randn(50, width, dtype=dtype)
    for bias, activation in ((None, None), (randn(50, dtype=dtype), "silu")):
        expected_tail, actual_tail = tail.clone(), tail.clone()
        expected = modeling_qwen3_5.causal_conv1d_update(x, expected_tail, weight, bias, activation)
        close(kernels.convolution_step(x, actual_tail, weight, bias, activation is not None), expected)
        assert torch.equal(actual_tail, expected_tail)


def gated_norms() -> dict[str, Any]:
    return {
        "qwen3_5": modeling_qwen3_5.Qwen3_5RMSNormGated(48),
        "kimi_linear": modeling_kimi_linear.KimiLinearRMSNormGated(48),
        "granitemoehybrid": modeling_granitemoehybrid.GraniteMoeHybridRMSNormGated(48),
        "nemotron_h": modeling_zamba2.Zamba2RMSNormGated(48, group_size=16),
        "falcon_h1, gate first": modeling_falcon_h1.FalconH1RMSNormGated(48, n_groups=2, norm_before_gate=False),
        "falcon_h1": modeling_falcon_h1.FalconH1RMSNormGated(48, n_groups=2),
    }


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("family", gated_norms())
def test_gated_norms_match_their_modules(dtype: torch.dtype, family: str) -> None:
    module = gated_norms()[family].to(DEVICE, dtype)
    torch.nn.init.normal_(module.weight)
    ((_, fused),) = Fusion(torch.nn.ModuleList([module]), differentiable).forwards
    wide = family in ("granitemoehybrid", "nemotron_h", "falcon_h1, gate first")  # after a scan, which is in float32
    x = randn(7, 48, dtype=torch.float32 if wide else dtype).requires_grad_()
    gate = randn(7, 48, dtype=dtype).requires_grad_()
    out, expected = fused(x, gate), module(x, gate)
    assert out.dtype == expected.dtype
    close(out.detach(), expected.detach())
    inputs, grad = (x, gate, module.weight), randn(7, 48, dtype=out.dtype)
    for actual_gradient, expected_gradient in zip(
        torch.autograd.grad(out, inputs, grad), torch.autograd.grad(expected, inputs, grad), strict=True
    ):
        close(actual_gradient, expected_gradient)
    with torch.no_grad():
        assert torch.equal(fused(x[3:4], gate[3:4]), out[3:4])


@pytest.mark.parametrize("family", SLOW)
def test_recurrent_functions_of_every_family_are_recognised(family: str) -> None:
    replacements = Fusion(recurrent.model(family).model.to(DEVICE), differentiable)
    names = {name for _, name, _ in replacements.functions}
    assert REPLACED_FUNCTIONS[family] | {"causal_conv1d_update", "causal_conv1d_fn"} <= names
    gated = family != "falcon_h1"  # falcon_h1 gates without a norm
    assert any(type(part).__name__.endswith("RMSNormGated") for part, _ in replacements.forwards) == gated


@pytest.mark.parametrize("family", SLOW)
def test_gradients_of_recurrent_layers_match_transformers(family: str) -> None:
    module = copy.deepcopy(recurrent.model(family)).to(DEVICE)
    module.set_attn_implementation("sdpa")  # an engine of an earlier test may have set its own
    ids = torch.arange(2, 2 + 2 * 6, device=DEVICE).view(2, 6)
    replaced = Fusion(module.model, differentiable)

    def gradients(context: AbstractContextManager[None]) -> list[torch.Tensor]:
        with context:
            loss = module(ids, use_cache=False).logits.square().mean()
        return list(torch.autograd.grad(loss, list(module.parameters())))

    for actual, expected in zip(gradients(replaced.applied(False)), gradients(nullcontext()), strict=True):
        torch.testing.assert_close(actual, expected, rtol=1e-3, atol=1e-5 * float(expected.abs().max()) + 1e-7)


RECURRENT_ALONE: Any = SimpleNamespace(  # kernels for recurrent layers, CPU operations for everything else
    RECURRENT=differentiable.RECURRENT, MIXTURE={}, rms_norm=operations.rms_norm, silu_mul=operations.silu_mul,
    rotary=operations.rotary,
)  # fmt: skip


class KernelBackend(recurrent.RowsBackend):
    """The CPU back end with interpreted kernels for recurrent layers; decodes in the rows of the state bank."""

    def __init__(self, decoder: Decoder) -> None:
        super().__init__(decoder)
        self._fusion = Fusion(decoder.trunk, RECURRENT_ALONE)

    def decode(self, batch: DecodeBatch, steps: int) -> Iterator[Decoded]:
        with self._steadied(len(batch.lengths)):
            return iter(list(super().decode(batch, steps)))


@pytest.mark.skipif(DEVICE == "cuda", reason="tests/core/test_cuda_hybrid.py does this on a GPU")
@pytest.mark.parametrize("family", SLOW)
def test_engine_on_kernels_is_bit_identical_to_the_learner(family: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Alone, batched, forked, split at every border and after a prefix hit; also equal to plain transformers."""
    # Two families differ in the last bits because of CPU operations around the recurrence: Kimi-Linear between
    # batches, Nemotron-H from the learner.
    assert_same = recurrent.close if family in ("kimi_linear", "nemotron_h") else equal
    module = copy.deepcopy(recurrent.model(family))
    monkeypatch.setattr(engine_module, "backend_of", KernelBackend)
    engine = recurrent.engine_of(module, max_running=6)
    prompts = tiny.sequences(3, 2, 17, 20)  # longer than a block
    params = SamplingParams(n=2, max_tokens=3, seed=2, ignore_eos=True)
    samples = engine.generate(prompts, params)
    recurrent.right(module, samples)
    logprobs = [np.array(sample.raw_logprobs, np.float32) for sample in samples]
    for repeated, expected in zip(engine.generate(prompts, params), logprobs, strict=True):  # prefix hits
        assert_same(np.array(repeated.raw_logprobs, np.float32), expected)
    for options in ({"max_running": 1}, {"budget": 16}):  # one at a time, and chunked prefill of one block
        other_samples = recurrent.engine_of(module, **options).generate(prompts[:1], params)
        for repeated, sample, expected in zip(other_samples, samples[:2], logprobs[:2], strict=True):
            assert repeated.token_ids == sample.token_ids
            assert_same(np.array(repeated.raw_logprobs, np.float32), expected)
    sequence = [*samples[0].prompt_ids, *samples[0].token_ids]
    for length in (1, 9, 16):  # a state is cached where samples branch off: before a prompt's last token
        engine.generate([sequence[: length + 1]], SamplingParams(max_tokens=1, seed=1, ignore_eos=True))
        assert_same(engine.logprobs([sequence], cache=True)[0][-3:], logprobs[0])
    engine.check()
    use_packed_attention(module.train())
    with engine.backend._fusion.applied(True):
        responses = pack_responses(samples, torch.device("cpu"))
        learner_logprobs, _ = logprobs_and_entropy(engine.decoder, responses, hidden_of(module, responses), 1.0)
        learner_logprobs.sum().backward()
    assert_same(learner_logprobs.detach().numpy(), np.concatenate(logprobs))
