"""A module spread over ranks: matrices split over the mesh's tensor dimension, all weights over its data dimension,
experts (experts.py) over a mesh of their own.

FSDP2 holds a shard of every weight and gathers one layer at a time; tensor parallelism follows the plan that comes with
the model (transformers' base_model_tp_plan) inside the layers; embeddings and head are split by tokens, tied or not. A
stage of a pipeline has its own layers alone, which are spread over its ranks so.
"""

from __future__ import annotations

import copy
import logging
from collections.abc import Mapping
from functools import partial
from types import MethodType
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.distributed.fsdp import FSDPModule, MixedPrecisionPolicy, fully_shard, register_fsdp_forward_method
from torch.distributed.tensor import DTensor, Replicate, Shard, distribute_tensor
from torch.distributed.tensor.parallel import ColwiseParallel, ParallelStyle, RowwiseParallel, parallelize_module
from torch.overrides import TorchFunctionMode

from plaudit.algo.tokens.vocabulary import SplitVocabulary
from plaudit.core.model.fused import fused_rows
from plaudit.core.model.packing import Packed, hidden_rows, trunk
from plaudit.core.model.split import SUMMED, planned, split_parts
from plaudit.core.model.stages import Elsewhere
from plaudit.errors import ModelError
from plaudit.models.weights import Cut, Readable
from plaudit.train.optim.context import alike
from plaudit.train.optim.experts import deal_out
from plaudit.train.optim.pipeline import ONLY, Stage, keep_stage, tied_names
from plaudit.train.run.ranks import COPIES, DATA, TENSOR, Group, Ranks

FORWARD = "sharded_rows"

# It advises against gathering over two dimensions one after the other, which is the only way for FSDP2 under tensor
# parallelism, and exact.
logging.getLogger("torch.distributed.tensor._redistribute").setLevel(logging.ERROR)


