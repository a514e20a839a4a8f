"""A module whose matrices are split over ranks, by the plan that comes with the model in transformers.

Each rank keeps whole heads: columns of q, k, v, gate and up, rows of o and down. A rank's layers are plain modules over
its own part of the weights, and only the row-wise ones exchange anything: their products add up over the ranks. So
hidden rows are whole, and equal, on every rank, and embeddings, norms and heads stay as they are. (torch's DTensor,
which training uses, would do the same arithmetic at the price of a dispatch for every operation, and the lean trunk
could not read its weights.)
"""

from __future__ import annotations

from collections.abc import Iterator
from fnmatch import fnmatch
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn

from plaudit.core.attention import use_packed_attention
from plaudit.core.packing import hidden_rows, pack, trunk
from plaudit.errors import ModelError

SUMMED = "replicated_with_grad_allreduce"
"""A part that every rank holds whole and uses for its own heads only, such as Qwen 3's norms of queries and keys."""


class RowLinear(nn.Linear):
    """Has this rank's columns of a matrix whose input is split; the ranks' products add up."""

    def __init__(self, whole: nn.Linear, part: slice, group: dist.ProcessGroup) -> None:
        nn.Module.__init__(self)
        self.in_features, self.out_features = part.stop - part.start, whole.out_features
        self.weight = _kept(whole.weight[:, part])
        self.bias = whole.bias
        self.group = group

    def forward(self, input: Tensor) -> Tensor:
        out = F.linear(input, self.weight)
        dist.all_reduce(out, group=self.group)
        return out if self.bias is None else out + self.bias


def split(module: nn.Module, rank: int, size: int, group: dist.ProcessGroup, device: str) -> None:
    """Keep this rank's part of a module, in place, on a device. All ranks call it together: they compare the rows of a
    few tokens with those of the whole module, where it was."""
    base = trunk(module)
    parts = list(split_parts(base, size))
    ids = [t % module.config.get_text_config().vocab_size for t in (3, 1, 4, 1, 5, 9, 2, 6)]  # type: ignore[union-attr, operator]
    before = _rows(module, ids)
    for name, part, style in parts:
        home, _, leaf = name.rpartition(".")
        setattr(base.get_submodule(home), leaf, _narrowed(part, style, rank, size, group))
    after = _rows(module.to(device), ids).to(before.device)
    scale = before.abs().max().clamp(min=1e-6)
    tolerance = 1e-3 if before.dtype in (torch.float32, torch.float64) else 5e-2
    if before.isfinite().all() and (after - before).abs().max() > tolerance * scale:
        raise ModelError(
            f"{type(module).__name__} computes other rows when it is split over {size} ranks; its plan cannot be "
            "relied on: set tensor_parallel = 1"
        )


def split_parts(base: nn.Module, size: int) -> Iterator[tuple[str, nn.Linear, str]]:
    """The matrices of a trunk that `size` ranks share, each with its style; ModelError if they cannot."""
    for name, part, style in planned(base):
        if style == SUMMED:
            continue
        assert isinstance(part, nn.Linear)
        count = part.out_features if style == "colwise" else part.in_features
        if count % size:
            raise ModelError(
                f"{name} has {count} rows to split over tensor_parallel = {size} ranks: {count} / {size} = "
                f"{count / size:g} is no whole number"
            )
        yield name, part, style
    check_heads(base, size)


def planned(base: nn.Module) -> list[tuple[str, nn.Module, str]]:
    """The parts of the layers that the model's plan names, each with its style."""
    config: Any = base.config
    plan: dict[str, str] = {n: s for n, s in (config.base_model_tp_plan or {}).items() if n.startswith("layers.")}
    found = [
        (name, part, style)
        for name, part in base.named_modules()
        for pattern, style in plan.items()
        if fnmatch(name, pattern)
    ]
    for name, part, style in found:
        fits = style == SUMMED or (style in ("colwise", "rowwise") and isinstance(part, nn.Linear))
        if not fits:
            raise ModelError(
                f"{type(base).__name__} wants {name} split {style!r}, which Plaudit does not do: "
                "set tensor_parallel = 1"
            )
    if not found:
        raise ModelError(
            f"{type(base).__name__} has no plan of how to split its matrices: set tensor_parallel = 1"
        )  # fmt: skip
    return found


def check_heads(base: nn.Module, size: int) -> None:
    config: Any = base.config
    heads, keys = config.num_attention_heads, getattr(config, "num_key_value_heads", None) or config.num_attention_heads
    if heads % size or keys % size:
        raise ModelError(
            f"{heads} attention heads over {keys} key-value heads do not divide by tensor_parallel = {size} "
            f"({heads} / {size} = {heads / size:g}, {keys} / {size} = {keys / size:g}): every rank needs whole heads, "
            "with their keys"
        )


def _narrowed(part: nn.Linear, style: str, rank: int, size: int, group: dist.ProcessGroup) -> nn.Linear:
    count = (part.out_features if style == "colwise" else part.in_features) // size
    mine = slice(rank * count, (rank + 1) * count)
    if style == "rowwise":
        return RowLinear(part, mine, group)
    linear = nn.Linear(part.in_features, count, bias=part.bias is not None, device="meta")
    linear.weight = _kept(part.weight[mine])
    if part.bias is not None:
        linear.bias = _kept(part.bias[mine])
    return linear


def _kept(part: Tensor) -> nn.Parameter:
    """A copy, so that the whole can go."""
    return nn.Parameter(part.detach().clone(memory_format=torch.contiguous_format), requires_grad=False)


@torch.inference_mode()
def _rows(module: nn.Module, ids: list[int]) -> Tensor:
    use_packed_attention(module)
    return hidden_rows(module, pack([ids], next(module.parameters()).device))
