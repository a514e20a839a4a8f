"""A module whose layers are split over pipeline stages: each rank's trunk has stand-ins for the layers of other stages.

    stage 0    embeddings, its layers     sends rows to the same rank of the next stage
    ...        its layers                 receives rows from the previous stage, and sends them on
    last       its layers, final norm     sends the wanted rows back to rank 0, which alone has the heads

The trunk itself stays transformers' own: it calls its layers one by one, and a stand-in before the first layer of a
stage receives the rows. One batch at a time goes through the stages.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from plaudit.errors import ModelError

UNPLANNED = {"rotary_emb", "rotary_emb_local", "emb_dropout"}  # modules of a trunk that depend on positions alone


@dataclass(frozen=True)
class RankPosition:
    """Coordinates of a rank: ranks of one stage share each matrix, and are consecutive."""

    rank: int
    tensor_parallel: int
    stages: int = 1

    @property
    def size(self) -> int:
        return self.tensor_parallel * self.stages

    @property
    def stage(self) -> int:
        return self.rank // self.tensor_parallel

    @property
    def share(self) -> int:
        return self.rank % self.tensor_parallel

    @property
    def last(self) -> int:
        """The rank that sends its rows back to rank 0."""
        return (self.stages - 1) * self.tensor_parallel

    def peers(self, stage: int) -> list[int]:
        return list(range(stage * self.tensor_parallel, (stage + 1) * self.tensor_parallel))

    def layers(self, count: int) -> range:
        """This stage's range of the layers; the first stages take one more where they do not divide evenly."""
        if count < self.stages:
            raise ModelError(
                f"{count} layers over pipeline_parallel = {self.stages} stages: {count} / {self.stages} = "
                f"{count / self.stages:g}, and every stage needs at least one layer"
            )
        each, more = divmod(count, self.stages)
        first = self.stage * each + min(self.stage, more)
        return range(first, first + each + (self.stage < more))


class Elsewhere(nn.Module):
    """Replaces a layer or head that another rank has."""

    def forward(self, hidden_states: Tensor, *_: Any, **__: Any) -> Tensor:
        return hidden_states


class Arrival(Elsewhere):
    """Replaces the layer before a stage's first one: receives the rows."""

    def __init__(self, source: int, group: dist.ProcessGroup) -> None:
        super().__init__()
        self.source, self.group = source, group

    def forward(self, hidden_states: Tensor, *_: Any, **__: Any) -> Tensor:
        return receive(hidden_states, self.source, self.group)


class NoEmbedding(nn.Module):
    """Replaces the embeddings: returns rows of the right shape that are never read."""

    def __init__(self, width: int, dtype: torch.dtype) -> None:
        super().__init__()
        self.width, self.dtype = width, dtype

    def forward(self, input_ids: Tensor) -> Tensor:
        return torch.zeros((), dtype=self.dtype, device=input_ids.device).expand(*input_ids.shape, self.width)


def keep_layers(base: nn.Module, layers: range) -> None:
    places: Any = base.layers
    for i in range(len(places)):
        if i not in layers:
            places[i] = Elsewhere()


def drop_embeddings(base: nn.Module) -> None:
    embeddings: Any = base.get_input_embeddings()  # type: ignore[operator]
    base.set_input_embeddings(NoEmbedding(embeddings.weight.shape[1], embeddings.weight.dtype))  # type: ignore[operator]


def drop_head(module: nn.Module) -> None:
    """Removes the head of a causal LM; class heads are small."""
    if getattr(module, "get_output_embeddings", lambda: None)() is not None:
        module.set_output_embeddings(Elsewhere())  # type: ignore[operator]


def stages_of(base: nn.Module) -> nn.ModuleList:
    """The layers of a trunk that can be split into stages: by the model's own plan, only hidden rows pass from layer to
    layer."""
    plan: dict[str, Any] = getattr(base.config, "base_model_pp_plan", None) or {}
    layers = getattr(base, "layers", None)
    unknown = dict(base.named_children()).keys() - plan.keys() - UNPLANNED
    if not isinstance(layers, nn.ModuleList) or plan.get("layers", [0, 0])[1] != ["hidden_states"] or unknown:
        raise ModelError(f"{type(base).__name__} has no pipeline plan for its layers: set pipeline_parallel = 1")
    return layers


def connect(base: nn.Module, place: RankPosition, group: dist.ProcessGroup) -> None:
    """Make the trunk receive rows from the previous stage and send them to the next in every call."""
    places: Any = base.layers
    own = place.layers(len(places))
    if place.stage > 0:
        places[own[0] - 1] = Arrival(place.rank - place.tensor_parallel, group)
    if place.stage < place.stages - 1:
        target = place.rank + place.tensor_parallel
        places[own[-1]].register_forward_hook(lambda _layer, _inputs, rows: send(rows, target, group))


def has_layer(base: nn.Module, index: int) -> bool:
    layers = getattr(base, "layers", None)
    return not (isinstance(layers, nn.ModuleList) and isinstance(layers[index], Elsewhere))


def send(rows: Tensor, target: int, group: dist.ProcessGroup) -> None:
    dist.send(_sendable(rows, group).contiguous(), group=group, group_dst=target)


def receive(like: Tensor, source: int, group: dist.ProcessGroup) -> Tensor:
    rows = torch.empty_like(_sendable(like, group), memory_format=torch.contiguous_format)
    dist.recv(rows, group=group, group_src=source)
    return rows.to(like.device)


def _sendable(rows: Tensor, group: dist.ProcessGroup) -> Tensor:
    """gloo sends from host memory only."""
    return rows.cpu() if rows.is_cuda and dist.get_backend(group) == "gloo" else rows
