"""A module whose matrices are split over ranks, by the tensor-parallel plan that comes with the model in transformers.

Each rank has whole heads (columns of q, k, v, gate and up, rows of o and down) and whole experts of a mixture. With
fewer key-value heads than ranks, the ranks whose queries use the same one each have a copy of it. A rank's layers are
plain modules over its shard of the weights, and only the row-wise ones and the experts communicate: their products are
summed over the ranks. So hidden rows are whole, and equal, on every rank of a stage (stages.py), and the router, which
every rank has, chooses the same experts everywhere. Embeddings, norms and heads are not split. (torch's DTensor, which
training uses, would do the same arithmetic at the price of a dispatch for every operation, and the lean trunk could
not read its weights.) The module is changed on the meta device, before weights are read.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from copy import deepcopy
from fnmatch import fnmatch
from functools import cache
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn

from plaudit.core.model.attention import use_packed_attention
from plaudit.core.model.fusion import are_experts
from plaudit.core.model.latent import HEADS, splits_by_heads
from plaudit.core.model.packing import pack, trunk
from plaudit.core.model.stages import RankPosition, drop_embeddings, drop_head, keep_layers, stages_of
from plaudit.errors import ModelError
from plaudit.models.part import Read, fill
from plaudit.models.weights import Cut

TRIED = 8  # rows of the trial
ATTENTION = {
    f"layers.*.self_attn.{name}": style
    for name, style in (("q_proj", "colwise"), ("k_proj", "colwise"), ("v_proj", "colwise"), ("o_proj", "rowwise"))
}
ENGINE_PLANS: Mapping[str, Mapping[str, str]] = {
    **dict.fromkeys(("gpt_oss", "phimoe", "olmoe", "flex_olmo", "minimax_m2", "olmo2", "olmo3"), ATTENTION),
    "qwen2_moe": {
        f"layers.*.mlp.shared_expert.{name}": style
        for name, style in (("gate_proj", "colwise"), ("up_proj", "colwise"), ("down_proj", "rowwise"))
    },
}
"""Additions of the engine to a family's plan, where transformers has none for these modules or a costlier one."""
SUMMED = "replicated_with_grad_allreduce"
"""The style of a module that every rank has in full and uses for its own heads only, such as Qwen 3's norms of queries
and keys."""

KEYS_AND_VALUES = ("k_proj", "v_proj")


class SplitMatrix(NamedTuple):
    """name     of a layer's matrix in the trunk
    style    "colwise": by its outputs, "rowwise": by its inputs
    parts    number of shards: as many as ranks, or fewer where ranks share a key-value head
    """

    name: str
    linear: nn.Linear
    style: str
    parts: int

    @property
    def features(self) -> int:
        """The number of split rows or columns."""
        return self.linear.out_features if self.style == "colwise" else self.linear.in_features

    def cut(self, share: int, size: int) -> Cut:
        """The shard of the weight for rank `share` of `size`."""
        count, index = self.features // self.parts, share * self.parts // size
        return Cut(0 if self.style == "colwise" else 1, index * count, (index + 1) * count)


class RowLinear(nn.Linear):
    """This rank's columns of a matrix whose input is split; the ranks' products are summed in `group`."""

    group: dist.ProcessGroup | None = None

    def forward(self, input: Tensor) -> Tensor:
        out = F.linear(input, self.weight)
        dist.all_reduce(out, group=self.group)
        return out if self.bias is None else out + self.bias


class FullNorm(nn.Module):
    """This rank's columns of an RMS norm over all heads together, whose squares are summed in `group`; `copies`: the
    number of ranks that have the same columns."""

    group: dist.ProcessGroup | None = None

    def __init__(self, whole: Any, count: int, copies: int) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.empty(count, device="meta", dtype=whole.weight.dtype), requires_grad=False)
        self.width, self.epsilon = whole.weight.shape[0] * copies, whole.variance_epsilon

    def forward(self, x: Tensor) -> Tensor:
        wide = x.float()
        squares = wide.pow(2).sum(-1, keepdim=True)
        dist.all_reduce(squares, group=self.group)
        return self.weight * (wide * torch.rsqrt(squares / self.width + self.epsilon)).to(x.dtype)


class OwnExperts:
    """Mixed in before the class of a layer's experts; this rank has `num_experts` of them, from `first` on. Their
    outputs are summed with the other ranks' in `group`."""

    first: int
    group: dist.ProcessGroup | None = None

    def __call__(self, hidden_states: Tensor, top_k_index: Tensor, top_k_weights: Tensor) -> Tensor:
        count: int = self.num_experts  # type: ignore[attr-defined]
        own = top_k_index - self.first
        others = (own < 0) | (own >= count)
        # Computed by no rank: transformers' and our kernels skip the index after the last expert.
        own, weights = own.masked_fill(others, count), top_k_weights.masked_fill(others, 0)
        out: Tensor = super().__call__(hidden_states, own, weights)  # type: ignore[misc]
        dist.all_reduce(out, group=self.group)
        return out


