"""A module sharded over ranks: matrices split over the mesh's tensor dimension, all weights over its data dimension,
experts (experts.py) over a mesh of their own.

FSDP2 keeps a shard of every weight and gathers one layer at a time; tensor parallelism follows the plan of the model
(transformers' base_model_tp_plan) inside the layers; embeddings and head are split by tokens, tied or not. A pipeline
stage has only its own layers, which are sharded over its ranks in the same way.
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
from plaudit.train.optim.experts import shard_experts
from plaudit.train.optim.pipeline import ONLY, Stage, keep_stage, tied_names
from plaudit.train.run.ranks import COPIES, DATA, TENSOR, Group, Ranks

FORWARD = "sharded_rows"

# It warns about gathering over two dimensions one after the other, which is exact, and the only way for FSDP2 with
# tensor parallelism.
logging.getLogger("torch.distributed.tensor._redistribute").setLevel(logging.ERROR)


class Shards:
    """Shards `module` in place: its parameters become DTensors, this rank's shards."""

    def __init__(self, module: nn.Module, ranks: Ranks) -> None:
        assert ranks.mesh is not None
        self.module = module
        self.mesh = ranks.mesh
        self.everyone = ranks.everyone
        self.skeleton = _copied(module, "meta")
        self.blanks = self.skeleton.state_dict()
        """Shapes and dtypes of all saved tensors."""
        self.learning = [name for name, parameter in module.named_parameters() if parameter.requires_grad]
        """Names of the trained parameters, of all stages."""
        self.stage = ONLY if ranks.stages.size == 1 else Stage(ranks)
        self.homes: dict[str, int] = {}
        """With several stages: the stage of each tensor."""
        self.on_both_ends: set[str] = set()
        """Embeddings of the first stage tied to the head of the last: their gradients are summed."""
        if self.stage.size > 1:
            self.on_both_ends = tied_names(module)
            self.homes = keep_stage(module, self.stage)
        self.summed: set[str] = set()
        """Parameters that every tensor rank has whole but uses for its own heads only: their gradients are summed."""
        if self.mesh[TENSOR].size() > 1:
            self._split_matrices(ranks.experts is not None)
            self._split_vocabulary()
        # Gradients are summed in float32, whatever the dtype of the weights.
        policy = MixedPrecisionPolicy(reduce_dtype=torch.float32)
        if ranks.experts is not None:
            for experts in shard_experts(module, ranks):
                fully_shard(experts, mesh=ranks.experts[COPIES], mp_policy=policy)
        for layer in _layers(module):
            if not isinstance(layer, Elsewhere):
                fully_shard(layer, mesh=self.mesh[DATA], mp_policy=policy)
        # Embeddings and head stay gathered after the forward pass: the head is read outside of it.
        fully_shard(module, mesh=self.mesh[DATA], mp_policy=policy, reshard_after_forward=False)
        for part in module.modules():
            if isinstance(part, FSDPModule):
                # Token weights are relative to the whole minibatch: gradients are summed over ranks, not averaged.
                part.set_gradient_divide_factor(1.0)
                part.set_force_sum_reduction_for_comms(True)  # gloo has no average
        setattr(module, FORWARD, MethodType(_rows, module))
        register_fsdp_forward_method(module, FORWARD)
        self.parameters: dict[str, DTensor] = dict(module.named_parameters())  # type: ignore[arg-type]
        self.splits = self._splits()

    def _splits(self) -> dict[str, tuple[tuple[int, int, int], ...]]:
        """How each parameter of all stages is split."""
        mine = {name: split_of(parameter) for name, parameter in self.parameters.items()}
        kind = dict[str, tuple[tuple[int, int, int], ...]]
        return {name: each for theirs in self.stage.rows.gather_values(mine, kind) for name, each in theirs.items()}

    def fill(self, stored: Mapping[str, Readable], device: str) -> None:
        """Load the weights of a module that was sharded on the meta device, reading only this rank's part of each
        tensor. Tensors that are not stored become zeros."""
        self.module._apply(  # type: ignore[no-untyped-call]
            lambda tensor: torch.zeros_like(tensor, device=device) if tensor.is_meta else tensor
        )
        self.parameters = dict(self.module.named_parameters())  # type: ignore[arg-type]
        with torch.no_grad():
            for name, parameter in self.parameters.items():
                at = stored.get(name.replace(".base_layer.", "."))  # the name in a layer with an adapter
                if at is not None and (local := parameter.to_local()).numel():
                    local.copy_(at.read(*cuts(parameter)))
            for name, buffer in self.module.named_buffers():
                if name in stored:
                    buffer.copy_(stored[name].read())

    def learned(self) -> dict[str, Tensor]:
        """The trained parameters, whole, on the CPU of every rank: for adapters, which are small."""
        return {name: self.full(name).detach().cpu().contiguous() for name in self.learning}

    def put(self, name: str, value: Tensor) -> None:
        """Set a parameter from its whole value, which every rank has."""
        if (parameter := self.parameters.get(name)) is None:  # of another stage
            return
        with torch.no_grad():
            for cut in cuts(parameter):
                value = cut.of(value)
            parameter.to_local().copy_(value)

    @property
    def device(self) -> torch.device:
        return next(iter(self.parameters.values())).device

    def whole(self, part: Tensor, like: DTensor) -> Tensor:
        """The whole of a tensor that is split as the parameter `like` is. Collective: every rank must call it."""
        split = DTensor.from_local(
            part, like.device_mesh, like.placements, run_check=False, shape=like.shape, stride=like.stride()
        )
        return split.full_tensor()

    def full(self, name: str) -> Tensor:
        """The whole of a parameter or saved buffer, of any stage. Collective: every rank must call it."""
        home, tensor = self.homes.get(name, 0), None
        if home == self.stage.index:
            tensor = full(self.parameters[name] if name in self.parameters else self.module.get_buffer(name))
        return self.stage.from_home(tensor, home, self.blanks[name], self.device)

    def publish(self, copy_of: nn.Module) -> int:
        """Write the trained weights into a whole copy of the module, one parameter at a time; return their bytes."""
        targets, size = dict(copy_of.named_parameters()), 0
        with torch.no_grad():
            for name in self.learning:
                full = self.full(name)
                targets[name].copy_(full)
                size += full.nbytes
        return size

    def gathered(self) -> nn.Module | None:
        """The whole module on the CPU of the main rank, for saving; None on the others. Collective."""
        whole = _copied(self.skeleton, "cpu") if self.everyone.index == 0 else None
        targets = {} if whole is None else {**dict(whole.named_parameters()), **dict(whole.named_buffers())}
        parameters = [name for name, _ in self.skeleton.named_parameters()]
        buffers = [name for name, _ in self.skeleton.named_buffers() if name in self.blanks]  # the others are not saved
        with torch.no_grad():
            for name in parameters + buffers:
                full = self.full(name)
                if whole is not None:
                    targets[name].copy_(full)
        return whole

    def on_both(self, name: str) -> bool:
        """Whether a parameter is sharded over both dimensions of its mesh; else each tensor rank has it whole."""
        parameter = self.parameters[name]  # one that is added after the sum over ranks is replicated over one of them
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
                f"⌈{tokens} / {size}⌉ = {_most(tokens, size)} tokens each: use fewer ranks"
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
    """Applies a matrix that every rank has whole: keys or values of a head that several ranks share."""
    bias = None if linear.bias is None else cut.of(linear.bias)
    return F.linear(alike(x, group), cut.of(linear.weight), bias)


