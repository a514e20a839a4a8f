"""Pipeline parallelism: a model's layers over stages of ranks, through which packed micro-batches pass.

    first    embeddings, its layers              sends hidden rows to the same rank of the next stage
    ...      its layers                          receives rows, sends its own; gradients return the other way
    last     its layers, final norm, head        computes the loss

Every rank knows the samples of a batch, so each stage packs a micro-batch itself and knows the shape of the rows it
receives. Lengths differ between micro-batches, which torch.distributed.pipelining does not support: its stages assume
the shapes of the first micro-batch for all. The schedule is 1F1B: a stage runs as many forward passes as there are
stages after it, and from then on one backward pass per forward pass. Tied embeddings are on the first and the last
stage, which sum their gradients and so stay equal.
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
"""The result of a forward pass, and the context in which its backward pass runs."""


class Stage:
    """A rank's pipeline stage; without pipeline parallelism the only one."""

    def __init__(self, ranks: Ranks = ALONE) -> None:
        self.rows = ranks.stages
        self.gradients = ranks.back
        self.readers = ranks.readers
        self.ends = ranks.ends
        self._received: deque[Tensor] = deque()
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
        """The ranks that exchange the last stage's results after a pass: those that share the samples, `group`, in
        every stage."""
        self._wait_sent()
        return group if self.size == 1 else self.readers

    def learn(self, batches: Sequence[Batch], forward: Callable[[Batch], Made]) -> None:
        """Forward and backward passes of all micro-batches. `forward` returns the loss on the last stage, else rows."""
        made: deque[Made] = deque()
        for number, batch in enumerate(batches):
            made.append(forward(batch))
            if number >= self.size - 1 - self.index:
                self._back(*made.popleft())
        while made:
            self._back(*made.popleft())
        self._wait_sent()

    def _back(self, out: Tensor, within: Callable[[], AbstractContextManager[None]]) -> None:
        gradient = None if self.last else self._receive(out, self.gradients, self.index + 1)
        if out.requires_grad:  # not if the first stage has no adapter
            with within():
                out.backward(gradient)  # type: ignore[no-untyped-call]
        if self.index:
            gradient = self._received.popleft().grad
            assert gradient is not None, "every layer reads the received rows"
            self._send(gradient, self.gradients, self.index - 1)

    def arrived(self, like: Tensor) -> Tensor:
        """Receive the rows of the next micro-batch from the previous stage."""
        rows = self._receive(like, self.rows, self.index - 1)
        if torch.is_grad_enabled():
            self._received.append(rows.requires_grad_())
        return rows

    def pass_on(self, rows: Tensor) -> None:
        """Send rows to the next stage, if there is one."""
        if not self.last:
            self._send(rows.detach()[None], self.rows, self.index + 1)

    def _wait_sent(self) -> None:
        """Wait until all sends have completed."""
        while self._sent:
            self._sent.popleft()[0].wait()

    def from_home(self, tensor: Tensor | None, home: int, like: Tensor, device: torch.device | str) -> Tensor:
        """The tensor of the stage `home`, broadcast to the same rank of each stage; the others' own tensors are
        ignored."""
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
        # These waits return at once: the neighbour has received all but at most as many sends as there are stages.
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
    """Replaces the layer before a stage's first: it receives the rows."""

    def __init__(self, stage: Stage) -> None:
        super().__init__()
        self.stage = stage

    def forward(self, hidden_states: Tensor, *_: Any, **__: Any) -> Tensor:
        return self.stage.arrived(hidden_states)


def keep_stage(module: nn.Module, stage: Stage) -> dict[str, int]:
    """Reduce a whole module to a stage's part. Returns the stage of each tensor, by its name in the whole module."""
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
        if isinstance(getattr(module, "score", None), nn.Module):  # the head of a critic or a reward model
            module.score = Elsewhere()
    setattr(module, PART, stage)
    return homes


def _blank_rows(embedding: nn.Embedding, input_ids: Tensor) -> Tensor:
    """Replaces the look-up on the last stage, whose rows come from the previous one."""
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
    """The names of embeddings that are tied to the head."""
    head: nn.Module | None = getattr(module, "get_output_embeddings", lambda: None)()
    if head is None:
        return set()
    ids = {id(parameter) for parameter in head.parameters()}
    embedding: nn.Module = trunk(module).get_input_embeddings()  # type: ignore[operator]
    both = ids & {id(parameter) for parameter in embedding.parameters()}
    return {name for name, parameter in module.named_parameters() if id(parameter) in both}


def check_stages(module: nn.Module, stages: int) -> None:
    """Raise if the layers of a module, which may be on the meta device, cannot be divided into so many stages."""
    base = trunk(module)
    if mixers_of(module):
        raise ModelError(
            f"{type(base).__name__} has recurrent layers, which resources.pipeline_parallel = {stages} does not divide "
            "yet: use data_parallel instead"
        )
    RankPosition(0, 1, stages).layers(len(stages_of(base)))