@cache
def _own(experts: type[nn.Module]) -> type[nn.Module]:
    return type(f"Own{experts.__name__}", (OwnExperts, experts), {"__module__": experts.__module__})


def keep_part(module: nn.Module, place: RankPosition) -> dict[str, Cut]:
    """Reduce a module on the meta device to one rank's shard, in place: its layers, and its rows or columns of
    their matrices. Returns which those are, by the names of the tensors; ModelError if the module cannot be
    split this way."""
    base = trunk(module)
    cuts = _narrow(module, place)
    if place.stages > 1:
        keep_layers(base, place.layers(len(stages_of(base))))
    if place.stage > 0:
        drop_embeddings(base)
    if place.rank > 0:
        drop_head(module)
    names = module.state_dict().keys()
    return {name: cut for name, cut in cuts.items() if name in names}


def _narrow(module: nn.Module, place: RankPosition) -> dict[str, Cut]:
    cuts: dict[str, Cut] = {}
    base, size = trunk(module), place.tensor_parallel
    if size == 1:
        return cuts
    config: Any = base.config
    parts = list(split_parts(base, size, dealt=True, own=ENGINE_PLANS.get(config.model_type)))
    prefix = next(name for name, part in module.named_modules() if part is base)
    split = {matrix.name.removesuffix(".base_layer"): matrix for matrix in parts}
    beside = (*_narrow_experts(base, place), *_narrow_heads(base, place, split))
    cuts |= {f"{prefix}.{name}": cut for name, cut in beside}
    for matrix in parts:
        name, part, style, _ = matrix
        cut = matrix.cut(place.share, size)
        count = cut.end - cut.start
        shape = (part.in_features, count) if style == "colwise" else (count, part.out_features)
        made = nn.Linear if style == "colwise" else RowLinear
        home, _, leaf = name.rpartition(".")
        linear = made(*shape, bias=part.bias is not None, device="meta", dtype=part.weight.dtype)
        setattr(base.get_submodule(home), leaf, linear)
        cuts[f"{prefix}.{name}.weight"] = cut
        if part.bias is not None and style == "colwise":
            cuts[f"{prefix}.{name}.bias"] = cut
    keys = _heads(base)[1]
    attention: Any
    for attention in base.modules() if keys < size else ():
        if hasattr(attention, "num_key_value_groups"):  # where transformers' own attention reads it
            attention.num_key_value_groups = attention.num_key_value_groups * keys // size
    return cuts


def _narrow_experts(base: nn.Module, place: RankPosition) -> Iterator[tuple[str, Cut]]:
    """Keep this rank's experts of every mixture, whole."""
    size = place.tensor_parallel
    for home, part in [(home, part) for home, part in base.named_modules() if are_experts(part)]:
        experts: Any = part
        total = experts.down_proj.shape[0]
        if total % size:
            raise ModelError(
                f"{total} experts are not divisible by tensor_parallel = {size}: {total} / {size} = "
                f"{total / size:g}; set a divisor of {total}"
            )
        count = total // size
        cut = Cut(0, place.share * count, (place.share + 1) * count)
        for name, parameter in list(part.named_parameters()):
            if parameter.shape[0] != total:
                raise ModelError(
                    f"{home}.{name} belongs to no single expert and cannot be split: set tensor_parallel = 1"
                )
            setattr(part, name, _blank(parameter, count))
            yield f"{home}.{name}", cut
        experts.num_experts, experts.first, experts._is_expert_parallel = count, cut.start, True
        part.__class__ = _own(type(part))  # type: ignore[arg-type]


