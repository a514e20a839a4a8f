"""A module whose matrices are split over ranks, by the plan that comes with the model in transformers.

Each rank keeps whole heads: columns of q, k, v, gate and up, rows of o and down. A rank's layers are plain modules over
its own part of the weights, and only the row-wise ones exchange anything: their products add up over the ranks. So
hidden rows are whole, and equal, on every rank of a stage (stages.py); embeddings, norms and heads stay as they are.
(torch's DTensor, which training uses, would do the same arithmetic at the price of a dispatch for every operation, and
the lean trunk could not read its weights.) All of it is done to a module on the meta device, before weights are read.
"""

from __future__ import annotations

from collections.abc import Iterator
from copy import deepcopy
from fnmatch import fnmatch
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn

from plaudit.core.model.attention import use_packed_attention
from plaudit.core.model.fusion import are_experts
from plaudit.core.model.packing import pack, trunk
from plaudit.core.model.stages import RankPosition, drop_embeddings, drop_head, keep_layers, stages_of
from plaudit.errors import ModelError
from plaudit.models.part import Read, fill
from plaudit.models.weights import Cut

TRIED = 8  # rows of a trial
SUMMED = "replicated_with_grad_allreduce"
"""A part that every rank holds whole and uses for its own heads only, such as Qwen 3's norms of queries and keys."""


class RowLinear(nn.Linear):
    """Has this rank's columns of a matrix whose input is split; the ranks' products add up in `group`."""

    group: dist.ProcessGroup | None = None

    def forward(self, input: Tensor) -> Tensor:
        out = F.linear(input, self.weight)
        dist.all_reduce(out, group=self.group)
        return out if self.bias is None else out + self.bias


def keep_part(module: nn.Module, place: RankPosition) -> dict[str, Cut]:
    """Make a module on the meta device one rank's part of it, in place: its layers, and of their matrices its rows or
    columns. Says which those are, by the names of the tensors; ModelError if the module cannot be split so."""
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
    parts = list(split_parts(base, size)) if size > 1 else []
    prefix = next(name for name, part in module.named_modules() if part is base)
    for name, part, style in parts:
        count = (part.out_features if style == "colwise" else part.in_features) // size
        cut = Cut(0 if style == "colwise" else 1, place.share * count, (place.share + 1) * count)
        shape = (part.in_features, count) if style == "colwise" else (count, part.out_features)
        made = nn.Linear if style == "colwise" else RowLinear
        home, _, leaf = name.rpartition(".")
        linear = made(*shape, bias=part.bias is not None, device="meta", dtype=part.weight.dtype)
        setattr(base.get_submodule(home), leaf, linear)
        cuts[f"{prefix}.{name}.weight"] = cut
        if part.bias is not None and style == "colwise":
            cuts[f"{prefix}.{name}.bias"] = cut
    return cuts


def join(module: nn.Module, group: dist.ProcessGroup) -> None:
    """Let a rank's part add up with those of its stage."""
    for part in module.modules():
        if isinstance(part, RowLinear):
            part.group = group


def check_split(whole: nn.Module, place: RankPosition, read: Read, group: dist.ProcessGroup, device: str) -> None:
    """All ranks of a stage together: whether one layer, split, computes the rows that it computes whole. `whole` is the
    module on the meta device, of which `read` has the weights."""
    if place.tensor_parallel == 1:
        return
    layer = place.layers(len(trunk(whole).layers))[0]  # type: ignore[arg-type]
    before, after = (_layer_rows(whole, layer, p, read, group, device) for p in (RankPosition(0, 1), place))
    scale = before.abs().max().clamp(min=1e-6)
    tolerance = 1e-3 if before.dtype in (torch.float32, torch.float64) else 5e-2
    if before.isfinite().all() and (after - before).abs().max() > tolerance * scale:
        raise ModelError(
            f"{type(whole).__name__} computes other rows when it is split over {place.tensor_parallel} ranks; its plan "
            "cannot be relied on: set tensor_parallel = 1"
        )


@torch.inference_mode()
def _layer_rows(
    whole: nn.Module, layer: int, place: RankPosition, read: Read, group: dist.ProcessGroup, device: str
) -> Tensor:  # fmt: skip
    """What a trunk of this layer alone makes of a few rows."""
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


def split_parts(base: nn.Module, size: int, dealt: bool = False) -> Iterator[tuple[str, nn.Linear, str]]:
    """The matrices of a trunk that `size` ranks share, each with its style; ModelError if they cannot. `dealt`: ranks
    have its experts whole, by turns."""
    parts = (
        each for name, part, style in planned(base, dealt) if style != SUMMED for each in _matrices(name, part, style)
    )
    for name, part, style in parts:
        count = part.out_features if style == "colwise" else part.in_features
        if count % size:
            raise ModelError(
                f"{name} has {count} rows to split over tensor_parallel = {size} ranks: {count} / {size} = "
                f"{count / size:g} is no whole number"
            )
        yield name, part, style
    check_heads(base, size)


def _matrices(name: str, part: nn.Module, style: str) -> Iterator[tuple[str, nn.Linear, str]]:
    """Of a layer. An adapter beside it (peft's) is B · A: of one that is split by its outputs B is too, of one that is
    split by its inputs A is."""
    if isinstance(part, nn.Linear):
        yield name, part, style
        return
    wrapped: Any = part
    beside = "lora_B" if style == "colwise" else "lora_A"
    adapters = ((f"{beside}.{adapter}", linear) for adapter, linear in getattr(wrapped, beside).items())
    for inner, linear in (("base_layer", wrapped.base_layer), *adapters):
        yield f"{name}.{inner}", linear, style


def planned(base: nn.Module, dealt: bool = False) -> list[tuple[str, nn.Module, str]]:
    """What of the layers the model's plan names, each with its style, without experts that are `dealt` out."""
    config: Any = base.config
    plan: dict[str, str] = {n: s for n, s in (config.base_model_tp_plan or {}).items() if n.startswith("layers.")}
    parts = [
        (name, part, style)
        for name, part in base.named_modules()
        for pattern, style in plan.items()
        if fnmatch(name, pattern) and not (dealt and are_experts(part))
    ]
    for name, part, style in parts:
        linear = isinstance(getattr(part, "base_layer", part), nn.Linear)
        fits = style == SUMMED or (style in ("colwise", "rowwise") and linear)
        if not fits:
            raise ModelError(
                f"{type(base).__name__} wants {name} split {style!r}, which Plaudit does not do: "
                "set tensor_parallel = 1"
            )
    if not parts:
        raise ModelError(
            f"{type(base).__name__} has no plan of how to split its matrices: set tensor_parallel = 1"
        )  # fmt: skip
    return parts


def check_heads(base: nn.Module, size: int) -> None:
    config: Any = base.config
    heads, keys = config.num_attention_heads, getattr(config, "num_key_value_heads", None) or config.num_attention_heads
    if heads % size or keys % size:
        raise ModelError(
            f"{heads} attention heads over {keys} key-value heads do not divide by tensor_parallel = {size} "
            f"({heads} / {size} = {heads / size:g}, {keys} / {size} = {keys / size:g}): every rank needs whole heads, "
            "with their keys"
        )
