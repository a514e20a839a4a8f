"""A model's layers over stages of ranks, and packed micro-batches on their way through them.

    first    embeddings, its layers              hidden rows go to the same place of the next stage
    ...      its layers                          rows come from the stage before and go on; their gradients come back
    last     its layers, final norm, head        has the loss

Every rank knows the samples of a batch, so each stage packs a micro-batch for itself and knows the shape of the rows
that come. Lengths differ from one to the next, which is why this is not torch.distributed.pipelining: its stages take
the shapes of the first micro-batch for those of all. The order is 1F1B: a stage lets in as many micro-batches as there
are stages after it, and from then on takes one back for each that it lets in. Tied embeddings are at both ends, which
sum their gradients and so stay equal.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from types import MethodType
from typing import Any, TypeVar

import torch
import torch.distributed as dist
from torch import Tensor, nn

from plaudit.core.model.mixers import mixers_of
from plaudit.core.model.packing import trunk
from plaudit.core.model.stages import (
    UNPLANNED,
    Elsewhere,
    NoEmbedding,
    RankPosition,
    drop_embeddings,
    drop_head,
    stages_of,
)
from plaudit.errors import ModelError
from plaudit.train.run.ranks import ALONE, Group, Ranks

PART = "pipeline_stage"

Batch = TypeVar("Batch")

Made = tuple[Tensor, Callable[[], AbstractContextManager[None]]]
"""What a forward pass gave, and in what context its backward pass runs."""


class Stage:
    """One of the stages of a model, as a rank of it sees it; of a model in one piece the only one."""

    def __init__(self, ranks: Ranks = ALONE) -> None:
        self.rows = ranks.stages
        self.gradients = ranks.back
        self.readers = ranks.readers
        self.ends = ranks.ends
        self._came: deque[Tensor] = deque()
        self._sent: deque[tuple[dist.Work, Tensor]] = deque()

    @property
    def index(self) -> int:
        return self.rows.index

    @property
    def size(self) -> int:
        return self.rows.size

    @property
    def last(self) -> bool:
        return self.index == self.size - 1

    def results(self, group: Group) -> Group:
        """After a pass, those who exchange what the last stage has read: the ranks that share the samples out, `group`,
        in every stage."""
        self._settle()
        return group if self.size == 1 else self.readers

    def learn(self, batches: Sequence[Batch], forward: Callable[[Batch], Made]) -> None:
        """All micro-batches forward and back. `forward` gives the loss at the last stage, and rows at the others."""
        made: deque[Made] = deque()
        for number, batch in enumerate(batches):
            made.append(forward(batch))
            if number >= self.size - 1 - self.index:
                self._back(*made.popleft())
        while made:
            self._back(*made.popleft())
        self._settle()

    def _back(self, out: Tensor, within: Callable[[], AbstractContextManager[None]]) -> None:
        gradient = None if self.last else self._receive(out, self.gradients, self.index + 1)
        if out.requires_grad:  # the first stage's may have no adapter in it
            with within():
                out.backward(gradient)  # type: ignore[no-untyped-call]
        if self.index:
            came = self._came.popleft().grad
            assert came is not None, "every layer reads the rows that come in"
            self._send(came, self.gradients, self.index - 1)

    def arrived(self, like: Tensor) -> Tensor:
        """The rows of the micro-batch that is due, from the stage before."""
        rows = self._receive(like, self.rows, self.index - 1)
        if torch.is_grad_enabled():
            self._came.append(rows.requires_grad_())
        return rows

    def pass_on(self, rows: Tensor) -> None:
        """To the next stage, if there is one."""
        if not self.last:
            self._send(rows.detach()[None], self.rows, self.index + 1)

    def _settle(self) -> None:
        """Wait until all that was sent has gone."""
        while self._sent:
            self._sent.popleft()[0].wait()

    def from_home(self, tensor: Tensor | None, home: int, like: Tensor, device: torch.device | str) -> Tensor:
        """What the stage `home` has, on the same place of each stage; the others' own is not looked at."""
        if self.size == 1:
            assert tensor is not None
            return tensor
        channel = self.rows.channel
        assert channel is not None
        if self.index != home or tensor is None:
            tensor = torch.empty_like(like, device=device)
        tensor = tensor.contiguous()
        dist.broadcast(tensor, dist.get_global_rank(channel, home), channel)
        return tensor

    def _send(self, rows: Tensor, group: Group, stage: int) -> None:
        # Nobody waits here: of what is on its way the neighbour has taken all but as many as there are stages.
        rows = rows.contiguous()
        work = dist.isend(rows, group=group.channel, group_dst=stage)
        assert work is not None
        self._sent.append((work, rows))
        while len(self._sent) > 2 * self.size:
            self._sent.popleft()[0].wait()

    def _receive(self, like: Tensor, group: Group, stage: int) -> Tensor:
        rows = torch.empty_like(like, memory_format=torch.contiguous_format)
        dist.recv(rows, group=group.channel, group_src=stage)
        return rows


