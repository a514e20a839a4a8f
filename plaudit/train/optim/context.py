"""Context parallelism: each rank has a slice of a packed row's tokens, and computes attention over all of them for a
share of the heads.

Everything but attention is per token, so a rank needs no other rank's rows for it. Before and after attention an
all-to-all exchanges tokens for heads and back (Ulysses, arXiv 2309.14509): layouts, windows, soft caps and shared
prompts are those of the whole row. Values read at single rows are summed over the ranks, so all of them have the loss
of the whole row; gradients of weights are summed over them as over data-parallel ranks.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn
from torch.autograd.function import Function, once_differentiable

from plaudit.core.model.attention import Layout, Rule
from plaudit.core.model.latent import Latent
from plaudit.core.model.mixers import mixers_of
from plaudit.core.model.packing import Packed, trunk
from plaudit.errors import ModelError
from plaudit.train.run.ranks import Group


class SlicedLayout(Layout):
    """The layout of a row split over ranks; `whole` is the layout of the whole row."""

    def __init__(self, whole: Layout, tokens: int, group: Group) -> None:
        super().__init__((), torch.empty(0))
        self.whole = whole
        whole.ranks = group.size
        self.group = group
        self.counts = [len(group.share(tokens, index)) for index in range(group.size)]

    def attend(self, layer: int, query: Tensor, key: Tensor, value: Tensor, rule: Rule) -> Tensor:
        if rule.sinks is not None:
            rule = replace(rule, sinks=rule.sinks.chunk(self.group.size)[self.group.index])
        copies = math.lcm(key.shape[1], self.group.size) // key.shape[1]
        if copies > 1:  # ranks share a key-value head
            key, value = (each.repeat_interleave(copies, 1) for each in (key, value))
        own = self.counts[self.group.index]
        query, key, value = (self._all_tokens(each[:own]) for each in (query, key, value))
        out = self._all_heads(self.whole.attend(layer, query, key, value, rule))
        return out if own else F.pad(out, (0, 0, 0, 0, 0, 1))  # for a padding row: see `sliced`

    def attend_latent(self, layer: int, latent: Latent, query: Tensor, rows: Tensor, rule: Rule) -> Tensor:
        """Uses the keys and values expanded from the latent: heads can be split over ranks, a single latent row
        cannot."""
        return self.attend(layer, query, *latent.expanded(rows), rule)

    def _all_tokens(self, x_RHD: Tensor) -> Tensor:
        """(own tokens, heads, D) -> (all tokens, own heads, D)."""
        (own, heads, width), size = x_RHD.shape, self.group.size
        parts_NRhD = x_RHD.reshape(own, size, heads // size, width).transpose(0, 1)
        return exchanged(parts_NRhD.flatten(0, 1), [own] * size, self.counts, self.group)

    def _all_heads(self, x_ThD: Tensor) -> Tensor:
        own, size = self.counts[self.group.index], self.group.size
        parts = exchanged(x_ThD, self.counts, [own] * size, self.group)
        return parts.view(size, own, *parts.shape[1:]).transpose(0, 1).flatten(1, 2)


def sliced(packed: Packed, group: Group) -> Packed:
    """This rank's tokens of a row; the metadata of its sequences stays that of the whole row. With fewer tokens than
    ranks, ranks without tokens compute one that is not read, since modules cannot run on empty inputs."""
    if group.size == 1:
        return packed
    tokens = packed.input_ids.shape[1]
    share = group.share(tokens)
    here = slice(share.start, max(share.stop, share.start + 1))
    return replace(
        packed, input_ids=packed.input_ids[:, here], position_ids=packed.position_ids[:, here],
        layout=SlicedLayout(packed.layout, tokens, group),
    )  # fmt: skip


def summed(part: Tensor, group: Group) -> Tensor:
    """The sum over the ranks. All of them compute the same from it, so the gradient needs no exchange."""
    if group.size == 1:
        return part
    total: Tensor = _Sum.apply(part, group)  # type: ignore[no-untyped-call]
    return total


def alike(whole: Tensor, group: Group) -> Tensor:
    """A tensor that is equal on all ranks, of which each uses a part: its gradient is summed over the ranks."""
    same: Tensor = _Same.apply(whole, group)  # type: ignore[no-untyped-call]
    return same


def placed(at: Tensor, values: Tensor, count: int, group: Group) -> Tensor:
    """(count, ...): the values of all ranks at their positions `at`, and 0 elsewhere."""
    zeros = torch.zeros(count, *values.shape[1:], dtype=values.dtype, device=values.device)
    return summed(zeros.index_put((at,), values), group)


def check_context(module: nn.Module, tensor_parallel: int, context_parallel: int) -> None:
    """Raise if context parallelism cannot split the rows of a module, which may be on the meta device."""
    if mixers_of(module):
        raise ModelError(
            f"{type(trunk(module)).__name__} has recurrent layers, which go over whole sequences, and "
            f"resources.context_parallel = {context_parallel} splits them: use data_parallel instead"
        )
    config: Any = trunk(module).config
    config = config.get_text_config()
    heads, keys = config.num_attention_heads, getattr(config, "num_key_value_heads", None) or config.num_attention_heads
    heads, keys = heads // tensor_parallel, max(1, keys // tensor_parallel)
    if heads % (size := math.lcm(keys, context_parallel)):
        of = f" on a rank of tensor_parallel = {tensor_parallel}" if tensor_parallel > 1 else ""
        raise ModelError(
            f"{heads} attention heads over {keys} key-value heads{of} cannot be split over context_parallel = "
            f"{context_parallel} ranks: {heads} / lcm({keys}, {context_parallel}) = {heads / size:g} is not a whole "
            "number"
        )


class _Exchange(Function):
    @staticmethod
    def forward(ctx: Any, rows: Tensor, sent: Sequence[int], received: Sequence[int], group: Group) -> Tensor:
        ctx.how = sent, received, group
        return all_to_all(rows, sent, received, group)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None, None, None]:
        sent, received, group = ctx.how
        return all_to_all(grad, received, sent, group), None, None, None


class _Sum(Function):
    @staticmethod
    def forward(ctx: Any, part: Tensor, group: Group) -> Tensor:
        total = part.contiguous().clone()
        dist.all_reduce(total, group=group.channel)
        return total

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None]:
        return grad, None


class _Same(Function):
    @staticmethod
    def forward(ctx: Any, whole: Tensor, group: Group) -> Tensor:
        ctx.group = group
        return whole.view_as(whole)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None]:
        total = grad.contiguous().clone()
        dist.all_reduce(total, group=ctx.group.channel)
        return total, None


def exchanged(rows: Tensor, sent: Sequence[int], received: Sequence[int], group: Group) -> Tensor:
    """All-to-all of rows, with gradients: `sent` and `received` are the numbers of rows by rank."""
    out: Tensor = _Exchange.apply(rows, sent, received, group)  # type: ignore[no-untyped-call]
    return out


def all_to_all(rows: Tensor, sent: Sequence[int], received: Sequence[int], group: Group) -> Tensor:
    out = rows.new_empty(sum(received), *rows.shape[1:])
    dist.all_to_all_single(out, rows.contiguous(), list(received), list(sent), group.channel)
    return out
