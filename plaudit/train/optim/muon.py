"""Muon: the step of a weight matrix is its orthogonalised momentum, so that all directions have steps of equal size;
embeddings, heads and vectors are stepped by AdamW.

Matrices of one shape are orthogonalised together, on a CPU in float32: torch.optim.Muon processes them one by one in
bfloat16, six times as slow there for small models. Steps are scaled to the size of AdamW's (0.2 · √ of the longer
side), so that learning rates are comparable.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping

import torch
from torch import Tensor, nn

from plaudit.config import TrainTable
from plaudit.core.model.packing import trunk
from plaudit.train.optim.optimizer import Optimizer

MOMENTUM = 0.95
ITERATIONS = 5
COEFFICIENTS = (3.4445, -4.775, 2.0315)  # of the polynomial that moves singular values towards 1
LIKE_ADAMW = 0.2  # approximate root mean square of AdamW's steps


class Muon(Optimizer):
    def __init__(self, model: nn.Module, table: TrainTable, beside: Mapping[str, nn.Parameter] | None = None) -> None:
        super().__init__(model, table, beside)
        embeddings = {id(part.weight) for part in model.modules() if isinstance(part, nn.Embedding)}
        in_trunk = {id(p) for p in trunk(model).parameters() if p.ndim == 2 and id(p) not in embeddings}
        matrices = [name for name, p in self.parameters.items() if id(p) in in_trunk]
        mine = {id(self.masters[name]) for name in matrices}
        for group in self.adam.param_groups:
            group["params"] = [p for p in group["params"] if id(p) not in mine]
        self.alike: defaultdict[tuple[int, ...], list[str]] = defaultdict(list)
        for name in matrices:
            self.alike[tuple(self.masters[name].shape)].append(name)
        self.momentum = {name: torch.zeros_like(self.masters[name]) for name in matrices}

    def zero(self) -> None:
        super().zero()
        for name in self.momentum:
            self.masters[name].grad = None

    def moments(self) -> list[Tensor]:
        return [*super().moments(), *self.momentum.values()]

    def state(self) -> dict[str, Tensor]:
        return super().state() | {f"momentum/{name}": value.cpu() for name, value in self.momentum.items()}

    def load(self, tensors: dict[str, Tensor]) -> None:
        super().load({path: value for path, value in tensors.items() if not path.startswith("momentum/")})
        for name, momentum in self.momentum.items():
            momentum.copy_(tensors[f"momentum/{name}"])

    @torch.no_grad()
    def _apply(self, rate: float) -> None:
        for shape, names in self.alike.items():
            names = [name for name in names if self.masters[name].grad is not None]
            steps = [self._step(name) for name in names]
            scale = rate * LIKE_ADAMW * max(shape) ** 0.5
            for name, step in zip(names, orthogonal(torch.stack(steps)) if steps else (), strict=True):
                self.masters[name].mul_(1 - rate * self.table.weight_decay).sub_(step, alpha=scale)
        super()._apply(rate)

    def _step(self, name: str) -> Tensor:
        """The Nesterov momentum of the gradient."""
        gradient = self.masters[name].grad
        assert gradient is not None
        return gradient.lerp(self.momentum[name].lerp_(gradient, 1 - MOMENTUM), MOMENTUM)


def orthogonal(x_NAB: Tensor) -> Tensor:
    """Each matrix with its singular values moved close to 1, by Newton-Schulz iterations."""
    tall = x_NAB.shape[1] > x_NAB.shape[2]
    x = (x_NAB.mT if tall else x_NAB).to(torch.bfloat16 if x_NAB.is_cuda else torch.float32)
    x = x / x.norm(dim=(1, 2), keepdim=True).clamp_min(1e-7)
    a, b, c = COEFFICIENTS
    for _ in range(ITERATIONS):
        square = x @ x.mT
        x = torch.baddbmm(x, torch.baddbmm(square, square, square, beta=b, alpha=c), x, beta=a)
    return (x.mT if tall else x).to(x_NAB.dtype)
