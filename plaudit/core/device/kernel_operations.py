"""What a lean trunk computes between its products, in a launch each. The learner's fused parts are the same kernels."""

from __future__ import annotations

from collections.abc import Sequence

from torch import Tensor, nn

from plaudit.core import kernels
from plaudit.core.model import differentiable
from plaudit.core.model.fusion import Fusion
from plaudit.core.model.operations import Operations, Rotation


class KernelRotation(Rotation):
    """cos and sin are (T, D), as they come."""

    def one(self, x: Tensor) -> Tensor:
        return kernels.rotate(x, self.cos, self.sin)

    def both(self, query: Tensor, key: Tensor) -> tuple[Tensor, Tensor]:
        query, key = query.transpose(0, 1)[None], key.transpose(0, 1)[None]
        query, key = kernels.rotary(query, key, self.cos[None], self.sin[None])
        return query[0].transpose(0, 1), key[0].transpose(0, 1)


class KernelOperations(Operations):
    def compute(self, trunk: nn.Module, parts: Sequence[nn.Module]) -> bool:
        # The rows of a whole trunk in half precision are too coarse to tell one norm or gate from another.
        return Fusion(trunk, differentiable).covers(parts)

    def rotation(self, cos: Tensor, sin: Tensor) -> Rotation:
        return KernelRotation(cos, sin)

    def norm(self, x: Tensor, weight: Tensor, epsilon: float) -> Tensor:
        return kernels.rms_norm(x, weight, epsilon)

    def add_norm(self, x: Tensor, y: Tensor, weight: Tensor, epsilon: float) -> tuple[Tensor, Tensor]:
        return kernels.add_rms_norm(x, y, weight, epsilon)

    def gated(self, gate: Tensor, up: Tensor) -> Tensor:
        return kernels.silu_mul(gate, up)
