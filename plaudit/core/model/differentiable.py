"""Fused kernels of norms, gates, rotary embeddings and experts, with backward passes where gradients are needed.

They save only their inputs for the backward pass; plain modules also save their intermediate results.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.autograd.function import Function

from plaudit.core import kernels
from plaudit.core.kernels import Routes
from plaudit.core.model.operations import with_gradients_of


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


class _ExpertProduct(Function):
    @staticmethod
    def forward(
        ctx: Any, x: Tensor, weight: Tensor, bias: Tensor | None, routes: Routes, per: int, to_pairs: bool
    ) -> Tensor:
        ctx.save_for_backward(x, weight, bias)
        ctx.routes, ctx.per, ctx.to_pairs = routes, per, to_pairs
        return kernels.expert_product(x, weight, bias, routes, per, to_pairs)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, Tensor | None, Tensor | None, None, None, None]:
        (x, weight, bias), routes, per, by_pair = ctx.saved_tensors, ctx.routes, ctx.per, int(ctx.to_pairs)
        dx = dweight = dbias = None
        if ctx.needs_input_grad[0]:
            dx = kernels.expert_product(grad, weight.transpose(1, 2), None, routes, by_pair, to_pairs=per > 0)
            if per > 1:
                dx = kernels.combined(dx, None, per)
        if ctx.needs_input_grad[1]:
            dweight = kernels.weight_gradient(x, grad, routes, per, by_pair)
        if bias is not None and ctx.needs_input_grad[2]:  # as a matrix product: its sums have one fixed order
            places = torch.arange(len(routes.order), device=grad.device)
            experts = torch.searchsorted(routes.ends, places, right=True)
            chosen = F.one_hot(experts, len(routes.ends)).to(grad.dtype)
            dbias = chosen.T @ (grad[routes.order.long()] if by_pair else grad)
        return dx, dweight, dbias, None, None, None


class _Combined(Function):
    @staticmethod
    def forward(ctx: Any, y: Tensor, weights: Tensor) -> Tensor:
        ctx.save_for_backward(y, weights)
        return kernels.combined(y, weights, weights.shape[1])

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, Tensor]:
        y, weights = ctx.saved_tensors
        by_choice = y.view(*weights.shape, -1)
        dy = (grad[:, None] * weights[..., None]).to(y.dtype).view(y.shape)
        return dy, (by_choice * grad[:, None]).sum(-1, dtype=torch.float32).to(weights.dtype)


class _SoftmaxTop(Function):
    @staticmethod
    def forward(ctx: Any, logits: Tensor, choices: int, normed: bool, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
        values, ids = kernels.softmax_top(logits, choices, normed, dtype)
        ctx.save_for_backward(logits, ids)
        ctx.normed = normed
        ctx.mark_non_differentiable(ids)
        return values, ids

    @staticmethod
    def backward(ctx: Any, grad: Tensor, _: Any) -> tuple[Tensor, None, None, None]:
        logits, ids = ctx.saved_tensors
        likely, grad = logits.float().softmax(-1), grad.float()
        if ctx.normed:
            taken = likely.gather(1, ids)
            total = taken.sum(1, keepdim=True)
            grad = (grad - (grad * taken).sum(1, keepdim=True) / total) / total
        through = torch.zeros_like(likely).scatter(1, ids, grad)
        dlogits = likely * (through - (through * likely).sum(1, keepdim=True))
        return dlogits.to(logits.dtype), None, None, None


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


def experts(module: Any, silu: bool, x: Tensor, ids: Tensor, weights: Tensor) -> Tensor:
    """The output of a mixture's experts (all weights in one tensor) for x (tokens, hidden), the experts `ids` and their
    weights (tokens, choices). `silu`: the module's gate is silu(first half) * second half."""
    names = ("gate_up_proj" if module.has_gate else "up_proj", "down_proj")
    (first, bias), (down, down_bias) = (
        (getattr(module, name), getattr(module, f"{name}_bias") if module.has_bias else None) for name in names
    )
    if module.is_transposed:
        first, down = first.transpose(1, 2), down.transpose(1, 2)
    routes, choices = kernels.routes(ids, first.shape[0], getattr(module, "_is_expert_parallel", False)), ids.shape[1]
    if silu and bias is None and not _wanted(x, first):
        inner = kernels.expert_product(x, first, None, routes, choices, gated=True)
    else:
        inner = _expert_product(x, first, bias, routes, choices, False)
        if silu:
            inner = silu_mul(*inner.chunk(2, -1))
        else:
            inner = module._apply_gate(inner) if module.has_gate else module.act_fn(inner)
    y = _expert_product(inner, down, down_bias, routes, 0, True)
    if not _wanted(y, weights):
        return kernels.combined(y, weights, choices)
    out: Tensor = _Combined.apply(y, weights)  # type: ignore[no-untyped-call]
    return out


def _expert_product(x: Tensor, weight: Tensor, bias: Tensor | None, routes: Routes, per: int, to_pairs: bool) -> Tensor:
    if not _wanted(x, weight, *([] if bias is None else [bias])):
        return kernels.expert_product(x, weight, bias, routes, per, to_pairs)
    y: Tensor = _ExpertProduct.apply(x, weight, bias, routes, per, to_pairs)  # type: ignore[no-untyped-call]
    return y


