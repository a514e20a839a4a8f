"""The reshard channel of a run: the learner's shards on one side, the ranks of its rollout engines on the other."""

from __future__ import annotations

from copy import deepcopy
from typing import Literal

from torch import Tensor, nn

from plaudit.config import RlRecipe
from plaudit.core.model.split import keep_part
from plaudit.core.model.stages import RankPosition
from plaudit.models.part import outline
from plaudit.place.channels.reshard.routes import Box, Split, TrainingSide, needed
from plaudit.place.channels.reshard.sending import ReshardChannel
from plaudit.place.channels.weights import Layout, Weights, named_tensors
from plaudit.place.placement import PlacementContext
from plaudit.train.optim.sharding import Shards
from plaudit.train.policy.lora import attach_blank
from plaudit.train.run.orders import Orders


def new_reshard(
    stage: PlacementContext, orders: Orders, backend: Literal["gloo", "nccl"], host: str
) -> ReshardChannel:  # fmt: skip
    resources = stage.recipe.resources

    def stages() -> TrainingSide:
        shards = stage.trainee.shards
        assert shards is not None
        splits = {name: tuple(Split(*cut) for cut in cuts) for name, cuts in shards.splits.items()}
        return TrainingSide(resources.ranks, splits, resources.pipeline_parallel, shards.homes)

    return ReshardChannel(
        lambda: shard_weights(stage.trainee.loaded.module, stage.trainee.shards),
        lambda layout: engine_parts(stage.recipe, layout), orders, backend, host=host,
        seconds=stage.recipe.placement.deadline, stages=stages if resources.pipeline_parallel > 1 else None,
    )  # fmt: skip


def shard_weights(whole: nn.Module, shards: Shards | None) -> Weights:
    """This rank's shards of a module, under all names of the whole."""
    parts = {} if shards is None else {**dict(shards.module.named_buffers()), **shards.parameters}
    first: dict[int, str] = {}  # of tied tensors only one name is trained
    tensors: dict[str, Tensor] = {}
    for name, tensor in named_tensors(whole).items():
        tensors[name] = parts.get(first.setdefault(id(tensor), name), tensor)
    return Weights(tensors)


def engine_parts(recipe: RlRecipe, layout: Layout) -> list[dict[str, Box]]:
    """What each rank of an engine needs: the engines compute their shards in the same way."""
    rollout = recipe.resources.rollout
    if rollout.ranks == 1:
        return [needed(layout, [entry.name for entry in layout.entries], {})]
    assert recipe.model.path is not None
    whole = outline(recipe.model.path, recipe.model.dtype).module
    attach_blank(recipe.model.lora, whole)
    parts = []
    for rank in range(rollout.ranks):
        part = deepcopy(whole)
        cuts = keep_part(part, RankPosition(rank, rollout.tensor_parallel, rollout.pipeline_parallel))
        parts.append(needed(layout, part.state_dict(), cuts))
    return parts