ONLY = Stage()


def stage_of(module: nn.Module) -> Stage:
    stage: Stage = getattr(module, PART, ONLY)
    return stage


class Arrival(Elsewhere):
    """Stands for the layer before a stage's first: here the rows come in."""

    def __init__(self, stage: Stage) -> None:
        super().__init__()
        self.stage = stage

    def forward(self, hidden_states: Tensor, *_: Any, **__: Any) -> Tensor:
        return self.stage.arrived(hidden_states)


def keep_stage(module: nn.Module, stage: Stage) -> dict[str, int]:
    """Leave a stage's part of a whole module. Returns which stage has each tensor, by its names in the whole."""
    base = trunk(module)
    layers, place = stages_of(base), RankPosition(stage.index, 1, stage.size)
    own = place.layers(len(layers))
    homes = _homes(module, stage.size)
    tied = bool(tied_names(module))
    for index in range(len(layers)):
        if index not in own:
            layers[index] = Elsewhere()
    if stage.index:
        layers[own[0] - 1] = Arrival(stage)
        if tied and stage.last:
            embedding: Any = base.get_input_embeddings()  # type: ignore[operator]
            embedding.forward = MethodType(_blank_rows, embedding)
        else:
            drop_embeddings(base)
    if not stage.last:
        embedding = base.get_input_embeddings()  # type: ignore[operator]
        for name, part in list(base.named_children()):
            if part is not layers and part is not embedding and name not in UNPLANNED:
                setattr(base, name, Elsewhere())
        drop_head(module)
        if isinstance(getattr(module, "score", None), nn.Module):  # of values, or of a judge
            module.score = Elsewhere()
    setattr(module, PART, stage)
    return homes


def _blank_rows(embedding: nn.Embedding, input_ids: Tensor) -> Tensor:
    """In place of a look-up at the last stage, whose rows come from the one before."""
    return NoEmbedding(embedding.weight.shape[1], embedding.weight.dtype)(input_ids)  # type: ignore[no-any-return]


def _homes(module: nn.Module, stages: int) -> dict[str, int]:
    base = trunk(module)
    layers: Any = stages_of(base)
    home: dict[int, int] = {}
    for stage in range(stages):
        for index in RankPosition(stage, 1, stages).layers(len(layers)):
            home |= {id(tensor): stage for tensor in layers[index].state_dict(keep_vars=True).values()}
    embedding: nn.Module = base.get_input_embeddings()  # type: ignore[operator]
    home |= {id(tensor): 0 for tensor in embedding.state_dict(keep_vars=True).values()}
    return {name: home.get(id(tensor), stages - 1) for name, tensor in module.state_dict(keep_vars=True).items()}


def tied_names(module: nn.Module) -> set[str]:
    """Of embeddings that are the head too."""
    head: nn.Module | None = getattr(module, "get_output_embeddings", lambda: None)()
    if head is None:
        return set()
    ids = {id(parameter) for parameter in head.parameters()}
    embedding: nn.Module = trunk(module).get_input_embeddings()  # type: ignore[operator]
    both = ids & {id(parameter) for parameter in embedding.parameters()}
    return {name for name, parameter in module.named_parameters() if id(parameter) in both}


def check_stages(module: nn.Module, stages: int) -> None:
    """Raise if the layers of a module cannot be divided so. It may be on the meta device."""
    base = trunk(module)
    if mixers_of(module):
        raise ModelError(
            f"{type(base).__name__} has recurrent layers, which resources.pipeline_parallel = {stages} does not divide "
            "yet: set data_parallel in its place"
        )
    RankPosition(0, 1, stages).layers(len(stages_of(base)))