class _OwnRows(TorchFunctionMode):
    """A mode in which an embedding that is split by tokens looks up its own rows. DTensor can do that too, but
    allocates the gradient of the whole vocabulary on every rank."""

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func is F.embedding and isinstance(args[1], DTensor):
            return _split(args[1]).look_up(args[0], args[1].to_local())
        return func(*args, **(kwargs or {}))


def _look_up(embedding: nn.Embedding, tokens: Tensor) -> Tensor:
    with _OwnRows():
        rows: Tensor = type(embedding).forward(embedding, tokens)  # the type may scale them
    if embedding.padding_idx is None:
        return rows
    return torch.where((tokens == embedding.padding_idx)[..., None], rows.detach(), rows)  # padding has no gradient


class Head(NamedTuple):
    """A vocabulary head, or this rank's part of one."""

    weight: Tensor
    bias: Tensor | None
    split: SplitVocabulary | None


def head_of(module: nn.Module) -> Head:
    """The head of a module that may be sharded; call it between a forward pass and its backward pass."""
    head: nn.Linear = module.get_output_embeddings()  # type: ignore[operator]
    if not isinstance(head.weight, DTensor):
        return Head(head.weight, head.bias, None)
    bias = head.bias.to_local() if isinstance(head.bias, DTensor) else None
    return Head(head.weight.to_local(), bias, _split(head.weight))


