"""What a lean trunk computes between its products, in plain torch. `kernel_operations.py` has the same for a GPU."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor, nn

MANY_ROWS = 256  # up to here one more call costs more than to copy queries and keys into one tensor


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

    def compute(self, trunk: nn.Module, parts: Sequence[nn.Module]) -> bool:
        """Whether these parts of a trunk, one by one, compute what stands in for them here, as far as that can be told
        apart from the rows of the whole trunk."""
        return True

    def rotation(self, cos: Tensor, sin: Tensor) -> Rotation:
        """cos and sin (T, D), as the module's own rotary embedding gives them."""
        cos, sin = cos[:, None], sin[:, None]
        half = sin.shape[-1] // 2
        return Rotation(cos, torch.cat((-sin[..., :half], sin[..., half:]), dim=-1))

    def norm(self, x: Tensor, weight: Tensor, epsilon: float) -> Tensor:
        return F.rms_norm(x, weight.shape, weight, epsilon)

    def add_norm(self, x: Tensor, y: Tensor, weight: Tensor, epsilon: float) -> tuple[Tensor, Tensor]:
        """x + y, and the norm of it."""
        x = x.add_(y)
        return x, self.norm(x, weight, epsilon)

    def gated(self, gate: Tensor, up: Tensor) -> Tensor:
        return F.silu(gate, inplace=True).mul_(up)
