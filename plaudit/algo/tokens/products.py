"""Batch-invariant matrix products: a row's bits do not depend on the number of rows.

For few rows a library may use another kernel, or split the inner dimension to occupy a whole GPU, and then it sums in
another order: a token decoded with seven others would differ in its last bits from the same token in a learner's batch.
Each shape of a product is tested once on the device, over a grid of row counts; where few rows differ from many, they
are padded to a count that does not. On a GPU very few rows use a product of our own instead, if the test shows that it
gives them the bits of many. Where too much padding would be needed, as for the narrow matrices of adapters, a GPU uses
another product of our own for all rows. Nothing is assumed about a library's version.
"""

from __future__ import annotations

import platform
import warnings
from collections.abc import Callable, Iterable, Sequence
from functools import cache
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.autograd.function import Function
from torch.overrides import TorchFunctionMode

HALF = (torch.float16, torch.bfloat16)
ROWS = (1, 2, 3, 4, 8, 16, 24, 32, 48, 64, 96, 128, 192, 256, 320, 384, 448, 512, 640, 768, 1024, 2048, 4096)
MANY = 8192
MANY_ELEMENTS = 1 << 28  # elements of the result: for a wide product fewer rows count as many
MOST = 512  # maximum rows to pad to: more would cost too much
NEVER = 0  # no number of rows suffices
CPU_ROWS = (*range(1, 34), 48, 63, 64, 65, 100, 128, 200, 256)
CPU_MANY, CPU_MOST = 512, 24
CPU_WIDTH = 1024  # columns tested: further ones do not change a sum

Product = Callable[[Tensor, Tensor], Tensor]
_LEAST: dict[tuple[Any, ...], int] = {}
_AGREE: dict[tuple[Any, ...], bool] = {}
_FEW: dict[tuple[Any, ...], int] = {}  # rows up to which the product for few has the bits of many, or 0


class SteadyProducts(TorchFunctionMode):
    """A mode in which `F.linear` is batch-invariant, for half-precision rows on a GPU and float32 rows on a CPU. So is
    `topk` on a GPU, where torch's algorithm depends on the size: of equal values the first is chosen. `also_wide`: also
    products of float32 rows on a GPU, such as those of routers in half-precision models."""

    def __init__(self, also_wide: bool = False) -> None:
        super().__init__()
        self.also_wide = also_wide

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if func is F.linear and _applies(args[0], args[1], self.also_wide):
            bias = args[2] if len(args) > 2 else kwargs.get("bias")
            return steady_linear(args[0], args[1], bias)
        if (
            func in (torch.topk, Tensor.topk)
            and args[0].is_cuda
            and len(args) == 2
            and kwargs.keys() <= {"dim", "sorted"}
        ):
            return _first_of_equals(args[0], args[1], kwargs.get("dim", -1))
        return func(*args, **kwargs)


def _first_of_equals(x: Tensor, k: int, dim: int) -> tuple[Tensor, Tensor]:
    values, ids = torch.sort(x, dim=dim, descending=True, stable=True)
    return torch.return_types.topk((values.narrow(dim, 0, k), ids.narrow(dim, 0, k)))


def choose_library(weight: Tensor) -> None:
    """Turn oneDNN off on ARM CPUs without bfloat16 arithmetic. There torch passes float32 products to oneDNN, which
    prepares a kernel at every call: small products take up to twelve times as long as with torch's BLAS, large ones as
    long."""
    if platform.machine() != "aarch64" or weight.device.type != "cpu" or weight.dtype != torch.float32:
        return
    if not torch.ops.mkldnn._is_mkldnn_bf16_supported():
        torch.backends.mkldnn.enabled = False  # type: ignore[assignment]


def needs_steadying(rows: int, device: torch.device) -> bool:
    """Whether products of so many rows may use another kernel than products of many."""
    return device.type == "cuda" or rows < CPU_MOST


def _applies(x: Any, weight: Any, also_wide: bool) -> bool:
    if type(x) is not Tensor or type(weight) not in (Tensor, torch.nn.Parameter) or weight.dtype != x.dtype:
        return False
    wide = x.dtype == torch.float32 and (also_wide or not x.is_cuda)
    return wide or (x.is_cuda and x.dtype in HALF)


