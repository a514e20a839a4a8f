"""A lean trunk's operations between its products, one kernel launch each; the learner's fused operations use the same
kernels."""

from __future__ import annotations

from collections.abc import Sequence

from torch import Tensor, nn

from plaudit.algo.tokens.product_kernel import FEW, few_rows_gated, few_rows_products
from plaudit.algo.tokens.products import HALF, few_rows_agree, steady_linear
from plaudit.core import kernels
from plaudit.core.kernels.pointwise import MANY_ROWS
from plaudit.core.model import differentiable
from plaudit.core.model.fusion import Fusion
from plaudit.core.model.operations import Operations, Rotation


class KernelRotation(Rotation):
    """cos and sin are (T, D)."""

    def one(self, x: Tensor) -> Tensor:
        return kernels.rotate(x, self.cos, self.sin)

    def both(self, query: Tensor, key: Tensor) -> tuple[Tensor, Tensor]:
        query, key = query.transpose(0, 1)[None], key.transpose(0, 1)[None]
        query, key = kernels.rotary(query, key, self.cos[None], self.sin[None])
        return query[0].transpose(0, 1), key[0].transpose(0, 1)


class KernelOperations(Operations):
    mixtures = True
    steady = False  # whether products have the same bits for any number of rows (algo/tokens/products.py)

    def compute(self, trunk: nn.Module, parts: Sequence[nn.Module]) -> bool:
        # The outputs of a whole trunk in half precision are too coarse to distinguish one norm or gate from another.
        return Fusion(trunk, differentiable).covers(parts)

    def rotation(self, cos: Tensor, sin: Tensor) -> Rotation:
        return KernelRotation(cos, sin)

    def norm(self, x: Tensor, weight: Tensor, epsilon: float) -> Tensor:
        return kernels.rms_norm(x, weight, epsilon)

    def both_norms(
        self, xs: tuple[Tensor, Tensor], weights: tuple[Tensor, Tensor], epsilons: tuple[float, float]
    ) -> tuple[Tensor, Tensor]:
        if weights[0].shape != weights[1].shape or xs[0].numel() >= MANY_ROWS * len(weights[0]):
            return super().both_norms(xs, weights, epsilons)
        return kernels.rms_norm_both(xs, weights, epsilons)

    def add_norm(self, x: Tensor, y: Tensor, weight: Tensor, epsilon: float) -> tuple[Tensor, Tensor]:
        return kernels.add_rms_norm(x, y, weight, epsilon)

    def gated(self, gate: Tensor, up: Tensor) -> Tensor:
        return kernels.silu_mul(gate, up)

    def products(self, x: Tensor, parts: Sequence[nn.Module]) -> list[Tensor]:
        """Few rows in one launch, if they then have the same bits as many rows."""
        plain = _of_few_rows(x, parts)
        if plain is not None and few_rows_agree(*plain):
            return few_rows_products(x, *plain)
        if not self.steady or x.dtype not in HALF:
            return super().products(x, parts)
        return [steady_linear(x, part.weight, part.bias) if type(part) is nn.Linear else part(x) for part in parts]

    def gated_products(self, x: Tensor, gate: nn.Module, up: nn.Module) -> Tensor:
        plain = _of_few_rows(x, [gate, up])
        if plain is None or plain[1] is not None or not few_rows_agree(*plain, kernels.silu_mul):
            return super().gated_products(x, gate, up)
        return few_rows_gated(x, *plain[0])


def _of_few_rows(x: Tensor, parts: Sequence[nn.Module]) -> tuple[list[Tensor], list[Tensor] | None] | None:
    """The weights and biases of plain parts, where there are few rows and all parts have a bias or none has."""
    if len(x) > FEW or x.dtype not in HALF or any(type(part) is not nn.Linear for part in parts):
        return None
    weights, biases = ([part._parameters[name] for part in parts] for name in ("weight", "bias"))
    present = [bias for bias in biases if bias is not None]
    if present and len(present) < len(parts):
        return None
    return weights, present or None  # type: ignore[return-value]