def _narrow_heads(
    base: nn.Module, place: RankPosition, split: Mapping[str, SplitMatrix]
) -> Iterator[tuple[str, Cut]]:  # fmt: skip
    """Keep this rank's shard of attention parameters outside the split matrices: sinks of every head, and norms over
    all heads together."""
    for home, part in list(base.named_modules()):
        attention: Any = part
        for name, beside in (("q_proj", "sinks"), ("q_proj", "q_norm"), ("k_proj", "k_norm")):
            own = getattr(part, beside, None)
            if own is None or f"{home}.{name}" not in split:
                continue
            whole = own if isinstance(own, nn.Parameter) else getattr(own, "weight", None)
            if whole is None or (isinstance(own, nn.Module) and whole.shape == (attention.head_dim,)):
                continue  # a norm per head
            if isinstance(own, nn.Module) and whole.ndim > 1:
                raise ModelError(
                    f"{home}.{beside} has a weight for each head, {tuple(whole.shape)}, which Plaudit does not split: "
                    "set tensor_parallel = 1"
                )
            parts, size = split[f"{home}.{name}"].parts, place.tensor_parallel
            count, index = len(whole) // parts, place.share * parts // size
            setattr(part, beside, _blank(whole, count) if whole is own else FullNorm(own, count, size // parts))
            cut = Cut(0, index * count, (index + 1) * count)
            yield f"{home}.{beside}{'' if whole is own else '.weight'}", cut


def _blank(like: nn.Parameter, count: int) -> nn.Parameter:
    return nn.Parameter(torch.empty(count, *like.shape[1:], device="meta", dtype=like.dtype), requires_grad=False)


def join(module: nn.Module, group: dist.ProcessGroup) -> None:
    """Connect a rank's shard to the process group of its stage."""
    for part in module.modules():
        if isinstance(part, RowLinear | OwnExperts | FullNorm):
            part.group = group


def check_split(whole: nn.Module, place: RankPosition, read: Read, group: dist.ProcessGroup, device: str) -> None:
    """Checks on all ranks of a stage together that a layer computes the same rows split and whole, and so does one with
    experts where the first layer has none. `whole` is the module on the meta device, `read` reads its weights."""
    if place.tensor_parallel == 1:
        return
    layers: Any = trunk(whole).layers
    own = place.layers(len(layers))
    mixtures = [layer for layer in own if any(are_experts(part) for part in layers[layer].modules())]
    for layer in {own[0], *mixtures[:1]}:
        _check_layer(whole, layer, place, read, group, device, layer in mixtures)


def _check_layer(
    whole: nn.Module, layer: int, place: RankPosition, read: Read, group: dist.ProcessGroup, device: str, mixture: bool
) -> None:  # fmt: skip
    before, after = (_layer_rows(whole, layer, p, read, group, device) for p in (RankPosition(0, 1), place))
    tolerance = 1e-3 if before.dtype in (torch.float32, torch.float64) else 5e-2
    before, after = before.double(), after.double()
    # In half precision one row of a mixture may differ a lot, where two experts are nearly equal.
    distance, scale = (x.norm() if mixture else x.abs().max() for x in (after - before, before))
    if before.isfinite().all() and distance > tolerance * scale.clamp(min=1e-6):
        raise ModelError(
            f"{type(whole).__name__} computes other rows when split over {place.tensor_parallel} ranks, so its plan "
            "is not reliable: set tensor_parallel = 1"
        )


@torch.inference_mode()
def _layer_rows(
    whole: nn.Module, layer: int, place: RankPosition, read: Read, group: dist.ProcessGroup, device: str
) -> Tensor:  # fmt: skip
    """The output for a few rows of a trunk that consists of this layer."""
    module = deepcopy(whole)
    base: Any = trunk(module)
    width, dtype = base.get_input_embeddings().weight.shape[1], base.get_input_embeddings().weight.dtype
    cuts = _narrow(module, place)
    keep_layers(base, range(layer, layer + 1))
    drop_embeddings(base)
    drop_head(module)
    fill(module, read, cuts, device)
    join(module, group)
    use_packed_attention(module)
    packed = pack([[0] * TRIED], device)
    rows = torch.sin(torch.arange(TRIED * width, dtype=torch.float32)).view(1, TRIED, width).to(device, dtype)
    out = base(
        inputs_embeds=rows, position_ids=packed.position_ids, attention_mask=None, use_cache=False, layout=packed.layout
    )
    hidden: Tensor = out.last_hidden_state
    return hidden


def split_parts(
    base: nn.Module, size: int, dealt: bool = False, own: Mapping[str, str] | None = None
) -> Iterator[SplitMatrix]:
    """The matrices of a trunk that `size` ranks split; ModelError if they cannot. `dealt`: each rank has
    whole experts. `own`: takes precedence over the model's plan."""
    matrices = planned(base, dealt, own)
    check_heads(base, size, own)
    keys = _heads(base)[1]
    for whole, part, style in matrices:
        shared = keys < size and whole.rpartition(".")[2] in KEYS_AND_VALUES
        if whole.endswith("q_proj"):
            _check_own_heads(base, whole, size)
        for name, linear in [] if style == SUMMED else _matrices(whole, part, style):
            matrix = SplitMatrix(name, linear, style, keys if shared else size)
            if matrix.features % matrix.parts:
                raise ModelError(
                    f"{matrix.features} features of {name} are not divisible by tensor_parallel = {size}: "
                    f"{matrix.features} / {size} = {matrix.features / size:g}"
                )
            yield matrix


def _matrices(name: str, part: nn.Module, style: str) -> Iterator[tuple[str, nn.Linear]]:
    """The split matrices of a layer. An adapter beside one (peft's) is B · A: for a matrix split by its outputs B is
    split too, for one split by its inputs A is."""
    if isinstance(part, nn.Linear):
        yield name, part
        return
    wrapped: Any = part
    beside = "lora_B" if style == "colwise" else "lora_A"
    adapters = ((f"{beside}.{adapter}", linear) for adapter, linear in getattr(wrapped, beside).items())
    for inner, linear in (("base_layer", wrapped.base_layer), *adapters):
        yield f"{name}.{inner}", linear


def planned(
    base: nn.Module, dealt: bool = False, own: Mapping[str, str] | None = None
) -> list[tuple[str, nn.Module, str]]:
    """The modules that the model's plan names, or its `own`, each with its style, without experts that are `dealt`."""
    config: Any = base.config
    plan: dict[str, str] = {n: s for n, s in (config.base_model_tp_plan or {}).items() if n.startswith("layers.")}
    plan |= own or {}
    latent = {name: part for name, part in base.named_modules() if splits_by_heads(part)}
    parts = [
        (name, part, style)
        for name, part in base.named_modules()
        for pattern, style in plan.items()
        if fnmatch(name, pattern) and not (dealt and are_experts(part)) and name.rpartition(".")[0] not in latent
    ]
    # Plans differ from family to family, and some leave it whole.
    parts += [
        (f"{name}.{leaf}", part, HEADS[leaf])
        for name, module in latent.items()
        for leaf, part in module.named_children()
        if leaf in HEADS
    ]
    for name, part, style in parts:
        linear = isinstance(getattr(part, "base_layer", part), nn.Linear)
        fits = style == SUMMED or (style in ("colwise", "rowwise") and linear)
        if not fits:
            raise ModelError(
                f"{type(base).__name__} splits {name} {style!r}, which Plaudit does not support: "
                "set tensor_parallel = 1"
            )
    if not parts:
        raise ModelError(
            f"{type(base).__name__} has no tensor-parallel plan for its matrices: set tensor_parallel = 1"
        )  # fmt: skip
    return parts


def _check_own_heads(base: nn.Module, name: str, size: int) -> None:
    """The head count of a layer can differ from the config's."""
    attention: Any = base.get_submodule(name.rpartition(".")[0])
    heads = getattr(attention, "num_heads", None)
    if heads is not None and heads % size:
        raise ModelError(
            f"{heads} attention heads of {name} are not divisible by tensor_parallel = {size}: {heads} / {size} = "
            f"{heads / size:g}"
        )


def check_heads(base: nn.Module, size: int, own: Mapping[str, str] | None = None) -> None:
    heads, keys = _heads(base)
    if heads % size or (keys % size and size % keys):
        raise ModelError(
            f"{heads} attention heads over {keys} key-value heads are not divisible by tensor_parallel = {size} "
            f"({heads} / {size} = {heads / size:g}, {keys} / {size} = {keys / size:g}, {size} / {keys} = "
            f"{size / keys:g}): every rank needs whole heads, with their keys"
        )
    if keys < size:
        _check_shared(base, keys, size, own)


def _heads(base: nn.Module) -> tuple[int, int]:
    """The numbers of query heads and of key heads of attention; a latent is expanded to as many of both."""
    config: Any = base.config
    heads: int = config.num_attention_heads
    if any(splits_by_heads(part) for part in base.modules()):
        return heads, heads
    return heads, getattr(config, "num_key_value_heads", None) or heads


def _check_shared(base: nn.Module, keys: int, size: int, own: Mapping[str, str] | None) -> None:
    """Raise unless it is clear which rows of a matrix belong to which key-value head."""
    rows: dict[str, int] = {}
    for name, part, style in planned(base, dealt=True, own=own):
        home, _, leaf = name.rpartition(".")
        width = getattr(base.get_submodule(home), "head_dim", None)
        if width is not None and style == "colwise":
            rows.setdefault(home, 0)
            if leaf in KEYS_AND_VALUES:
                weight: Any = part.weight
                rows[home] = weight.shape[0] if weight.shape[0] == keys * width else -1
    if not rows or min(rows.values()) <= 0:
        raise ModelError(
            f"{type(base).__name__} has {keys} key-value heads for tensor_parallel = {size} ranks but lacks the "
            f"matrices {' and '.join(KEYS_AND_VALUES)} that ranks could share: set tensor_parallel to {keys} or fewer"
        )