class Shards:
    """Splits `module` in place; from then on its parameters are DTensors, this rank's parts of the whole."""

    def __init__(self, module: nn.Module, ranks: Ranks) -> None:
        assert ranks.mesh is not None
        self.module = module
        self.mesh = ranks.mesh
        self.everyone = ranks.everyone
        self.skeleton = _copied(module, "meta")
        self.blanks = self.skeleton.state_dict()
        """Shapes and dtypes of all tensors that are saved."""
        self.learning = [name for name, parameter in module.named_parameters() if parameter.requires_grad]
        """Names of what learns, on all stages."""
        self.stage = ONLY if ranks.stages.size == 1 else Stage(ranks)
        self.homes: dict[str, int] = {}
        """Of several stages, which one has each tensor."""
        self.on_both_ends: set[str] = set()
        """Embeddings of the first stage that are the head of the last: their gradients add up."""
        if self.stage.size > 1:
            self.on_both_ends = tied_names(module)
            self.homes = keep_stage(module, self.stage)
        self.summed: set[str] = set()
        """Parameters that every tensor rank has whole and uses for its own heads only: their gradients add up."""
        if self.mesh[TENSOR].size() > 1:
            self._split_matrices(ranks.experts is not None)
            self._split_vocabulary()
        # Gradients are summed in float32, whatever the weights are in.
        policy = MixedPrecisionPolicy(reduce_dtype=torch.float32)
        if ranks.experts is not None:
            for experts in deal_out(module, ranks):
                fully_shard(experts, mesh=ranks.experts[COPIES], mp_policy=policy)
        for layer in _layers(module):
            if not isinstance(layer, Elsewhere):
                fully_shard(layer, mesh=self.mesh[DATA], mp_policy=policy)
        # Embeddings and head stay gathered after the forward pass: the head is read outside of it.
        fully_shard(module, mesh=self.mesh[DATA], mp_policy=policy, reshard_after_forward=False)
        for part in module.modules():
            if isinstance(part, FSDPModule):
                # The weights of tokens are those of the whole minibatch: shares add up, they are not averaged.
                part.set_gradient_divide_factor(1.0)
                part.set_force_sum_reduction_for_comms(True)  # gloo has no other
        setattr(module, FORWARD, MethodType(_rows, module))
        register_fsdp_forward_method(module, FORWARD)
        self.parameters: dict[str, DTensor] = dict(module.named_parameters())  # type: ignore[arg-type]
        self.splits = self._splits()

    def _splits(self) -> dict[str, tuple[tuple[int, int, int], ...]]:
        """How each parameter of all stages is cut."""
        mine = {name: split_of(parameter) for name, parameter in self.parameters.items()}
        kind = dict[str, tuple[tuple[int, int, int], ...]]
        return {name: each for theirs in self.stage.rows.gather_values(mine, kind) for name, each in theirs.items()}

    def fill(self, stored: Mapping[str, Readable], device: str) -> None:
        """Give a module that was split on the meta device its weights: of every tensor just this rank's part is read.
        Those that are not stored are zeros."""
        self.module._apply(  # type: ignore[no-untyped-call]
            lambda tensor: torch.zeros_like(tensor, device=device) if tensor.is_meta else tensor
        )
        self.parameters = dict(self.module.named_parameters())  # type: ignore[arg-type]
        with torch.no_grad():
            for name, parameter in self.parameters.items():
                at = stored.get(name.replace(".base_layer.", "."))  # as a layer with an adapter beside it calls it
                if at is not None and (local := parameter.to_local()).numel():
                    local.copy_(at.read(*cuts(parameter)))
            for name, buffer in self.module.named_buffers():
                if name in stored:
                    buffer.copy_(stored[name].read())

    def learned(self) -> dict[str, Tensor]:
        """The parameters that learn, whole, on the CPU of every rank: for adapters, which are small."""
        return {name: self.full(name).detach().cpu().contiguous() for name in self.learning}

    def put(self, name: str, value: Tensor) -> None:
        """Give a parameter its value, of which every rank has the whole."""
        if (parameter := self.parameters.get(name)) is None:  # another stage's
            return
        with torch.no_grad():
            for cut in cuts(parameter):
                value = cut.of(value)
            parameter.to_local().copy_(value)

    @property
    def device(self) -> torch.device:
        return next(iter(self.parameters.values())).device

    def whole(self, part: Tensor, like: DTensor) -> Tensor:
        """A tensor that is split as a parameter is, put together. Every rank takes part."""
        split = DTensor.from_local(
            part, like.device_mesh, like.placements, run_check=False, shape=like.shape, stride=like.stride()
        )
        return split.full_tensor()

    def full(self, name: str) -> Tensor:
        """A parameter, or a buffer that is saved, put together, whatever stage it is on. Every rank takes part."""
        home, tensor = self.homes.get(name, 0), None
        if home == self.stage.index:
            tensor = full(self.parameters[name] if name in self.parameters else self.module.get_buffer(name))
        return self.stage.from_home(tensor, home, self.blanks[name], self.device)

    def publish(self, copy_of: nn.Module) -> int:
        """Write the weights that learn into a whole copy of the module, one parameter at a time; their bytes."""
        targets, size = dict(copy_of.named_parameters()), 0
        with torch.no_grad():
            for name in self.learning:
                full = self.full(name)
                targets[name].copy_(full)
                size += full.nbytes
        return size

    def gathered(self) -> nn.Module | None:
        """The whole module on the CPU of the main rank, for saving; None on the others, which take part."""
        whole = _copied(self.skeleton, "cpu") if self.everyone.index == 0 else None
        targets = {} if whole is None else dict(whole.named_parameters())
        with torch.no_grad():
            for name, _ in self.skeleton.named_parameters():
                full = self.full(name)
                if whole is not None:
                    targets[name].copy_(full)
        return whole

    def on_both(self, name: str) -> bool:
        """Whether a parameter is split over both dimensions of its mesh; else each tensor rank has it whole."""
        parameter = self.parameters[name]  # a bias that is added after the ranks' sum is on both, and whole on one
        return parameter.device_mesh.ndim == 2 and not any(isinstance(each, Replicate) for each in parameter.placements)

    def _split_matrices(self, dealt: bool) -> None:
        base = trunk(self.module)
        prefix = next(name for name, part in self.module.named_modules() if part is base)
        for name, part, style in planned(base, dealt):
            if style == SUMMED:
                self.summed |= {f"{prefix}.{name}.{each}" for each, _ in part.named_parameters()}
        tensor = self.mesh[TENSOR]
        group = Group(tensor.get_local_rank(), tensor.size(), tensor.get_group())
        styles: dict[str, ParallelStyle] = {}
        for matrix in split_parts(base, group.size, dealt):
            name = f"{prefix}.{matrix.name}"
            if matrix.parts == group.size:
                styles[name] = ColwiseParallel() if matrix.style == "colwise" else RowwiseParallel()
                continue
            linear: Any = matrix.linear
            linear.forward = partial(_own_heads, linear, matrix.cut(group.index, group.size), group)
            self.summed |= {f"{name}.{each}" for each, _ in linear.named_parameters()}
        parallelize_module(self.module, tensor, styles)

    def _split_vocabulary(self) -> None:
        embedding: Any = trunk(self.module).get_input_embeddings()  # type: ignore[operator]
        head: nn.Module | None = getattr(self.module, "get_output_embeddings", lambda: None)()
        tables: list[Any] = [part for part in (embedding, head) if part is not None and list(part.parameters())]
        if not tables:  # a stage between the first and the last
            return
        tokens, size = tables[0].weight.shape[0], self.mesh[TENSOR].size()
        if (size - 1) * _most(tokens, size) >= tokens:
            raise ModelError(
                f"a vocabulary of {tokens} tokens leaves a rank of tensor_parallel = {size} none, at "
                f"⌈{tokens} / {size}⌉ = {_most(tokens, size)} tokens each: take fewer ranks"
            )
        split: dict[nn.Parameter, nn.Parameter] = {}
        for part in tables:
            for name, parameter in list(part.named_parameters(recurse=False)):
                if parameter not in split:  # tied ones stay tied
                    rows = distribute_tensor(parameter.data, self.mesh[TENSOR], [Shard(0)])
                    split[parameter] = nn.Parameter(rows, parameter.requires_grad)
                part.register_parameter(name, split[parameter])
        if embedding in tables and self.stage.index == 0:
            embedding.forward = MethodType(_look_up, embedding)


