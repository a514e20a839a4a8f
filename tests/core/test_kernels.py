"""Triton kernels against plain torch, on fresh random inputs. Without a GPU they run in Triton's interpreter."""

import os
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

GPU = torch.cuda.is_available()
triton = pytest.importorskip("triton")
kernels = pytest.importorskip("plaudit.core.kernels")

from plaudit.algo.tokens import product_kernel  # noqa: E402
from plaudit.core.device.backend import Span  # noqa: E402
from plaudit.core.device.cuda import DecodeLayout, StoredLayout  # noqa: E402
from plaudit.core.device.kernel_operations import KernelOperations  # noqa: E402
from plaudit.core.device.paged import PagedBackend  # noqa: E402
from plaudit.core.kernels import pointwise, sampling  # noqa: E402
from plaudit.core.model import differentiable  # noqa: E402
from plaudit.core.model.attention import Rule  # noqa: E402
from plaudit.core.model.fusion import Fusion  # noqa: E402
from plaudit.core.model.lean import LeanTrunk  # noqa: E402
from plaudit.core.model.packing import grouped_layout, pack  # noqa: E402
from plaudit.core.model.varlen import VarlenLayout  # noqa: E402
from plaudit.core.proof.support import inspect  # noqa: E402
from plaudit.core.sampling.noise import row_key, token_hashes  # noqa: E402
from plaudit.core.sampling.sampler import Sampler  # noqa: E402
from plaudit.core.sampling.sampling_params import SamplingParams  # noqa: E402
from tests.core import interpreter, tiny  # noqa: E402, F401
from tests.rotation import mostly_slow  # noqa: E402

DEVICE = "cuda" if GPU else "cpu"
DTYPES = [torch.float32, torch.bfloat16] if GPU else [torch.float32]
BLOCK = 64  # tokens
HALF = torch.bfloat16 if GPU else torch.float16  # the interpreter has no bfloat16
pytestmark = pytest.mark.filterwarnings("ignore:overflow encountered:RuntimeWarning")