def softmax_top(logits: Tensor, choices: int, normed: bool, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    if not _wanted(logits):
        return kernels.softmax_top(logits, choices, normed, dtype)
    values, ids = _SoftmaxTop.apply(logits, choices, normed, dtype)  # type: ignore[no-untyped-call]
    return values, ids


def gated_norm(module: Any, epsilon: float, how: str, parts: int, x: Tensor, gate: Tensor) -> Tensor:
    """As `kernels.rms_norm` with a gate, over equal groups of a row."""
    weight = module.weight.view(parts, -1)

    def fused(x: Tensor, gate: Tensor, weight: Tensor) -> Tensor:
        return kernels.rms_norm(x, weight, epsilon, gate=gate, how=how)

    def original(x: Tensor, gate: Tensor, weight: Tensor) -> Tensor:
        wide, gate = (each.float().view(*each.shape[:-1], *weight.shape) for each in (x, gate))
        if how == "first":
            wide = wide * F.silu(gate)
        normed = wide * torch.rsqrt(wide.pow(2).mean(-1, keepdim=True) + epsilon)
        if how == "silu":
            normed = weight * normed.to(x.dtype) * F.silu(gate)
        else:
            normed = weight * normed * gate.sigmoid() if how == "sigmoid" else weight * normed
        return normed.view(x.shape).to(x.dtype)

    return with_gradients_of(original, fused, x, gate, weight) if _wanted(x, gate, weight) else fused(x, gate, weight)


def delta_rule(
    original: Callable[..., Any], query: Tensor, key: Tensor, value: Tensor, decay: Tensor, beta: Tensor,
    state: Tensor | None, norm: bool,
) -> tuple[Tensor, Tensor | None]:  # fmt: skip
    """As `original`, a transformers function; a state that is passed is updated in place."""
    inputs = (query, key, value, decay, beta)
    if state is None:
        state = _no_state(value, key.shape[-1], value.shape[-1])
    if not _wanted(*inputs):
        return kernels.delta_rule(*inputs, state, norm), state

    def fused(query: Tensor, key: Tensor, value: Tensor, decay: Tensor, beta: Tensor) -> Tensor:
        return kernels.delta_rule(query, key, value, decay, beta, state, norm)

    def plain(query: Tensor, key: Tensor, value: Tensor, decay: Tensor, beta: Tensor) -> Tensor:
        out: Tensor = original(query, key, value, g=decay, beta=beta, use_qk_l2norm_in_kernel=norm)[0]
        return out

    return with_gradients_of(plain, fused, *inputs), None


def _no_state(value: Tensor, *sizes: int) -> Tensor:
    rows, _, heads, _ = value.shape
    return torch.zeros(rows, heads, *sizes, device=value.device)


def state_space(
    original: Callable[..., Tensor], inputs: Sequence[Tensor], state: Tensor | None, limits: tuple[float, float]
) -> tuple[Tensor, Tensor | None]:  # fmt: skip
    """As `original`, with the inputs of `kernels.state_space`; a state that is passed is updated in place."""
    if state is None:
        value, key = inputs[0], inputs[3]
        state = _no_state(value, value.shape[-1], key.shape[-1])

    def fused(*inputs: Tensor) -> Tensor:
        return kernels.state_space(*inputs, state, limits)  # type: ignore[call-arg, arg-type]

    return (with_gradients_of(original, fused, *inputs), None) if _wanted(*inputs) else (fused(*inputs), state)


def convolution(
    original: Callable[..., Tensor], x: Tensor, weight: Tensor, bias: Tensor | None, activation: str | None
) -> Tensor:  # fmt: skip
    """As `original`, a transformers function, for whole sequences."""
    inputs = (x, weight) if bias is None else (x, weight, bias)
    if not _wanted(*inputs):
        return kernels.convolution(x, weight, bias, activation is not None)

    def fused(x: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
        return kernels.convolution(x, weight, bias, activation is not None)

    def plain(x: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
        return original(x, weight, bias, activation=activation)

    return with_gradients_of(plain, fused, *inputs)


def _wanted(*inputs: Tensor) -> bool:
    return torch.is_grad_enabled() and any(x.requires_grad for x in inputs)


MIXTURE: Mapping[str, Callable[..., Any]] = {"experts": experts, "router": softmax_top}
# By their transformers names.
RECURRENT: Mapping[str, Callable[..., Any]] = {
    "torch_recurrent_gated_delta_rule": delta_rule, "torch_chunk_gated_delta_rule": delta_rule,
    "recurrent_kimi_delta_attention": delta_rule, "chunk_kimi_delta_attention": delta_rule,
    "mamba2_selective_state_update": kernels.state_space, "mamba2_chunk_scan": state_space,
    "causal_conv1d_update": kernels.convolution_step, "causal_conv1d_fn": convolution, "gated norm": gated_norm,
}  # fmt: skip
