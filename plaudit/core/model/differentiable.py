"""The fused kernels of norms, gates and rotary embeddings, with their backward passes where gradients are wanted.

They keep for backward what they were given and nothing else; plain modules keep what they computed on the way too.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import Function

from plaudit.core import kernels

# By the names that transformers has for single tokens of recurrent layers.
STATE_STEPS: Mapping[str, Callable[..., Any]] = {
    "torch_recurrent_gated_delta_rule": kernels.delta_step, "causal_conv1d_update": kernels.convolution_step
}  # fmt: skip


class _RmsNorm(Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, epsilon: float, gemma: bool) -> Tensor:
        ctx.save_for_backward(x, weight)
        ctx.epsilon, ctx.gemma = epsilon, gemma
        return kernels.rms_norm(x, weight, epsilon, gemma)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, Tensor, None, None]:
        x, weight = ctx.saved_tensors
        return *kernels.rms_norm_backward(x, weight, grad, ctx.epsilon, ctx.gemma), None, None


class _SiluMul(Function):
    @staticmethod
    def forward(ctx: Any, gate: Tensor, up: Tensor) -> Tensor:
        ctx.save_for_backward(gate, up)
        return kernels.silu_mul(gate, up)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, Tensor]:
        gate, up = ctx.saved_tensors
        return kernels.silu_mul_backward(gate, up, grad)


class _Rotary(Function):
    @staticmethod
    def forward(ctx: Any, query: Tensor, key: Tensor, cos: Tensor, sin: Tensor) -> tuple[Tensor, Tensor]:
        ctx.save_for_backward(cos, sin)
        return kernels.rotary(query, key, cos, sin)

    @staticmethod
    def backward(ctx: Any, query: Tensor, key: Tensor) -> tuple[Tensor, Tensor, None, None]:
        cos, sin = ctx.saved_tensors
        query, key = (grad if grad.stride(-1) == 1 else grad.contiguous() for grad in (query, key))
        return *kernels.rotary(query, key, cos, sin, back=True), None, None


def rms_norm(x: Tensor, weight: Tensor, epsilon: float, gemma: bool = False) -> Tensor:
    if not _wanted(x, weight):
        return kernels.rms_norm(x, weight, epsilon, gemma)
    y: Tensor = _RmsNorm.apply(x, weight, epsilon, gemma)  # type: ignore[no-untyped-call]
    return y


def silu_mul(gate: Tensor, up: Tensor) -> Tensor:
    if not _wanted(gate, up):
        return kernels.silu_mul(gate, up)
    y: Tensor = _SiluMul.apply(gate, up)  # type: ignore[no-untyped-call]
    return y


def rotary(query: Tensor, key: Tensor, cos: Tensor, sin: Tensor) -> tuple[Tensor, Tensor]:
    if not _wanted(query, key):
        return kernels.rotary(query, key, cos, sin)
    rotated: tuple[Tensor, Tensor] = _Rotary.apply(query, key, cos, sin)  # type: ignore[no-untyped-call]
    return rotated


def _wanted(*inputs: Tensor) -> bool:
    return torch.is_grad_enabled() and any(x.requires_grad for x in inputs)
