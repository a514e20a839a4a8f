"""Packed attention on a GPU: one kernel for sequences of any lengths.

Half precision uses our Triton kernels, and torch's flash attention for their gradients; gradients of attention over
latents are computed with the keys and values that the module expands them to. float32, and the gradients of soft caps,
which flash attention does not support, use the grouped path of the CPU, on the GPU.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import cache
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor
from torch.autograd.function import Function, once_differentiable
from torch.autograd.graph import saved_tensors_hooks

from plaudit.core.model.attention import Layout, Rule, send
from plaudit.core.model.latent import Latent
from plaudit.core.model.operations import with_gradients_of

HALF = (torch.float16, torch.bfloat16)
MOST_DIM = 256


class VarlenLayout(Layout):
    """spans (first row, new tokens, tokens before) in row order; `rows[i]` has the row of each key of span i, in the
    packed row itself or in a cache."""

    def __init__(
        self, spans: Sequence[tuple[int, int, int]], rows: Sequence[np.ndarray], device: torch.device | str,
        grouped: Callable[[], Layout], *, end_to_end: bool | None = None,
    ) -> None:  # fmt: skip
        super().__init__((), torch.empty(0), spans, rows)
        new, before = (np.array([span[field] for span in spans]) for field in (1, 2))
        whole = new + before
        self.longest_query, self.longest_key = int(new.max()), int(whole.max())
        # One array and one copy: small transfers cost as much as large ones.
        numbers = np.concatenate([[0], new.cumsum(), [0], whole.cumsum(), whole, before]).astype(np.int32)
        sent = send(numbers, device)
        sizes = [len(spans) + 1, len(spans) + 1, len(spans), len(spans)]
        self.query_ends, self.key_ends, self.key_counts, self.before = torch.split(sent, sizes)
        self.key_starts = self.key_ends[:-1]
        self.counts, self.before_counts = new, before
        self.key_rows: Tensor | None = None
        if not (end_to_end if end_to_end is not None else not before.any()):
            self.key_rows = send(np.concatenate(rows), device)
        self._tiles: Tensor | None = None
        self._token_spans: tuple[Tensor, Tensor, Tensor] | None = None
        self._grouped = grouped
        self._made: Layout | None = None

    def attend(self, layer: int, query: Tensor, key: Tensor, value: Tensor, rule: Rule) -> Tensor:
        learning = torch.is_grad_enabled() and query.requires_grad
        by_products = learning and (rule.latent is not None or (rule.softcap is not None and rule.sinks is not None))
        if not supported(query, value, rule) or by_products:
            return self.grouped.attend(layer, query, key, value, rule)
        if learning and rule.softcap is not None:
            return with_gradients_of(
                lambda query, key, value: self.grouped.attend(layer, query, key, value, rule),
                lambda query, key, value: self.varlen(query, *self.context(layer, key, value), self.spans, rule),
                query, key, value,
            )  # fmt: skip
        if rule.latent is not None:
            rows, _ = self.context(layer, key, value)
            return self.over_latents(query, rows, *self.token_spans, rule)
        fits = not learning or _backward_fits(query.shape[1], key.shape[1], query.shape[2], query.dtype, query.device)
        if rule.sinks is not None and not fits:
            return self.grouped.attend(layer, query, key, value, rule)
        keys, values = self.context(layer, key, value)
        if learning:
            return (_attention if fits else _flash)(query, keys, values, self, rule)
        return self.varlen(query, keys, values, self.spans, rule)

    def attend_latent(self, layer: int, latent: Latent, query: Tensor, rows: Tensor, rule: Rule) -> Tensor:
        learning = torch.is_grad_enabled() and (query.requires_grad or rows.requires_grad)
        (_, heads, dim), widest = query.shape, max(query.shape[2], latent.width)
        takes = query.dtype in HALF and not rule.dropout and dim % 8 == widest % 8 == 0 and widest <= MOST_DIM
        if not learning or not takes or not _backward_fits(heads, heads, widest, query.dtype, query.device):
            return super().attend_latent(layer, latent, query, rows, rule)
        return _latent_attention(query, *latent.expanded(rows), latent, rows, self, rule)

    @property
    def token_spans(self) -> tuple[Tensor, Tensor, Tensor]:
        """For every query row, where its keys begin and its position; and the rows in tiles."""
        if self._token_spans is None:
            from plaudit.core.kernels import latent_tiles

            new, before, whole = self.counts, self.before_counts, self.counts + self.before_counts
            starts = np.repeat(whole.cumsum() - whole, new)
            positions = np.arange(new.sum()) - np.repeat(new.cumsum() - new - before, new)
            tiles = latent_tiles(new)
            numbers = np.concatenate([starts, positions, tiles.reshape(-1)]).astype(np.int32)
            sent = send(numbers, self.query_ends.device)
            first, second, last = torch.split(sent, [len(starts), len(positions), tiles.size])
            self._token_spans = first, second, last.view(-1, 2)
        return self._token_spans

    @property
    def spans(self) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        return self.query_ends, self.key_starts, self.key_counts, self.tiles

    def attend_wanted(
        self, layer: int, wanted: Tensor, query: Tensor, keys: Tensor, values: Tensor, rule: Rule
    ) -> Tensor:
        if not supported(query, values, rule):
            return self.grouped.attend_wanted(layer, wanted, query, keys, values, rule)
        # Every wanted row is a sequence of one query, which attends to the keys up to its own position.
        count = len(wanted)
        sequence = torch.searchsorted(self.query_ends, wanted.int(), right=True) - 1
        position = self.before[sequence] + wanted.int() - self.query_ends[sequence]
        if rule.latent is not None:
            return self.over_latents(query, keys, self.key_starts[sequence], position, None, rule)
        ends = torch.arange(count + 1, dtype=torch.int32, device=wanted.device)
        tiles = torch.stack([ends[:-1], torch.zeros_like(ends[:-1])], dim=1).contiguous()
        return self.varlen(query, keys, values, (ends, self.key_starts[sequence], position + 1, tiles), rule)

    @property
    def tiles(self) -> Tensor:
        if self._tiles is None:
            from plaudit.core.kernels import query_tiles

            self._tiles = send(query_tiles(self.counts), self.query_ends.device)
        return self._tiles

    @property
    def grouped(self) -> Layout:
        if self._made is None:
            self._made = self._grouped()
            self._made.ranks = self.ranks
        return self._made

    def over_latents(
        self, query: Tensor, rows: Tensor, starts: Tensor, positions: Tensor, tiles: Tensor | None, rule: Rule,
        sums: Tensor | None = None,
    ) -> Tensor:  # fmt: skip
        from plaudit.core.kernels import latent_attention

        assert rule.latent is not None
        assert rule.scale is not None
        return latent_attention(
            query, rows, rule.latent, positions, scale=rule.scale, starts=starts, places=self.key_rows, tiles=tiles,
            sums=sums,
        )  # fmt: skip

    def varlen(
        self, query: Tensor, keys: Tensor, values: Tensor, spans: tuple[Tensor, Tensor, Tensor, Tensor], rule: Rule,
        sums: Tensor | None = None,
    ) -> Tensor:  # fmt: skip
        from plaudit.core.kernels import varlen_attention

        scale = query.shape[-1] ** -0.5 if rule.scale is None else rule.scale
        return varlen_attention(
            query, keys, values, *spans, scale=scale, window=rule.window, key_rows=self.key_rows, softcap=rule.softcap,
            sinks=rule.sinks, sums=sums,
        )  # fmt: skip


class _Attention(Function):
    """Forward by our kernel, whose bits a decode step repeats; backward by torch's flash attention. A sink contributes
    to a query's sum of exponentials and has no value: that sum is all that the backward pass needs of it."""

    @staticmethod
    def forward(
        ctx: Any, query: Tensor, keys: Tensor, values: Tensor, sinks: Tensor | None, layout: VarlenLayout, rule: Rule
    ) -> Tensor:
        sums = torch.empty(query.shape[1], query.shape[0], device=query.device)
        out = layout.varlen(query, keys, values, layout.spans, rule, sums)
        ctx.save_for_backward(query, keys, values, sinks, out, sums)
        ctx.layout, ctx.rule = layout, rule
        return out

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, Tensor, Tensor, Tensor | None, None, None]:
        query, keys, values, sinks, out, sums = ctx.saved_tensors
        to_query, to_keys, to_values = _flash_backward(ctx.layout, ctx.rule, query, keys, values, out, sums, grad)
        to_sinks = None
        if sinks is not None and ctx.needs_input_grad[3]:
            share = (sinks.float()[:, None] - sums).exp()
            to_sinks = -(share * (grad.float() * out.float()).sum(-1).T).sum(1).to(sinks.dtype)
        return to_query, to_keys, to_values, to_sinks, None, None