def steady_linear(x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
    def product(rows: Tensor, weight: Tensor) -> Tensor:
        return F.linear(rows, weight, bias)

    def few(rows: Tensor, weight: Tensor) -> Tensor:
        return _few_rows(rows, weight, bias)

    def own(rows: Tensor) -> Tensor:
        return _in_fixed_order(rows, weight, bias)

    return steady(x, weight, product, "linear", bias is not None, own=own, few=few if x.dtype in HALF else None)


def steady(
    x: Tensor, weight: Tensor, product: Product, *kind: object, own: Callable[[Tensor], Tensor] | None = None,
    few: Product | None = None,
) -> Tensor:  # fmt: skip
    """`product` of x (..., K) with a weight (N, K), in which each row has the same bits as among many rows. `kind`
    distinguishes products with weights of the same shape. `own`: a product that is always batch-invariant. `few`: a
    product for few rows, used if the test finds that it has the bits of many; it has no gradients."""
    count = x.numel() // x.shape[-1]
    if not needs_steadying(count, x.device):
        return product(x, weight)
    key = (weight.shape, weight.dtype, weight.device, *kind)
    if key not in _LEAST:
        if x.is_cuda and torch.cuda.is_current_stream_capturing():
            raise RuntimeError(f"a product with a weight of {tuple(weight.shape)} was not tested before the capture")
        if x.is_cuda:
            least = _least_rows(weight, product, own is not None)
            _FEW[key] = _most_few_rows(weight, product, few) if least > 1 and few is not None else 0
            _LEAST[key] = least
        else:
            _LEAST[key] = _least_rows_cpu(weight.shape, True in kind)
    if _LEAST[key] == NEVER and own is not None:
        return own(x)
    if count >= _LEAST[key]:
        return product(x, weight)
    learning = torch.is_grad_enabled() and (x.requires_grad or weight.requires_grad)
    if few is not None and count <= _FEW.get(key, 0) and not learning:
        return few(x.reshape(count, x.shape[-1]), weight).reshape(*x.shape[:-1], weight.shape[0])
    rows = F.pad(x.reshape(count, x.shape[-1]), (0, 0, 0, _LEAST[key] - count))
    out = product(rows, weight)[:count]
    return out.reshape(*x.shape[:-1], out.shape[-1])


class _FixedOrder(Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
        from plaudit.algo.tokens.product_kernel import fixed_order_product  # imports triton

        ctx.save_for_backward(x, weight)
        return fixed_order_product(x, weight, bias)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, Tensor | None, Tensor | None]:
        (x, weight), needed = ctx.saved_tensors, ctx.needs_input_grad
        return (
            grad @ weight if needed[0] else None,
            grad.T @ x if needed[1] else None,
            grad.sum(0) if needed[2] else None,
        )


def _in_fixed_order(x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
    rows: Tensor = _FixedOrder.apply(x.reshape(-1, x.shape[-1]), weight, bias)  # type: ignore[no-untyped-call]
    return rows.reshape(*x.shape[:-1], weight.shape[0])


def _few_rows(x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
    from plaudit.algo.tokens.product_kernel import few_rows_product  # imports triton

    return few_rows_product(x, weight, bias)


def least_rows(parts: Iterable[nn.Module]) -> int:
    """The number of rows from which all products of these parts have the bits of many; on a CPU, in float32."""
    shapes = {(part.weight.shape, part.bias is not None) for part in parts if isinstance(part, nn.Linear)}
    return max((_least_rows_cpu(shape, bias) for shape, bias in shapes), default=1)


def _least_rows(weight: Tensor, product: Product, has_own: bool) -> int:
    """The number of rows from which each row has the bits that it has among many. If that is too many: NEVER if there
    is another product, else 1."""
    width, inner = weight.shape
    like = _like(weight)
    last = _last_that_differs(like, product, ROWS, _many(width))
    least = next((rows for rows in ROWS if rows > last), MANY)
    if least <= MOST:
        return least
    if has_own:
        return NEVER
    warnings.warn(
        f"rows of a product of {inner} by {width} change with their number, up to {last} rows, on this device: "
        "log-probs of few rows are not those of many to the bit", stacklevel=2,
    )  # fmt: skip
    return 1


def _like(weight: Tensor) -> Tensor:
    """Random weights of this shape, since zeros, as in a new adapter, would prove nothing; a large weight itself."""
    if weight.numel() > MANY_ELEMENTS:
        return weight
    generator = torch.Generator(weight.device).manual_seed(1)
    return torch.randn(weight.shape, generator=generator, device=weight.device).to(weight.dtype)


def _many(width: int) -> int:
    return max(1024, min(MANY, MANY_ELEMENTS // width))


def _most_few_rows(weight: Tensor, product: Product, few: Product) -> int:
    from plaudit.algo.tokens.product_kernel import SOME

    counts = [rows for rows in ROWS if rows <= SOME]
    last = _last_that_differs(_like(weight), product, counts, _many(weight.shape[0]), few)
    return 0 if last else SOME


def few_rows_agree(
    weights: Sequence[Tensor], biases: Sequence[Tensor] | None, gate: Callable[[Tensor, Tensor], Tensor] | None = None
) -> bool:
    """Whether few rows in one launch for all these weights (`gate`: for two weights, whose products are combined) have
    the bits that they have among many in the library's products. Tested once for these shapes."""
    first = weights[0]
    key = (*(weight.shape for weight in weights), biases is not None, gate is not None, first.dtype, first.device)
    if key not in _AGREE:
        if torch.cuda.is_current_stream_capturing():
            raise RuntimeError(f"products with weights of {key[: len(weights)]} were not tested before the capture")
        _AGREE[key] = _few_rows_agree([_like(weight).roll(i, 0) for i, weight in enumerate(weights)], biases, gate)
    return _AGREE[key]


@torch.no_grad()
def _few_rows_agree(
    weights: Sequence[Tensor], biases: Sequence[Tensor] | None, gate: Callable[[Tensor, Tensor], Tensor] | None
) -> bool:
    from plaudit.algo.tokens.product_kernel import FEW, few_rows_gated, few_rows_products

    inner = weights[0].shape[1]
    generator = torch.Generator(weights[0].device).manual_seed(0)
    count = min(_many(weight.shape[0]) for weight in weights)
    x = torch.randn(count, inner, generator=generator, device=weights[0].device).to(weights[0].dtype)
    many = [F.linear(x, weight, None if biases is None else biases[i])[:FEW] for i, weight in enumerate(weights)]
    if gate is not None:
        many = [gate(*many)]
    for rows in (rows for rows in ROWS if rows <= FEW):
        few = few_rows_products(x[:rows], weights, biases) if gate is None else [few_rows_gated(x[:rows], *weights)]
        if not all(torch.equal(mine, theirs[:rows]) for mine, theirs in zip(few, many, strict=True)):
            return False
    return True


@cache
def _least_rows_cpu(shape: tuple[int, int], bias: bool) -> int:
    """The same with random weights: a bias or an adapter's matrix of zeros would prove nothing. There is no warning: a
    run's own comparison reports the differences of a CPU's library."""
    width, inner = min(CPU_WIDTH, shape[0]), shape[1]
    drawn = torch.randn(inner + 1, width, generator=torch.Generator().manual_seed(1))
    like, added = drawn[:inner].T.contiguous(), drawn[inner] if bias else None
    last = _last_that_differs(like, lambda rows, weight: F.linear(rows, weight, added), CPU_ROWS, CPU_MANY)
    return last + 1 if last < CPU_MOST else 1


@torch.no_grad()
def _last_that_differs(
    weight: Tensor, product: Product, grid: Sequence[int], count: int, few: Product | None = None
) -> int:  # fmt: skip
    """The largest number of rows whose bits, in the product or in another for few rows, differ from those among `count`
    in the product; 0 if there is none."""
    generator = torch.Generator(weight.device).manual_seed(0)
    x = torch.randn(count, weight.shape[1], generator=generator, device=weight.device).to(weight.dtype)
    many, few = product(x, weight), few or product
    return max((n for n in grid if n <= count and not torch.equal(few(x[:n], weight), many[:n])), default=0)
