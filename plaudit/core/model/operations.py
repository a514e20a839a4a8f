"""The operations between the matrix products, in plain torch: used by a lean trunk (on a GPU:
`device/kernel_operations.py`) and by a learner on a CPU (on a GPU: `differentiable.py`), with backward passes that
read the rows half as often as autograd does with the modules' own steps."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.autograd.function import Function, once_differentiable

LANES = 64  # a multiple of every CPU's vector width: two AVX-512 vectors are 32 numbers
# Torch splits a tensor among threads in blocks of this many numbers; gelu among all threads from 16,384 numbers on.
GRAIN, FEWEST = 32768, 16384
MANY_ROWS = 256  # up to here one more call costs more than copying queries and keys into one tensor
RECURRENT: Mapping[str, Callable[..., Any]] = {}  # recurrent layers use the modules' own functions,
MIXTURE: Mapping[str, Callable[..., Any]] = {}  # and so do experts and their routers


class _Substituted(Function):
    @staticmethod
    def forward(ctx: Any, original: Callable[..., Tensor], fused: Callable[..., Tensor], *inputs: Tensor) -> Tensor:
        ctx.save_for_backward(*inputs)
        ctx.original = original
        return fused(*inputs)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        needed = ctx.needs_input_grad[2:]
        inputs = [x.detach().requires_grad_(need) for x, need in zip(ctx.saved_tensors, needed, strict=True)]
        with torch.enable_grad():
            out = ctx.original(*inputs)
        grads = iter(torch.autograd.grad(out, [x for x in inputs if x.requires_grad], grad))
        return None, None, *(next(grads) if need else None for need in needed)


def with_gradients_of(original: Callable[..., Tensor], fused: Callable[..., Tensor], *inputs: Tensor) -> Tensor:
    """The output of `fused`, with the gradients of `original`, which is computed in the backward pass."""
    out: Tensor = _Substituted.apply(original, fused, *inputs)  # type: ignore[no-untyped-call]
    return out


def elementwise(function: Callable[[Tensor], Tensor], x: Tensor) -> Tensor:
    """function(x), with every number computed by torch's vector code on a CPU. Numbers after the last whole vector of a
    thread's block are computed one by one, and there silu, gelu and sigmoid round differently: the last numbers of a
    row would depend on the rows after it. So x is padded to whole vectors."""
    missing = 0 if x.is_cuda else _missing(x.numel())
    if not missing and (x.is_cuda or x.is_contiguous()):
        return function(x)
    return function(F.pad(x.reshape(-1), (0, missing)))[: x.numel()].view(x.shape)


def _missing(count: int) -> int:
    """Numbers to add until every thread's block is whole vectors."""
    even, threads = count, torch.get_num_threads()
    while even % (step := LANES * (math.lcm(threads, min(threads, -(-even // GRAIN))) if even > FEWEST else 1)):
        even += step - even % step
    return even - count


@dataclass(frozen=True)
class Rotation:
    """Rotary embedding of x (T, heads, D) by cos and sin (T, 1, D), the first half of sin negated."""

    cos: Tensor
    sin: Tensor

    def one(self, x: Tensor) -> Tensor:
        return (x * self.cos).addcmul_(x.roll(x.shape[-1] // 2, dims=-1), self.sin)

    def both(self, query: Tensor, key: Tensor) -> tuple[Tensor, Tensor]:
        if len(query) > MANY_ROWS:
            return self.one(query), self.one(key)
        count = query.shape[1]
        rotated = self.one(torch.cat((query, key), dim=1))
        return rotated[:, :count], rotated[:, count:]

    def at(self, rows: Tensor) -> Rotation:
        return type(self)(self.cos[rows], self.sin[rows])


class Operations:
    """`x` of add_norm and `gate` of gated may be overwritten."""

    steady = False  # whether products have the bits of any number of rows: applies to a GPU
    mixtures = False  # whether layers with experts, called unchanged, give few rows the bits of many

    def compute(self, trunk: nn.Module, parts: Sequence[nn.Module]) -> bool:
        """Whether each of these parts of a trunk computes what its replacement here computes, as far as that can be
        tested without the rows of the whole trunk."""
        return True

    def rotation(self, cos: Tensor, sin: Tensor) -> Rotation:
        """cos and sin (T, D), as returned by the module's own rotary embedding."""
        cos, sin = cos[:, None], sin[:, None]
        half = sin.shape[-1] // 2
        return Rotation(cos, torch.cat((-sin[..., :half], sin[..., half:]), dim=-1))

    def norm(self, x: Tensor, weight: Tensor, epsilon: float) -> Tensor:
        """In float32 with the bits of a learner's `rms_norm`."""
        if x.dtype in (torch.float16, torch.bfloat16):
            return F.rms_norm(x, weight.shape, weight, epsilon)
        return (x * _inverse_rms(x, epsilon)).mul_(weight)

    def both_norms(
        self, xs: tuple[Tensor, Tensor], weights: tuple[Tensor, Tensor], epsilons: tuple[float, float]
    ) -> tuple[Tensor, Tensor]:
        """Norms of the heads of queries and keys."""
        first, second = (self.norm(*each) for each in zip(xs, weights, epsilons, strict=True))
        return first, second

    def add_norm(self, x: Tensor, y: Tensor, weight: Tensor, epsilon: float) -> tuple[Tensor, Tensor]:
        """x + y, and the norm of it."""
        x = x.add_(y)
        return x, self.norm(x, weight, epsilon)

    def gated(self, gate: Tensor, up: Tensor) -> Tensor:
        return elementwise(_silu_in_place, gate).mul_(up)

    def products(self, x: Tensor, parts: Sequence[nn.Module]) -> list[Tensor]:
        """The output of each of these linear layers for x."""
        return [linear(x, part) for part in parts]

    def gated_products(self, x: Tensor, gate: nn.Module, up: nn.Module) -> Tensor:
        return self.gated(*self.products(x, [gate, up]))


def linear(x: Tensor, part: nn.Module) -> Tensor:
    if type(part) is not nn.Linear:  # its ranks are summed, or an adapter has replaced it since the trial
        adapted: Tensor = part(x)
        return adapted
    parameters = part._parameters
    return F.linear(x, parameters["weight"], parameters["bias"])  # type: ignore[arg-type]


def _silu_in_place(x: Tensor) -> Tensor:
    return F.silu(x, inplace=True)


def _inverse_rms(x: Tensor, epsilon: float) -> Tensor:
    """(..., 1). Uses torch's vector norm, which reads the rows once."""
    squared: Tensor = torch.linalg.vector_norm(x, dim=-1, keepdim=True).square_()
    return squared.div_(x.shape[-1]).add_(epsilon).rsqrt_()


class _RmsNorm(Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, epsilon: float) -> Tensor:
        scale = _inverse_rms(x, epsilon)
        normed = x * scale
        ctx.save_for_backward(normed, weight, scale)
        y: Tensor = normed * weight
        return y

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, Tensor, None]:
        normed, weight, scale = ctx.saved_tensors
        product = grad * normed
        along = (product @ weight).div_(-weight.shape[0]).unsqueeze(-1)  # of the gradient, on the row itself
        dx = (grad * weight).addcmul_(normed, along).mul_(scale)
        return dx, product.reshape(-1, weight.shape[0]).sum(0), None


class _Rotary(Function):
    @staticmethod
    def forward(ctx: Any, query: Tensor, key: Tensor, cos: Tensor, sin: Tensor) -> tuple[Tensor, Tensor]:
        half = sin.shape[-1] // 2
        signed = torch.cat((-sin[..., :half], sin[..., half:]), dim=-1)
        ctx.save_for_backward(cos, signed)
        return _rotate(query, cos, signed), _rotate(key, cos, signed)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, query: Tensor, key: Tensor) -> tuple[Tensor, Tensor, None, None]:
        cos, signed = ctx.saved_tensors
        return _rotate(query, cos, -signed), _rotate(key, cos, -signed), None, None


def rms_norm(x: Tensor, weight: Tensor, epsilon: float, gemma: bool = False) -> Tensor:
    y: Tensor = _RmsNorm.apply(x, 1 + weight if gemma else weight, epsilon)  # type: ignore[no-untyped-call]
    return y


def silu_mul(gate: Tensor, up: Tensor) -> Tensor:
    return elementwise(F.silu, gate) * up


def rotary(query: Tensor, key: Tensor, cos: Tensor, sin: Tensor) -> tuple[Tensor, Tensor]:
    """query (1, H, T, D) and key (1, K, T, D) by cos and sin (1, T, D)."""
    rotated: tuple[Tensor, Tensor] = _Rotary.apply(query, key, cos[:, None], sin[:, None])  # type: ignore[no-untyped-call]
    return rotated


def _rotate(x: Tensor, cos: Tensor, signed: Tensor) -> Tensor:
    return (x * cos).addcmul_(x.roll(x.shape[-1] // 2, dims=-1), signed)
