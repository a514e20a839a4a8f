"""Norms and rotary embeddings of a CPU learner: values match the modules, gradients match finite differences."""

from __future__ import annotations

import copy

import pytest
import torch
from torch.autograd import gradcheck
from transformers import AutoModelForCausalLM
from transformers.models.gemma.modeling_gemma import GemmaRMSNorm
from transformers.models.llama.modeling_llama import LlamaRMSNorm, apply_rotary_pos_emb

from plaudit.core.model import fused, operations
from plaudit.core.model.packing import hidden_rows, pack, use_packed_attention
from tests.core import tiny


@pytest.mark.parametrize("gemma", [False, True])
def test_rms_norm_matches_modules_and_finite_differences(gemma: bool) -> None:
    norm = (GemmaRMSNorm if gemma else LlamaRMSNorm)(12, eps=1e-5)
    torch.nn.init.normal_(norm.weight)
    x = torch.randn(2, 5, 12)
    torch.testing.assert_close(operations.rms_norm(x, norm.weight, 1e-5, gemma), norm(x))
    wide = x.double().requires_grad_()
    weight = norm.weight.detach().double().requires_grad_()
    assert gradcheck(lambda x, w: operations.rms_norm(x, w, 1e-5, gemma), (wide, weight))


def test_rotary_matches_transformers_and_finite_differences() -> None:
    query, key = (torch.randn(1, 5, heads, 8).transpose(1, 2) for heads in (4, 2))
    angle = torch.randn(1, 5, 4).repeat(1, 1, 2)
    cos, sin = angle.cos(), angle.sin()
    expected = apply_rotary_pos_emb(query, key, cos, sin)
    for actual, reference in zip(operations.rotary(query, key, cos, sin), expected, strict=True):
        torch.testing.assert_close(actual, reference)
    wide = [x.double().requires_grad_() for x in (query, key)]
    assert gradcheck(lambda q, k: operations.rotary(q, k, cos.double(), sin.double()), wide)


@pytest.mark.parametrize("family", ["llama", "qwen3", "gemma2", "olmo2"])
def test_fused_trunk_has_the_same_rows_and_gradients_as_the_plain_one(family: str) -> None:
    module = AutoModelForCausalLM.from_config(copy.deepcopy(tiny.CONFIGS[family]))
    use_packed_attention(module)
    packed = pack([[3, 4, 5, 6, 7], [8, 9, 10]], lone=False)
    fusion = fused._fusion(module)
    assert fusion is not None
    assert fusion.forwards
    assert fusion.functions

    def rows_and_gradients(rows: torch.Tensor) -> list[torch.Tensor]:
        module.zero_grad()
        weights = torch.randn(rows.shape, generator=torch.Generator().manual_seed(1))
        (rows * weights).sum().backward()
        return [rows.detach(), *(p.grad for p in module.model.parameters() if p.grad is not None)]

    actual, expected = (
        rows_and_gradients(fused.fused_rows(module, packed)),
        rows_and_gradients(hidden_rows(module, packed)),
    )
    assert len(actual) == len(expected) > 10
    for a, b in zip(actual, expected, strict=True):
        torch.testing.assert_close(a, b, rtol=1e-4, atol=1e-5 * b.abs().max().item() + 1e-7)
