"""The optimizer of a sharded module: AdamW on this rank's parts, as plain tensors, on the device or in host memory.

torch's clipping and its fused AdamW reject parameters of different meshes together. On local parts both are simple;
only the norm needs an exchange. The state is saved as whole tensors, so that a run can resume on other ranks.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

import torch
import torch.distributed as dist
from torch import Tensor, nn

from plaudit.config import TrainTable
from plaudit.config.supervised import SupervisedTrain
from plaudit.models.weights import Cut, Stored, read_stem
from plaudit.train.optim.freed import give_back
from plaudit.train.optim.host_optimizer import HostOptimizer
from plaudit.train.optim.muon import Muon
from plaudit.train.optim.optimizer import Optimizer, kind, local
from plaudit.train.optim.shard_files import Whole, of_all_stages, write_shards
from plaudit.train.optim.sharding import Shards, cuts
from plaudit.train.run.ranks import DATA, TENSOR, Group


class ShardedOptimizer(Optimizer):
    """AdamW of a sharded module. Parameters `beside` the module's are whole on every rank; their gradients are
    summed."""

    def __init__(self, shards: Shards, table: TrainTable, beside: Mapping[str, nn.Parameter] | None = None) -> None:
        self.shards = shards
        super().__init__(shards.module, table, beside)

    def _clip(self) -> Tensor:
        data, tensor = self.shards.mesh[DATA], self.shards.mesh[TENSOR]
        squares = torch.zeros(1, dtype=torch.float64, device=next(iter(self.parameters.values())).device)
        gradients: list[Tensor] = []
        for name, parameter in self.parameters.items():
            split, stage, gradient = name in self.shards.parameters, self.shards.stage, self.gradient(name)
            if not split and stage.size > 1 and stage.rows.any(gradient is not None):
                if gradient is None:  # only the last stage has one
                    gradient = torch.zeros_like(parameter, dtype=kind(parameter))
                    self.put_gradient(name, gradient)
                dist.all_reduce(gradient, group=stage.rows.channel)
            if gradient is None:
                continue
            if not split and data.size() > 1:
                dist.all_reduce(gradient, group=data.get_group())
            alike = 1 if split and self.shards.on_both(name) else tensor.size()
            if alike > 1:
                dist.all_reduce(gradient, group=tensor.get_group())
                if name not in self.shards.summed:
                    # The ranks computed the same up to rounding; the mean makes their bits equal, so they stay equal.
                    gradient /= alike
            copies = alike if split else alike * data.size() * stage.size
            if name in self.shards.on_both_ends:
                dist.all_reduce(gradient, group=stage.ends.channel)
                copies *= 2
            squares += gradient.double().square().sum() / copies
            gradients.append(gradient)
        dist.all_reduce(squares)
        norm = squares.sqrt().squeeze()
        factor = (self.table.clip_norm / (norm + 1e-6)).clamp(max=1.0).float()
        for gradient in gradients:
            gradient *= factor
        return norm.float()

    def zero(self) -> None:
        super().zero()
        parts = [local(each.detach()) for each in self.parameters.values() if each.device.type == "cpu"]
        give_back(sum(part.numel() * kind(part).itemsize for part in parts))

    def save(self, path: Path) -> None:
        """Collective; tensor by tensor."""
        tensors = [self._whole(name, part) for name, part in self.state().items()]
        write_shards(path, of_all_stages(tensors, self.shards.stage), self.shards.everyone)

    def restore(self, path: Path) -> None:
        """Load this rank's parts, whichever ranks wrote them."""
        stored = {name: at for name, at in read_stem(path).items() if self._here(name)}
        self.load({name: at.read(*self._cuts(name, at)) for name, at in stored.items()})

    def _here(self, path: str) -> bool:
        """Whether a path belongs to a parameter of this stage."""
        name = path.split("/", 1)[1]
        return name not in self.shards.homes or name in self.shards.parameters

    def _whole(self, path: str, part: Tensor) -> Whole:
        like = self.shards.parameters.get(path.split("/", 1)[1])
        if like is None or part.ndim == 0:
            return Whole(path, part.dtype, tuple(part.shape), lambda: part)
        return Whole(path, part.dtype, tuple(like.shape), lambda: self.shards.whole(part.to(like.device), like))

    def _cuts(self, path: str, at: Stored) -> list[Cut]:
        like = self.shards.parameters.get(path.split("/", 1)[1])
        return [] if like is None or not at.shape else cuts(like)


class ShardedHostOptimizer(ShardedOptimizer, HostOptimizer):
    """Each rank keeps the moments and float32 weights of its parts in host memory and steps them on its device; norms
    and checkpoints are those of all ranks."""

    def _everyone(self) -> Group:
        return self.shards.everyone


def new_optimizer(
    model: nn.Module, table: TrainTable, beside: Mapping[str, nn.Parameter] | None = None, shards: Shards | None = None
) -> Optimizer:
    """The optimizer of a model on one rank or, with `shards`, over several."""
    if shards is not None:
        return (ShardedHostOptimizer if table.offload_optimizer else ShardedOptimizer)(shards, table, beside)
    if isinstance(table, SupervisedTrain) and table.optimizer == "muon":
        return Muon(model, table, beside)
    return (HostOptimizer if table.offload_optimizer else Optimizer)(model, table, beside)