def _flash_backward(
    layout: VarlenLayout, rule: Rule, query: Tensor, keys: Tensor, values: Tensor, out: Tensor, sums: Tensor,
    grad: Tensor,
) -> tuple[Tensor, Tensor, Tensor]:  # fmt: skip
    rows = layout.key_rows
    gathered = (keys, values) if rows is None else (keys.index_select(0, rows), values.index_select(0, rows))
    window = -1 if rule.window is None else rule.window - 1
    unused = torch.zeros(2, dtype=torch.uint64, device=query.device)  # of dropout
    to_query, to_keys, to_values = torch.ops.aten._flash_attention_backward(
        grad.contiguous(), query, *gathered, out, sums, layout.query_ends, layout.key_ends, layout.longest_query,
        layout.longest_key, 0.0, True, unused, unused, scale=rule.scale, window_size_left=window, window_size_right=0,
    )  # fmt: skip
    if rows is not None:
        to_keys, to_values = (
            torch.zeros_like(whole).index_add_(0, rows, part) for whole, part in ((keys, to_keys), (values, to_values))
        )
    return to_query, to_keys, to_values


def _attention(query: Tensor, keys: Tensor, values: Tensor, layout: VarlenLayout, rule: Rule) -> Tensor:
    out: Tensor = _Attention.apply(query, keys, values, rule.sinks, layout, rule)  # type: ignore[no-untyped-call]
    return out


