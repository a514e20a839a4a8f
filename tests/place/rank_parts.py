"""A training rank with a part of an engine: checks which tensors are in its memory after each step and during a weight
update. A test runs this on each rank: python -m tests.place.rank_parts RECIPE RUN"""

from __future__ import annotations

import gc
import sys
import weakref
from pathlib import Path

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor

from plaudit.config import RlRecipe
from plaudit.config.recipe import load_recipe
from plaudit.models.part import outline
from plaudit.place.parts import ColocatedParts
from plaudit.rl.follower import joined_run
from plaudit.rl.loop import RlTraining
from plaudit.train.optim.sharding import Shards
from tests.train.rl_world import Silent


class WatchedShards:
    """Shards from which an engine's part loads its weights; each gathered tensor must be freed before the next is
    gathered."""

    def __init__(self, shards: Shards) -> None:
        self.shards = shards
        self.made: list[weakref.ref[Tensor]] = []

    def full(self, name: str) -> Tensor:
        assert not any(ref() is not None for ref in self.made), f"{name} is put together beside another tensor"
        full_tensor = self.shards.full(name)
        self.made.append(weakref.ref(full_tensor))
        return full_tensor


def tensors() -> list[Tensor]:
    """All tensors of this process that have storage; those that FSDP has freed have none."""
    all_tensors = [each for each in gc.get_objects() if isinstance(each, Tensor) and not isinstance(each, DTensor)]
    plain = [each for each in all_tensors if not each.is_meta and each.layout is torch.strided]
    return [each for each in plain if each.untyped_storage().nbytes()]


class Looking(Silent):
    """Checks the memory after each step. Matrices of layers are sharded twice, and their full shapes are unique."""

    def __init__(self, recipe: RlRecipe) -> None:
        super().__init__()
        assert recipe.model.path is not None
        full_model = outline(recipe.model.path).module
        self.bytes = sum(parameter.nbytes for parameter in full_model.parameters())
        self.matrices = {
            tuple(p.shape) for name, p in full_model.named_parameters() if ".layers." in name and p.ndim > 1
        }
        self.training: RlTraining | None = None

    def step(self, step: int, metrics: dict[str, float]) -> None:
        super().step(step, metrics)
        assert self.training is not None
        placement, shards = self.training.placement, self.training.trainee.shards
        assert isinstance(placement, ColocatedParts)
        assert shards is not None
        gc.collect()
        assert self.matrices.isdisjoint({tuple(tensor.shape) for tensor in tensors()})
        part_shapes = {tuple(p.shape) for name, p in placement.part.module.named_parameters() if ".layers." in name}
        assert part_shapes, "an engine's rank has its part of the layers"
        shard_bytes = sum(parameter.to_local().nbytes for parameter in shards.parameters.values())
        assert shard_bytes < 0.7 * self.bytes
        assert all(parameter.is_meta for parameter in self.training.loaded.module.parameters())


def main() -> None:
    recipe = load_recipe(Path(sys.argv[1]))
    assert isinstance(recipe, RlRecipe)
    with joined_run(Path(sys.argv[2]), recipe, resume=False, fresh=False) as (run, ranks):
        viewer = Looking(recipe)
        viewer.training = RlTraining(recipe, run, viewer, ranks=ranks)
        placement = viewer.training.placement
        assert isinstance(placement, ColocatedParts)
        placement.part.shards = watched = WatchedShards(placement.part.shards)  # type: ignore[assignment]
        viewer.training.fit()
        assert len(viewer.seen) == recipe.train.steps
        assert len(watched.made) == recipe.train.steps * len(placement.part.shards.shards.skeleton.state_dict())  # type: ignore[attr-defined]


if __name__ == "__main__":
    main()