def _own_heads(linear: nn.Linear, cut: Cut, group: Group, x: Tensor) -> Tensor:
    """Of a matrix that every rank has whole: keys or values of a head that several ranks share."""
    bias = None if linear.bias is None else cut.of(linear.bias)
    return F.linear(alike(x, group), cut.of(linear.weight), bias)


class _OwnRows(TorchFunctionMode):
    """Within it an embedding that is split by tokens looks up its own. DTensor can do that too, but makes the gradient
    of the whole vocabulary on every rank."""

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func is F.embedding and isinstance(args[1], DTensor):
            return _split(args[1]).look_up(args[0], args[1].to_local())
        return func(*args, **(kwargs or {}))


def _look_up(embedding: nn.Embedding, tokens: Tensor) -> Tensor:
    with _OwnRows():
        rows: Tensor = type(embedding).forward(embedding, tokens)  # which may scale them
    if embedding.padding_idx is None:
        return rows
    return torch.where((tokens == embedding.padding_idx)[..., None], rows.detach(), rows)  # padding learns nothing


class Head(NamedTuple):
    """A vocabulary head, or this rank's part of one."""

    weight: Tensor
    bias: Tensor | None
    split: SplitVocabulary | None


def head_of(module: nn.Module) -> Head:
    """Of a module that may be sharded, as it is between a forward pass and its backward."""
    head: nn.Linear = module.get_output_embeddings()  # type: ignore[operator]
    if not isinstance(head.weight, DTensor):
        return Head(head.weight, head.bias, None)
    bias = head.bias.to_local() if isinstance(head.bias, DTensor) else None
    return Head(head.weight.to_local(), bias, _split(head.weight))