def randn(*shape: int, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    return torch.randn(*shape, device=DEVICE).to(dtype)


def close(actual: torch.Tensor, expected: torch.Tensor) -> None:
    tolerance = 2e-5 if actual.dtype == torch.float32 else 2e-2
    torch.testing.assert_close(actual.float(), expected.float(), rtol=tolerance, atol=tolerance)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("gemma", [False, True])
def test_rms_norm(dtype: torch.dtype, gemma: bool) -> None:
    x, weight = randn(5, 3, 80, dtype=dtype), randn(80, dtype=dtype)
    wide = x.float() * torch.rsqrt(x.float().pow(2).mean(-1, keepdim=True) + 1e-5)
    expected = wide * (1 + weight.float()) if gemma else wide * weight.float()
    close(kernels.rms_norm(x, weight, 1e-5, gemma), expected)


@pytest.mark.slow
@pytest.mark.parametrize("dtype", [*DTYPES, torch.float16])  # the interpreter truncates bfloat16
@pytest.mark.parametrize("shape", [(300, 80), (7, 576), (5, 2048)])
def test_add_rms_norm_is_bit_identical_to_add_then_rms_norm(dtype: torch.dtype, shape: tuple[int, int]) -> None:
    x, y, weight = randn(*shape, dtype=dtype), randn(*shape, dtype=dtype), randn(shape[1], dtype=dtype)
    before = x.clone(), y.clone()
    total, normed = kernels.add_rms_norm(x, y, weight, 1e-5)
    assert torch.equal(total, x + y)
    assert torch.equal(normed, kernels.rms_norm(x + y, weight, 1e-5))
    assert torch.equal(x, before[0])
    assert torch.equal(y, before[1])


@pytest.mark.parametrize("dtype", DTYPES)
def test_silu_mul(dtype: torch.dtype) -> None:
    gate, up = randn(7, 1000, dtype=dtype), randn(7, 1000, dtype=dtype)
    close(kernels.silu_mul(gate, up), torch.nn.functional.silu(gate.float()) * up.float())


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(("heads", "kv_heads", "dim"), [(4, 2, 16), (9, 3, 64), (5, 5, 20)])
def test_rotary(dtype: torch.dtype, heads: int, kv_heads: int, dim: int) -> None:
    from transformers.models.llama.modeling_llama import apply_rotary_pos_emb

    query, key = (randn(1, 11, n, dim, dtype=dtype).transpose(1, 2) for n in (heads, kv_heads))
    angle = torch.randn(1, 11, dim // 2, device=DEVICE).repeat(1, 1, 2)
    cos, sin = angle.cos().to(dtype), angle.sin().to(dtype)
    for actual, expected in zip(
        kernels.rotary(query, key, cos, sin), apply_rotary_pos_emb(query, key, cos, sin), strict=True
    ):
        assert actual.shape == expected.shape
        assert actual.transpose(1, 2).is_contiguous()
        close(actual, expected)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(("heads", "kv_heads", "dim"), [(4, 2, 16), (9, 3, 64), (5, 5, 20)])
def test_rotate_and_rotate_and_store_are_bit_identical_to_rotary(
    dtype: torch.dtype, heads: int, kv_heads: int, dim: int
) -> None:
    lengths = [4, 17, 33]
    keys, values, tables, positions = paged(len(lengths), kv_heads, dim, lengths, dtype)
    wide = randn(len(lengths), heads + kv_heads, dim, dtype=dtype)
    query, key, value = wide[:, :heads], wide[:, heads:], randn(len(lengths), kv_heads, dim, dtype=dtype)
    angle = torch.randn(len(lengths), dim // 2, device=DEVICE).repeat(1, 2)
    cos, sin = angle.cos().to(dtype), angle.sin().to(dtype)
    transposed = (x.transpose(0, 1)[None] for x in (query, key))
    expected = [x[0].transpose(0, 1) for x in kernels.rotary(*transposed, cos[None], sin[None])]
    assert torch.equal(kernels.rotate(query, cos, sin), expected[0])
    assert torch.equal(kernels.rotate(key, cos, sin), expected[1])
    caches = keys.clone(), values.clone()
    kernels.store_decoded(expected[1], value, keys, values, tables, positions, BLOCK)
    assert torch.equal(
        kernels.rotate_and_store(query, key, value, cos, sin, *caches, tables, positions, BLOCK), expected[0]
    )
    for actual, stored in zip(caches, (keys, values), strict=True):
        assert torch.equal(actual.nan_to_num(), stored.nan_to_num())


def gradients(function: Any, inputs: list[torch.Tensor], outward: list[torch.Tensor]) -> list[torch.Tensor]:
    leaves = [x.detach().clone().requires_grad_() for x in inputs]
    outputs = function(*leaves)
    torch.autograd.backward([outputs] if isinstance(outputs, torch.Tensor) else list(outputs), outward)
    return [leaf.grad for leaf in leaves if leaf.grad is not None]


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("gemma", [False, True])
@pytest.mark.parametrize("rows", [1, 7, 300])  # fewer and more rows than programs
def test_gradients_of_rms_norm(dtype: torch.dtype, gemma: bool, rows: int) -> None:
    x, weight, outward = randn(rows, 80, dtype=dtype), randn(80, dtype=dtype), randn(rows, 80, dtype=dtype)

    def plain(x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
        wide = x.float() * torch.rsqrt(x.float().pow(2).mean(-1, keepdim=True) + 1e-5)
        return (wide * (1 + weight.float()) if gemma else wide * weight.float()).to(x.dtype)

    actual = gradients(lambda x, w: differentiable.rms_norm(x, w, 1e-5, gemma), [x, weight], [outward])
    expected = gradients(plain, [x, weight], [outward])
    close(actual[0], expected[0])
    scale = rows**0.5  # the weight's gradient is a sum over rows
    close(actual[1] / scale, expected[1] / scale)


@pytest.mark.parametrize("dtype", DTYPES)
def test_gradients_of_silu_mul(dtype: torch.dtype) -> None:
    gate, up, outward = (randn(7, 1000, dtype=dtype) for _ in range(3))

    def plain(gate: torch.Tensor, up: torch.Tensor) -> torch.Tensor:
        return (torch.nn.functional.silu(gate.float()) * up.float()).to(gate.dtype)

    actual, expected = (gradients(f, [gate, up], [outward]) for f in (differentiable.silu_mul, plain))
    for a, b in zip(actual, expected, strict=True):
        close(a, b)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("turned", [False, True])  # gradients contiguous by head or by token
def test_gradients_of_rotary(dtype: torch.dtype, turned: bool) -> None:
    from transformers.models.llama.modeling_llama import apply_rotary_pos_emb

    query, key = (randn(1, 11, n, 20, dtype=dtype).transpose(1, 2) for n in (5, 2))
    outward = [randn(1, 11, n, 20, dtype=dtype).transpose(1, 2) for n in (5, 2)]
    outward = [g.contiguous() if turned else g for g in outward]
    angle = torch.randn(1, 11, 10, device=DEVICE).repeat(1, 1, 2)
    cos, sin = angle.cos().to(dtype), angle.sin().to(dtype)
    actual = gradients(lambda q, k: differentiable.rotary(q, k, cos, sin), [query, key], outward)
    expected = gradients(lambda q, k: apply_rotary_pos_emb(q, k, cos, sin), [query, key], outward)
    for a, b in zip(actual, expected, strict=True):
        assert a.shape == b.shape
        close(a, b)


@pytest.mark.slow
def test_fused_kernels_give_the_same_loss_and_gradients_as_plain_modules() -> None:
    """Loss and gradients of a trunk with fused norms and gates (on a GPU also rotary embeddings)."""
    from transformers import AutoModelForCausalLM

    model = AutoModelForCausalLM.from_config(tiny.CONFIGS["qwen3"]).to(DEVICE)
    fusion = Fusion(model.model, differentiable)
    # Per layer: two norms, query and key norms, a gate, and on a CPU also its activation; then the final norm.
    assert len(fusion.forwards) == 2 * (5 if GPU else 6) + 1
    assert len(fusion.functions) == 1
    ids = torch.randint(3, 80, (1, 18), device=DEVICE)

    def loss_and_gradients() -> tuple[torch.Tensor, dict[str, torch.Tensor]]:
        model.zero_grad()
        loss = model(input_ids=ids, labels=ids).loss
        loss.backward()
        return loss.detach(), {name: p.grad.clone() for name, p in model.named_parameters()}

    plain, expected = loss_and_gradients()
    with fusion.applied(steady=False):
        fused, actual = loss_and_gradients()
    torch.testing.assert_close(fused, plain, rtol=1e-5, atol=1e-5)
    for name, gradient in expected.items():
        torch.testing.assert_close(actual[name], gradient, rtol=1e-4, atol=1e-5 * gradient.abs().max().item() + 1e-7)


class Blocks(PagedBackend):
    """Only the KV cache: the test calls the trunk directly."""

    block_size = BLOCK
    rows = forward = decode = None  # type: ignore[assignment]


def close_rows(actual: torch.Tensor, expected: torch.Tensor) -> None:
    torch.testing.assert_close(actual, expected, rtol=1e-4, atol=1e-4 * float(expected.abs().max()))


@pytest.mark.slow
@pytest.mark.parametrize("family", ["llama", "qwen3"])
def test_lean_trunk_on_kernels_matches_the_module(family: str) -> None:
    """A packed prompt, selected rows of it, and one decoded token with the KV cache."""
    model = tiny.model(family).to(DEVICE)
    decoder = inspect(model)
    assert decoder.lean is not None
    lean = LeanTrunk(decoder.trunk, [layer.rule for layer in decoder.lean.layers], KernelOperations())
    assert lean.operations.compute(decoder.trunk, lean.replaced)
    ids = tiny.sequences(3, 2, 4, 9)  # few tokens, because the interpreter is slow
    decoder.lean = None  # rows of the module itself
    with torch.inference_mode():
        packed = pack(ids, DEVICE)
        expected = decoder.hidden(packed.input_ids, packed.position_ids, packed.layout)
        close_rows(lean.hidden(packed.input_ids, packed.position_ids, packed.layout), expected)
        last = torch.tensor([start + n - 1 for start, n in zip(packed.starts, packed.lengths, strict=True)])
        last = last.to(DEVICE)
        close_rows(lean.hidden(packed.input_ids, packed.position_ids, packed.layout, last), expected[last])
        # All tokens but the last of each sequence are prefilled into blocks, then the last ones are decoded.
        backend = Blocks(decoder)
        backend.open(3 * len(ids))
        tables = torch.randperm(3 * len(ids)).view(len(ids), 3).int()
        spans = [Span(s[:-1], 0, table, []) for s, table in zip(ids, tables.tolist(), strict=True)]
        step = backend.arrange(spans, [])
        lean.hidden(step.input_ids, step.position_ids, StoredLayout(step, backend.cache, decoder.device))
        tokens, positions = torch.tensor([(s[-1], len(s) - 1) for s in ids], device=DEVICE).T.contiguous()
        decoding = DecodeLayout(backend.cache, backend.block_size, tables.to(DEVICE), positions, splits=1)
        close_rows(lean.hidden(tokens[None], positions[None], decoding), expected[last])


def test_trunk_with_an_unsupported_gate_is_not_lean() -> None:
    trunk = tiny.model("llama", layers=1).to(DEVICE).model
    parts = [trunk.norm, *trunk.layers[0].children()]
    parts.remove(trunk.layers[0].self_attn)
    assert KernelOperations().compute(trunk, parts)
    trunk.layers[0].mlp.act_fn = torch.nn.GELU()
    assert not KernelOperations().compute(trunk, parts)


def paged(
    rows: int, kv_heads: int, dim: int, lengths: list[int], dtype: torch.dtype
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]:
    """Caches with NaN in unused slots, and block tables with scattered blocks."""
    size, blocks_per_row = BLOCK, -(-max(lengths) // BLOCK)
    keys, values = (
        torch.full((rows * blocks_per_row * size, kv_heads, dim), float("nan"), device=DEVICE) for _ in range(2)
    )
    tables = torch.randperm(rows * blocks_per_row, device=DEVICE).view(rows, blocks_per_row).int()
    for row, length in enumerate(lengths):
        for i in range(length):
            slot = int(tables[row, i // size]) * size + i % size
            keys[slot], values[slot] = torch.randn(2, kv_heads, dim, device=DEVICE)
    positions = torch.tensor(lengths, device=DEVICE) - 1
    return keys.to(dtype), values.to(dtype), tables, positions


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("splits", [1, 3])
@pytest.mark.parametrize(
    ("heads", "kv_heads", "dim", "options"),
    [
        (4, 2, 16, {}),
        (3, 1, 20, {"window": 9}),
        (4, 4, 32, {"softcap": 5.0}),
        (6, 2, 16, {"sinks": True}),
        (4, 2, 16, {"window": 20, "softcap": 5.0, "sinks": True}),
    ],
)
def test_decode_attention(
    dtype: torch.dtype, splits: int, heads: int, kv_heads: int, dim: int, options: dict[str, object]
) -> None:
    lengths = [1, 5, 16, 17, 130]
    keys, values, tables, positions = paged(len(lengths), kv_heads, dim, lengths, dtype)
    query = randn(len(lengths), heads, dim, dtype=dtype)
    sinks = randn(heads) if options.get("sinks") else None
    window, softcap = options.get("window"), options.get("softcap")
    actual = kernels.decode_attention(
        query, keys, values, tables, positions, BLOCK, scale=0.3, splits=splits, sinks=sinks, window=window,
        softcap=softcap,
    )  # fmt: skip
    for row, length in enumerate(lengths):
        first = max(0, length - window) if isinstance(window, int) else 0
        slots = [int(tables[row, i // BLOCK]) * BLOCK + i % BLOCK for i in range(first, length)]
        k, v = (x[slots].float().repeat_interleave(heads // kv_heads, 1) for x in (keys, values))
        scores = torch.einsum("hd,nhd->hn", query[row].float(), k) * 0.3
        if isinstance(softcap, float):
            scores = softcap * torch.tanh(scores / softcap)
        if sinks is not None:
            scores = torch.cat([scores, sinks[:, None]], 1)
        weights = scores.softmax(-1)[:, : len(slots)]
        close(actual[row], torch.einsum("hn,nhd->hd", weights, v).to(dtype))


@pytest.mark.parametrize("dtype", DTYPES[-1:])  # on a GPU it is used in half precision only
@pytest.mark.parametrize(
    ("window", "softcap", "sunk"),
    mostly_slow([(7, 2.0, True), (None, None, False), (7, None, False), (None, 2.0, True)]),
)
@pytest.mark.parametrize("scattered", [False, True])
@pytest.mark.parametrize(("heads", "kv_heads", "dim"), [(4, 2, 16), (3, 1, 20)])
def test_varlen_attention(
    dtype: torch.dtype, window: int | None, scattered: bool, heads: int, kv_heads: int, dim: int,
    softcap: float | None, sunk: bool,
) -> None:  # fmt: skip
    sinks = randn(heads, dtype=dtype) if sunk else None
    new, before = [1, 5, 200, 64], ([3, 0, 70, 0] if scattered else [0, 0, 0, 0])
    totals = [a + b for a, b in zip(new, before, strict=True)]
    query = randn(sum(new), heads, dim, dtype=dtype)
    keys, values = (randn(sum(totals) + 9, kv_heads, dim, dtype=dtype) for _ in range(2))
    rows = torch.randperm(sum(totals) + 9, device=DEVICE)[: sum(totals)] if scattered else None
    ends = [torch.tensor([0, *counts], device=DEVICE).cumsum(0).int() for counts in (new, totals)]
    tiles = torch.from_numpy(kernels.query_tiles(new)).to(DEVICE)
    spans = (ends[0], ends[1][:-1], ends[1].diff())
    sums = torch.full((heads, sum(new)), float("nan"), device=DEVICE)
    actual = kernels.varlen_attention(
        query, keys, values, *spans, tiles, scale=0.3, window=window, key_rows=rows, softcap=softcap, sinks=sinks,
        sums=sums,
    )  # fmt: skip
    for i, (count, total) in enumerate(zip(new, totals, strict=True)):
        slots = torch.arange(int(ends[1][i]), int(ends[1][i + 1]), device=DEVICE)
        slots = slots if rows is None else rows[slots]
        k, v = (x[slots].float().repeat_interleave(heads // kv_heads, 1) for x in (keys, values))
        q = query[int(ends[0][i]) : int(ends[0][i + 1])].float()
        position = torch.arange(total - count, total, device=DEVICE)[:, None]
        key = torch.arange(total, device=DEVICE)[None]
        visible = key <= position
        if window is not None:
            visible &= key > position - window
        scores = torch.einsum("qhd,khd->hqk", q, k) * 0.3
        if softcap is not None:
            scores = softcap * torch.tanh(scores / softcap)
        scores = scores.masked_fill(~visible, float("-inf"))
        if sinks is not None:
            scores = torch.cat([scores, sinks.float()[:, None, None].expand(-1, count, 1)], -1)
        expected = torch.einsum("hqk,khd->qhd", scores.softmax(-1)[..., :total], v).to(dtype)
        logs = sums[:, int(ends[0][i]) : int(ends[0][i + 1])]
        torch.testing.assert_close(logs, scores.logsumexp(-1), atol=2e-2 if dtype != torch.float32 else 1e-4, rtol=1e-3)
        close(actual[int(ends[0][i]) : int(ends[0][i + 1])], expected)


def test_softcapped_attention_kernel_matches_plain_attention_gradients() -> None:
    """Values come from the kernel, gradients from plain attention. In float16: the kernel is for half precision."""
    spans, rows = [(0, 9, 0), (9, 30, 0)], [np.arange(9), np.arange(9, 39)]
    grouped = grouped_layout(spans, rows, DEVICE)
    layout = VarlenLayout(spans, rows, DEVICE, lambda: grouped)
    rule = Rule(softcap=2.0, window=20, scale=0.3)
    inputs = [randn(39, n, 16).half().requires_grad_() for n in (4, 2, 2)]
    grad = randn(39, 4, 16).half()
    out = layout.attend(0, *inputs, rule)
    with torch.no_grad():
        assert torch.equal(out, layout.attend(0, *inputs, rule))
    expected = grouped.attend(0, *inputs, rule)
    torch.testing.assert_close(out, expected, atol=2e-3, rtol=2e-3)
    for actual_gradient, expected_gradient in zip(
        torch.autograd.grad(out, inputs, grad), torch.autograd.grad(expected, inputs, grad), strict=True
    ):
        assert torch.equal(actual_gradient, expected_gradient)


def test_store_decoded_writes_only_one_token_per_row() -> None:
    keys, values, tables, positions = paged(3, 2, 16, [4, 17, 33], torch.float32)
    before = keys.clone(), values.clone()
    key, value = randn(3, 2, 16), randn(3, 2, 16)
    kernels.store_decoded(key, value, keys, values, tables, positions, BLOCK)
    for row in range(3):
        position = int(positions[row])
        slot = int(tables[row, position // BLOCK]) * BLOCK + position % BLOCK
        assert torch.equal(keys[slot], key[row])
        assert torch.equal(values[slot], value[row])
        before[0][slot], before[1][slot] = key[row], value[row]
    assert torch.equal(keys.nan_to_num(), before[0].nan_to_num())
    assert torch.equal(values.nan_to_num(), before[1].nan_to_num())


@pytest.mark.parametrize("vocabulary", [18, 5000])
def test_sample_kernel_matches_the_cpu_sampler(vocabulary: int) -> None:
    temperatures = [1.0, 0.7, 0.0, 2.0, 1.0]
    rows = len(temperatures)
    sampler = Sampler(
        [SamplingParams(temperature=t) for t in temperatures], [row_key(9, i) for i in range(rows)],
        [frozenset()] * rows, token_hashes(vocabulary, torch.device(DEVICE)),
    )  # fmt: skip
    tokens, positions, draws = (
        torch.tensor(x, device=DEVICE) for x in ([3] * rows, [10, 20, 30, 40, 50], [0, 1, 2, 3, 4])
    )
    remaining, alive = torch.tensor([9, 9, 9, 1, 9], device=DEVICE), torch.ones(rows, dtype=torch.bool, device=DEVICE)
    outputs = (
        torch.zeros(2, rows, dtype=torch.int64, device=DEVICE), torch.zeros(2, rows, device=DEVICE),
        torch.zeros(2, rows, device=DEVICE), torch.zeros(2, rows, dtype=torch.bool, device=DEVICE),
        torch.zeros(2, rows, device=DEVICE),
    )  # fmt: skip
    step = torch.zeros((), dtype=torch.int64, device=DEVICE)
    inverse = sampler.inverse[:, 0].contiguous()
    expected_draws, logits = draws.clone(), [randn(rows, vocabulary) * 3 for _ in range(2)]
    first = sampler.draw(logits[0], expected_draws)
    stops = torch.full((rows, 2), -1, device=DEVICE)
    stops[0, 1] = first.tokens[0]
    for step_logits in logits:
        state = (tokens, positions, draws, remaining, alive)
        kernels.sample(step_logits, sampler.keys, inverse, sampler.greedy, state, stops, step, outputs)
        step += 1
    assert torch.equal(outputs[0][0], first.tokens)
    torch.testing.assert_close(outputs[1][0], first.logprobs, rtol=1e-4, atol=1e-5)
    torch.testing.assert_close(outputs[2][0], first.raw_logprobs, rtol=1e-4, atol=1e-5)
    # row 0 stopped, row 3 had one token left: neither advances
    assert alive.tolist() == [False, True, True, False, True]
    assert outputs[3].tolist() == [[True] * 5, [False, True, True, False, True]]
    assert positions.tolist() == [10, 22, 32, 40, 52]
    assert draws.tolist() == [0, 3, 4, 3, 6]
    assert remaining.tolist() == [9, 7, 7, 1, 7]
    second = sampler.draw(logits[1], torch.tensor([0, 2, 3, 3, 5], device=DEVICE))
    for row in (1, 2, 4):
        assert outputs[0][1, row] == second.tokens[row] == tokens[row]


def _truncated(vocabulary: int, options: list[SamplingParams], logits: torch.Tensor) -> None:
    rows = len(options)
    sampler = Sampler(
        options, [row_key(9, i) for i in range(rows)], [frozenset()] * rows,
        token_hashes(vocabulary, torch.device(DEVICE)),
    )  # fmt: skip
    draws = torch.arange(rows, device=DEVICE)
    expected = sampler.draw(logits, draws)
    kept = sampler._shaped(logits, draws) > float("-inf")
    truncation = kernels.Truncation(rows, vocabulary, torch.device(DEVICE))
    truncation.load(sampler.filtered, sampler.top_k[:, 0], sampler.top_p[:, 0], sampler.min_p[:, 0])
    inverse = sampler.inverse[:, 0].contiguous()
    truncation.find(logits, inverse)
    for row, cut in enumerate(truncation.cuts.tolist()):
        assert truncated_ids(logits[row] * inverse[row], cut) == set(kept[row].nonzero()[:, 0].tolist()), row
    zeros = torch.zeros(rows, dtype=torch.int64, device=DEVICE)
    state = (zeros.clone(), zeros.clone(), draws, zeros + 9, torch.ones(rows, dtype=torch.bool, device=DEVICE))
    outputs = (
        torch.zeros(1, rows, dtype=torch.int64, device=DEVICE), torch.zeros(1, rows, device=DEVICE),
        torch.zeros(1, rows, device=DEVICE), torch.zeros(1, rows, dtype=torch.bool, device=DEVICE),
        torch.zeros(1, rows, device=DEVICE),
    )  # fmt: skip
    step, stops = torch.zeros((), dtype=torch.int64, device=DEVICE), torch.full((rows, 2), -1, device=DEVICE)
    kernels.sample(logits, sampler.keys, inverse, sampler.greedy, state, stops, step, outputs, truncation)
    assert torch.equal(outputs[0][0], expected.tokens)
    torch.testing.assert_close(outputs[1][0], expected.logprobs, rtol=1e-4, atol=1e-5)
    torch.testing.assert_close(outputs[2][0], expected.raw_logprobs, rtol=1e-4, atol=1e-5)
    torch.testing.assert_close(outputs[4][0], expected.tempered, rtol=1e-4, atol=1e-5)


def truncated_ids(shaped: torch.Tensor, cut: int) -> set[int]:
    """The token ids that a cut keeps, by its definition."""
    bits = (shaped + 0.0).cpu().numpy().view(np.int32).astype(np.int64)
    keys = (np.where(bits >= 0, bits, bits ^ 0x7FFFFFFF) << 32) | (0xFFFFFFFF - np.arange(len(bits)))
    return set(np.flatnonzero(keys >= cut).tolist())


@pytest.mark.parametrize("vocabulary", [9000, 4097])
def test_sampling_in_blocks_of_logits_matches_one_program_per_row(
    vocabulary: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    rows = 4
    logits = randn(rows, vocabulary) * 3
    logits[1] = logits[1].sort().values  # the maximum increases from block to block
    logits[2, 4000:-1] = float("-inf")
    logits[3, 7] = logits[3, 4096] = 40.0  # a tie: the first one is chosen
    keys = torch.arange(rows, device=DEVICE)
    inverse = torch.tensor([1.0, 1 / 0.7, 1.0, 0.5], device=DEVICE)
    greedy = torch.tensor([False, False, False, True], device=DEVICE)
    stops = torch.full((rows, 2), -1, device=DEVICE)
    results = []
    for limit in (sampling.FEW, 0):
        monkeypatch.setattr(sampling, "FEW", limit)
        state = (
            *(torch.full((rows,), n, device=DEVICE) for n in (3, 10, 0, 9)),
            torch.ones(rows, device=DEVICE).bool(),
        )
        token_ids, logprobs = (
            torch.zeros(1, rows, dtype=torch.int64, device=DEVICE),
            torch.zeros(3, 1, rows, device=DEVICE),
        )
        outputs = (
            token_ids,
            logprobs[0],
            logprobs[1],
            torch.zeros(1, rows, dtype=torch.bool, device=DEVICE),
            logprobs[2],
        )
        kernels.sample(
            logits, keys, inverse, greedy, state, stops, torch.zeros((), dtype=torch.int64, device=DEVICE), outputs
        )
        results.append([*state, *outputs])
    assert all(torch.equal(a, b) for a, b in zip(*results, strict=True))
    assert results[0][5][0, 3] == 7
    assert torch.isfinite(logprobs).all()


OPTIONS = [
    SamplingParams(temperature=0.7, top_k=20, top_p=0.95), SamplingParams(top_p=0.9), SamplingParams(),
    SamplingParams(top_p=0.6, min_p=0.3), SamplingParams(min_p=0.4), SamplingParams(top_k=70, top_p=0.8),
    SamplingParams(temperature=0), SamplingParams(top_k=80, top_p=0.9, min_p=0.05),
    SamplingParams(top_p=0.97, min_p=1e-4), SamplingParams(top_p=0.99, min_p=0.9), SamplingParams(top_k=1),
    SamplingParams(top_p=0.3, min_p=0.01), SamplingParams(min_p=1.0),
    SamplingParams(top_k=100, min_p=0.9), SamplingParams(top_k=64), SamplingParams(top_k=65),
    SamplingParams(temperature=1.7, top_p=0.99, top_k=10**6),
]  # fmt: skip


@pytest.mark.parametrize("vocabulary", [203, 1003, 50_000] if GPU else [203])
@pytest.mark.parametrize("spread", [0.05, 3.0])
def test_truncated_sampling_matches_the_cpu_sampler(vocabulary: int, spread: float) -> None:
    """Flat rows, which keep many tokens, and peaked rows."""
    options = OPTIONS if GPU else OPTIONS[:6]  # in the interpreter, keeping many tokens takes seconds
    _truncated(vocabulary, options, randn(len(options), vocabulary) * spread)


@pytest.mark.parametrize("top_k", [5, 90] if GPU else [5])
def test_ties_at_the_truncation_cut_keep_the_lower_token_ids(top_k: int) -> None:
    logits = torch.zeros(4, 203, device=DEVICE)
    logits[1, ::3] = 1.0
    logits[2] = float("-inf")
    logits[2, 10:200] = -0.0
    logits[3, 150:] = 2.0
    options = [SamplingParams(top_k=top_k), SamplingParams(top_k=top_k, top_p=0.6), SamplingParams(top_k=top_k)]
    _truncated(203, [*options, SamplingParams(top_p=0.5)], logits)


@pytest.mark.skipif(not GPU, reason="no CUDA device")
def test_kernels_ran_on_the_gpu_and_not_in_the_interpreter() -> None:
    assert os.environ.get("TRITON_INTERPRET") != "1", f"{sys.executable} in {Path.cwd()} is interpreting"


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(("columns", "inner"), [(16, 96), (40, 1200), (100, 513), (150, 70)])
def test_fixed_order_matmul_rows_are_bit_identical_in_any_batch(dtype: torch.dtype, columns: int, inner: int) -> None:
    x, weight, bias = randn(70, inner, dtype=dtype), randn(columns, inner, dtype=dtype), randn(columns, dtype=dtype)
    many = product_kernel.fixed_order_product(x, weight, bias)
    close(many / inner**0.5, torch.nn.functional.linear(x.float(), weight.float(), bias.float()) / inner**0.5)
    for count in (1, 7, 40):
        assert torch.equal(product_kernel.fixed_order_product(x[:count], weight, bias), many[:count])


@pytest.mark.parametrize(("columns", "inner", "rows"), [(16, 96, 1), (40, 1200, 16), (2100, 300, 40), (150, 70, 64)])
def test_few_row_matmul_rows_are_bit_identical_in_any_batch(columns: int, inner: int, rows: int) -> None:
    x, weight, bias = randn(rows, inner, dtype=HALF), randn(columns, inner, dtype=HALF), randn(columns, dtype=HALF)
    for added in (None, bias):
        few = product_kernel.few_rows_product(x, weight, added)
        expected = torch.nn.functional.linear(x.float(), weight.float(), None if added is None else added.float())
        close(few / inner**0.5, expected / inner**0.5)
        for count in {(rows + 1) // 2, 1 if GPU else rows}:  # numpy's sums depend on the size of a tile
            assert torch.equal(product_kernel.few_rows_product(x[:count], weight, added), few[:count])


@pytest.mark.parametrize(("inner", "widths", "rows"), [(96, (40, 16, 70), 3), (300, (33, 130), 64), (520, (90,), 20)])
def test_few_row_matmuls_in_one_launch_match_each_weight_alone(inner: int, widths: tuple[int, ...], rows: int) -> None:
    x = randn(rows, inner, dtype=HALF)
    weights, biases = ([randn(*shape, dtype=HALF) for shape in shapes] for shapes in
                       ([(width, inner) for width in widths], [(width,) for width in widths]))  # fmt: skip
    for added in (None, biases):
        outs = product_kernel.few_rows_products(x, weights, added)
        for i, (out, weight) in enumerate(zip(outs, weights, strict=True)):
            bias = None if added is None else added[i].float()
            close(out / inner**0.5, torch.nn.functional.linear(x.float(), weight.float(), bias) / inner**0.5)
    small = [weight / inner**0.5 for weight in (weights[0], weights[0].flip(0))]
    gated = product_kernel.few_rows_gated(x, *small)
    close(gated, kernels.silu_mul(*(product_kernel.few_rows_product(x, weight, None) for weight in small)))


@pytest.mark.parametrize("dtype", DTYPES)
def test_query_and_key_norms_in_one_launch_are_bit_identical_to_separate_norms(dtype: torch.dtype) -> None:
    query, key = randn(5, 6, 80, dtype=dtype), randn(5, 2, 80, dtype=dtype)
    weights = randn(80, dtype=dtype), randn(80, dtype=dtype)
    normed = kernels.rms_norm_both((query, key), weights, (1e-5, 1e-6))
    assert torch.equal(normed[0], kernels.rms_norm(query, weights[0], 1e-5))
    assert torch.equal(normed[1], kernels.rms_norm(key, weights[1], 1e-6))


@pytest.mark.parametrize("dtype", DTYPES)
def test_norms_of_many_short_rows_are_bit_identical_to_few_rows(
    dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch
) -> None:
    x, weight = randn(35, 80, dtype=dtype), randn(80, dtype=dtype)
    few = kernels.rms_norm(x, weight, 1e-5)
    monkeypatch.setattr(pointwise, "MANY_ROWS", len(x))
    assert torch.equal(kernels.rms_norm(x, weight, 1e-5), few)