class _LatentAttention(Function):
    """Forward over latents, with the bits of a decode step; backward by torch's flash attention, for the keys and
    values that the module expands them to."""

    @staticmethod
    def forward(
        ctx: Any, query: Tensor, keys: Tensor, values: Tensor, latent: Latent, rows: Tensor, layout: VarlenLayout,
        rule: Rule,
    ) -> Tensor:  # fmt: skip
        sums = torch.empty(query.shape[1], query.shape[0], device=query.device)
        scale = query.shape[-1] ** -0.5 if rule.scale is None else rule.scale
        scaled = replace(rule, scale=scale, latent=latent.rank)
        summed = layout.over_latents(latent.absorbed(query), rows, *layout.token_spans, scaled, sums)
        out = latent.restored(summed)
        ctx.save_for_backward(query, keys, values, None, out, sums)
        ctx.layout, ctx.rule = layout, scaled
        return out

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        query, keys, values, _, out, sums = ctx.saved_tensors
        dim, width = query.shape[-1], values.shape[-1]
        widest = max(dim, width)
        query, keys, values, out, grad = (F.pad(x, (0, widest - x.shape[-1])) for x in (query, keys, values, out, grad))
        to_query, to_keys, to_values = _flash_backward(ctx.layout, ctx.rule, query, keys, values, out, sums, grad)
        return to_query[..., :dim], to_keys[..., :dim], to_values[..., :width], None, None, None, None


def _latent_attention(
    query: Tensor, keys: Tensor, values: Tensor, latent: Latent, rows: Tensor, layout: VarlenLayout, rule: Rule
) -> Tensor:
    out: Tensor = _LatentAttention.apply(query, keys, values, latent, rows.detach(), layout, rule)  # type: ignore[no-untyped-call]
    return out


def _flash(query: Tensor, keys: Tensor, values: Tensor, layout: VarlenLayout, rule: Rule) -> Tensor:
    """torch's own kernel, forward and backward."""
    if layout.key_rows is not None:
        keys, values = keys.index_select(0, layout.key_rows), values.index_select(0, layout.key_rows)
    window = -1 if rule.window is None else rule.window - 1
    out: Tensor = torch.ops.aten._flash_attention_forward(
        query, keys, values, layout.query_ends, layout.key_ends, layout.longest_query, layout.longest_key, 0.0, True,
        False, scale=rule.scale, window_size_left=window, window_size_right=0,
    )[0]  # fmt: skip
    return out


@cache
def _backward_fits(heads: int, kv_heads: int, dim: int, dtype: torch.dtype, device: torch.device) -> bool:
    """Whether torch's backward pass accepts our forward's outputs in place of its own, tried on random rows."""
    generator = torch.Generator(device).manual_seed(0)
    sizes = (heads, kv_heads, kv_heads, heads)
    *inputs, grad = (torch.randn(75, n, dim, generator=generator, device=device).to(dtype) for n in sizes)
    layout = VarlenLayout([(0, 70, 0), (70, 5, 0)], [], device, lambda: layout, end_to_end=True)
    gradients: list[tuple[Tensor, ...]] = []
    # Separate hooks: where the first use is in a layer that will be recomputed, that layer's hooks must not see this.
    with torch.enable_grad(), saved_tensors_hooks(lambda kept: kept, lambda kept: kept):
        for attend in (_attention, _flash):
            query, keys, values = (x.clone().requires_grad_() for x in inputs)
            out = attend(query, keys, values, layout, Rule())
            gradients.append(torch.autograd.grad(out, (query, keys, values), grad))
    fits = all(bool((a - b).norm() <= 0.02 * b.norm()) for a, b in zip(*gradients, strict=True))
    if not fits:
        warnings.warn(
            "torch's flash attention does not accept the sums of Plaudit's kernel here, so the learner uses "
            "torch's own: its log-probs are not bit-equal to the engine's", stacklevel=2,
        )  # fmt: skip
    return fits


def supported(query: Tensor, value: Tensor, rule: Rule) -> bool:
    dim = query.shape[-1]
    if rule.latent is not None:
        return query.dtype in HALF and not rule.dropout
    return (
        query.dtype in HALF and not rule.dropout and dim <= MOST_DIM and dim % 8 == 0
        and value.shape[-1] == dim
    )  # fmt: skip