def _split(table: DTensor) -> SplitVocabulary:
    """Of a (V, hidden) whose shards over the data dimension are gathered."""
    (cut,) = cuts(table)
    return SplitVocabulary(cut.start, cut.end, _most(table.shape[0], table.device_mesh.size()), table.device_mesh)


def _most(tokens: int, ranks: int) -> int:
    """How many a rank has: as torch.chunk deals them out, all but the last."""
    return -(-tokens // ranks)


def cuts(like: DTensor) -> list[Cut]:
    """What this rank has of a tensor that is split as a parameter is: first the part of its tensor rank, of that the
    part of its data rank, each as torch.chunk cuts."""
    parts: list[Cut] = []
    shape = list(like.shape)
    for mesh_dim, placement in reversed(list(enumerate(like.placements))):
        if isinstance(placement, Replicate):
            continue
        dim: int = placement.dim  # type: ignore[attr-defined]
        each = -(-shape[dim] // like.device_mesh.size(mesh_dim))
        start = min(like.device_mesh.get_local_rank(mesh_dim) * each, shape[dim])
        cut = Cut(dim, start, min(start + each, shape[dim]))
        shape[dim] = cut.end - cut.start
        parts.append(cut)
    return parts


def full(tensor: Tensor) -> Tensor:
    """Put together, if it is sharded; every rank takes part."""
    return tensor.full_tensor() if isinstance(tensor, DTensor) else tensor


def split_of(parameter: DTensor) -> tuple[tuple[int, int, int], ...]:
    """Its cuts in their order: how far apart the ranks are that have the parts, how many, and along which dimension.
    FSDP cuts what tensor or expert parallelism has left of a dimension: of the mesh's the last cuts first."""
    ranks, parts = parameter.device_mesh.mesh, []
    for axis, placement in enumerate(parameter.placements):
        if hasattr(placement, "dim"):
            row = ranks.movedim(axis, -1).reshape(-1, ranks.shape[axis])[0].tolist()
            parts.append((row[1] - row[0] if len(row) > 1 else 1, len(row), placement.dim))
    return tuple(reversed(parts))


def _copied(module: nn.Module, device: str) -> nn.Module:
    """The module with empty parameters on a device; tied ones stay tied."""
    empty = {id(p): nn.Parameter(torch.empty_like(p, device=device), p.requires_grad) for p in module.parameters()}
    return copy.deepcopy(module, empty)


def packed_rows(module: nn.Module, packed: Packed) -> Tensor:
    """Final hidden states (T, hidden) of a module that may be sharded."""
    rows: Tensor = getattr(module, FORWARD)(packed) if isinstance(module, FSDPModule) else fused_rows(module, packed)
    return rows


def let_go(module: nn.Module) -> None:
    """After a forward pass without a backward: free what it left gathered, which would soon be older than the shards.
    Does nothing to a module that is not sharded."""
    if isinstance(module, FSDPModule):
        module.reshard()


def _rows(module: nn.Module, packed: Packed) -> Tensor:
    # FSDP2 hangs its hook on what is returned, and a view of something else would lose it.
    return hidden_rows(module, packed).clone()


def _layers(module: nn.Module) -> list[nn.Module]:
    config: Any = module.config
    count = config.get_text_config().num_hidden_layers
    for part in trunk(module).modules():
        if isinstance(part, nn.ModuleList) and len(part) == count:
            return list(part)
    raise ModelError(f"{type(module).__name__} has no list of {count} layers to shard one by one: train it on one rank")