def _split(table: DTensor) -> SplitVocabulary:
    """The split of a table (V, hidden) whose shards over the data dimension are gathered."""
    (cut,) = cuts(table)
    return SplitVocabulary(cut.start, cut.end, _most(table.shape[0], table.device_mesh.size()), table.device_mesh)


def _most(tokens: int, ranks: int) -> int:
    """The number of tokens of each rank but the last, as torch.chunk splits them."""
    return -(-tokens // ranks)


def cuts(like: DTensor) -> list[Cut]:
    """This rank's part of a tensor that is split as a parameter is: first by its tensor rank, then by its data rank,
    each as torch.chunk splits."""
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
    """The whole tensor, gathered if it is sharded; then every rank must call it."""
    return tensor.full_tensor() if isinstance(tensor, DTensor) else tensor


def split_of(parameter: DTensor) -> tuple[tuple[int, int, int], ...]:
    """Its splits in order: the distance of the ranks that have the parts, the number of parts, and the dimension. FSDP
    splits what tensor or expert parallelism leaves of a dimension: the last dimension of the mesh splits first."""
    ranks, parts = parameter.device_mesh.mesh, []
    for axis, placement in enumerate(parameter.placements):
        if hasattr(placement, "dim"):
            row = ranks.movedim(axis, -1).reshape(-1, ranks.shape[axis])[0].tolist()
            parts.append((row[1] - row[0] if len(row) > 1 else 1, len(row), placement.dim))
    return tuple(reversed(parts))


def _copied(module: nn.Module, device: str) -> nn.Module:
    """The module with empty parameters on a device, and there also those buffers that have no values; tied ones stay
    tied."""
    empty: dict[int, Any] = {
        id(p): nn.Parameter(torch.empty_like(p, device=device), p.requires_grad) for p in module.parameters()
    }
    empty |= {id(b): torch.empty_like(b, device=device) for b in module.buffers() if b.is_meta}
    return copy.deepcopy(module, empty)


def packed_rows(module: nn.Module, packed: Packed) -> Tensor:
    """Final hidden states (T, hidden) of a module that may be sharded."""
    rows: Tensor = getattr(module, FORWARD)(packed) if isinstance(module, FSDPModule) else fused_rows(module, packed)
    return rows


def free_gathered(module: nn.Module) -> None:
    """Free the weights that a forward pass without a backward pass left gathered, before the shards change. Does
    nothing to a module that is not sharded."""
    if isinstance(module, FSDPModule):
        module.reshard()


def _rows(module: nn.Module, packed: Packed) -> Tensor:
    # FSDP2 registers a hook on the returned tensor; on a view of another tensor it would be lost.
    return hidden_rows(module, packed).clone()


def _layers(module: nn.Module) -> list[nn.Module]:
    config: Any = module.config
    count = config.get_text_config().num_hidden_layers
    for part in trunk(module).modules():
        if isinstance(part, nn.ModuleList) and len(part) == count:
            return list(part)
    raise ModelError(f"{type(module).__name__} has no list of {count} layers to shard one by one: train it on one rank")
