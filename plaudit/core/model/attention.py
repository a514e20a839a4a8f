"""Attention over a packed row. transformers calls `packed_attention`; its `layout` argument determines which tokens
attend to which.

Shapes: T packed tokens, B sequences of a group, Q and S their padded query and key counts, H heads, K key-value heads,
G = H / K, D head size.
"""

from __future__ import annotations

import inspect
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from types import MethodType
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint
from transformers import AttentionInterface

from plaudit.algo.tokens.products import choose_library
from plaudit.core.model.latent import Latent, pack_latents
from plaudit.core.model.mixers import Mixer, mix_whole, pack_mixers
from plaudit.core.model.operations import Rotation

ATTENTION = "plaudit"
SCORES = 32 * 2**20  # bytes of scores in a tile; a few copies of a tile exist at once
LEAST_QUERIES = 16  # minimum queries in a tile: with fewer, the matrix products are too thin
GATHERED = 64 * 2**20  # bytes of keys and values gathered at once for rows that are read one by one
HALVES = (torch.float16, torch.bfloat16)
LEAST_KEYS = 64  # of a product: torch computes small ones (below 400 multiplications) with a loop of its own
# Keys whose values are summed in one product. A library may split longer sums, in halves or elsewhere: MKL from 257
# keys on with AVX2 and from 385 on with AVX-512, OpenBLAS on ARM from 641 on.
SUMMED = 256


@dataclass(frozen=True)
class Rule:
    """What one layer adds to plain causal attention."""

    scale: float | None = None
    window: int | None = None  # a query attends to this many keys, itself included
    softcap: float | None = None
    sinks: Tensor | None = None  # (H,) logits that enter the softmax and have no value
    dropout: float = 0.0
    latent: int | None = None  # values are the first columns of the keys (this many), and are not stored separately

    @property
    def fused(self) -> bool:
        """Whether torch's fused kernels support it without copying the keys for every head."""
        return self.plain and self.latent is None

    @property
    def plain(self) -> bool:
        return self.softcap is None and self.sinks is None

    def values(self, keys: Tensor, values: Tensor) -> Tensor:
        """The values of these keys; `values` is what is stored beside them."""
        return values if self.latent is None else keys[..., : self.latent]


@dataclass(frozen=True)
class Group:
    """Sequences of similar length that share one attention call. Key j of a sequence is its token at position j."""

    queries: Tensor  # (B, Q) rows of the packed queries; short sequences repeat their last row
    keys: Tensor  # (B, S) rows of the tensor that stores the keys
    positions: Tensor  # (B, Q) position of each query in its sequence
    whole: bool  # queries are positions 0..Q-1 and keys the same tokens: plain causal attention
    alone: slice | None = None  # the rows of the queries, if they belong to one whole sequence

    def mask(self, window: int | None, dtype: torch.dtype) -> Tensor:
        """(B, 1, Q, S), 0 where a query attends to a key and -inf elsewhere. Padding keys come after every position."""
        return _mask(self.positions, 0, self.keys.shape[1], window, dtype)

    @cached_property
    def reach(self) -> tuple[list[int], list[int]]:
        """The lowest and highest position in each of the Q columns of queries."""
        low, high = torch.stack([self.positions.amin(0), self.positions.amax(0)]).tolist()
        return low, high


@dataclass(frozen=True)
class _Indices:
    """Indices into tensors of shape (rows · K, ...): the queries and keys of each group, by key-value head, and where
    each packed token is in the concatenated, flattened groups."""

    queries: Sequence[Tensor]  # (B, K, Q) each
    keys: Sequence[Tensor]  # (B, K, S) each
    restore: Tensor  # (T · K,)


@dataclass
class Layout:
    """Which packed tokens attend to which.

    restore   for each packed token, its index in the concatenated, flattened groups
    extents   per sequence: its first row, the number of its own tokens, the number before them; for recurrent layers
    rows_of   per sequence: the row of every token
    exact     plain products in one fixed order of sums (see `explicit`), independent of the other rows in the batch
    ranks     number of ranks that share the heads: tiles have as many queries as if one rank had all heads
    angles    cos and sin of every position, where available
    """

    groups: tuple[Group, ...]
    restore: Tensor
    extents: Sequence[tuple[int, int, int]] = ()
    rows_of: Sequence[np.ndarray] = ()
    exact: bool = False
    ranks: int = 1
    angles: tuple[Tensor, Tensor] | None = None
    _masks: dict[tuple[int, int | None, torch.dtype], Tensor] = field(default_factory=dict)
    _tile_masks: dict[tuple[int, int | None, torch.dtype], Tensor] = field(default_factory=dict)
    _places: dict[int, _Indices] = field(default_factory=dict)

    def attend(self, layer: int, query: Tensor, key: Tensor, value: Tensor, rule: Rule) -> Tensor:
        """query (T, H, D), key and value (T, K, D) of the new tokens -> (T, H, D)."""
        keys, values = self.context(layer, key, value)
        if not rule.fused or self.exact:
            return self._attend_products(query, (key, value), (keys, values), rule)
        flat = []
        for i, group in enumerate(self.groups):
            if group.alone is not None:
                q, k, v = (x[None, group.alone] for x in (query, key, value))
            elif group.whole:  # its keys are all new: they need not be looked up in a cache
                q, k, v = (rows_at(x, group.queries) for x in (query, key, value))
            else:
                q, k, v = rows_at(query, group.queries), rows_at(keys, group.keys), rows_at(values, group.keys)
            out = attend_group(q, k, v, self.mask_of(i, rule.window, query.dtype), rule)
            flat.append(out.flatten(0, 1))
        return rows_at(torch.cat(flat) if len(flat) > 1 else flat[0], self.restore)

    def _attend_products(
        self, query: Tensor, new: tuple[Tensor, Tensor], kept: tuple[Tensor, Tensor], rule: Rule
    ) -> Tensor:  # fmt: skip
        """With `products`. Rows are gathered by key-value head, so that they come in the order of the products."""
        T, H, D = query.shape
        K = new[0].shape[1]
        places = self._indices_of(K)
        q_rows = (query * (D**-0.5 if rule.scale is None else rule.scale)).reshape(T * K, -1)
        sources = [tuple(x.flatten(0, 1) for x in each) for each in (kept, new)]
        groups: Iterable[tuple[Tensor, ...]]
        if torch.is_grad_enabled() and query.requires_grad:
            # In one call: its backward pass goes over all rows once, instead of once per group.
            groups = zip(
                _taken(q_rows, places.queries), *(_taken(x, places.keys) for x in sources[1]), strict=True
            )  # fmt: skip
        else:
            groups = (
                (rows_at(q_rows, q), *(rows_at(x, k) for x in sources[group.whole]))
                for group, q, k in zip(self.groups, places.queries, places.keys, strict=True)
            )
        flat = []
        for i, (q, k, v) in enumerate(groups):
            B, _, Q, _ = q.shape
            out = self._attend_tiles(i, q.view(B, K, Q * H // K, D), k, rule.values(k, v), rule)
            flat.append(out.reshape(B * K * Q, -1))
        return rows_at(torch.cat(flat) if len(flat) > 1 else flat[0], places.restore).view(T, H, -1)

    def _indices_of(self, heads: int) -> _Indices:
        if heads not in self._places:
            by_head = torch.arange(heads, device=self.restore.device)
            queries, keys, order, done = [], [], [], 0
            for group in self.groups:
                queries.append(group.queries[:, None] * heads + by_head[:, None])
                keys.append(queries[-1] if group.whole else group.keys[:, None] * heads + by_head[:, None])
                place = torch.arange(queries[-1].numel(), device=by_head.device).view(queries[-1].shape)
                order.append(place.transpose(1, 2).reshape(-1, heads) + done)
                done += place.numel()
            self._places[heads] = _Indices(queries, keys, torch.cat(order)[self.restore].flatten())
        return self._places[heads]

    def _attend_tiles(self, index: int, q_BKRD: Tensor, k_BKSD: Tensor, v_BKSE: Tensor, rule: Rule) -> Tensor:
        """`products` in tiles of queries, over the keys that a tile's queries attend to: memory grows with the length
        and not with its square, gradients included, for which a tile is recomputed."""
        group = self.groups[index]
        B, K, R, _ = q_BKRD.shape
        Q, S = group.queries.shape[1], k_BKSD.shape[2]
        G = R // Q
        size = max(LEAST_QUERIES, SCORES // (B * K * G * self.ranks * S * 4))
        outputs = []
        for begin in reversed(range(0, Q, size)):  # the longest first: the others reuse its memory
            tile = slice(begin, begin + size)
            low, high = (each[tile] for each in group.reach)
            first = 0 if rule.window is None else max(0, min(low) - rule.window + 1) // SUMMED * SUMMED
            end = min(S, max(high) + 1)
            keys, positions = slice(first, end), group.positions[:, tile]
            parts = q_BKRD[:, :, begin * G : (begin + size) * G], k_BKSD[:, :, keys], v_BKSE[:, :, keys]
            if size >= Q:
                outputs.append(products(*parts, self._whole_mask(index, keys, rule.window, q_BKRD.dtype), rule))
            elif torch.is_grad_enabled() and q_BKRD.requires_grad:
                outputs.append(checkpoint(_tile, *parts, positions, first, rule, use_reentrant=False))
            else:
                outputs.append(_tile(*parts, positions, first, rule))
        return torch.cat(outputs[::-1], dim=2) if len(outputs) > 1 else outputs[0]

    def _whole_mask(self, index: int, keys: slice, window: int | None, dtype: torch.dtype) -> Tensor:
        """The mask of a group in one tile: built once for all layers with this window."""
        made = self._tile_masks.get((index, window, dtype))
        if made is None:
            made = _mask(self.groups[index].positions, keys.start, keys.stop, window, dtype)
            self._tile_masks[index, window, dtype] = made
        return made

    def attend_rotated(
        self, layer: int, rotation: Rotation, query: Tensor, key: Tensor, value: Tensor, rule: Rule
    ) -> Tensor:
        """As `attend`, for queries and keys that are not rotated yet."""
        query, key = rotation.both(query, key)
        return self.attend(layer, query, key, value, rule)

    def attend_latent(self, layer: int, latent: Latent, query: Tensor, rows: Tensor, rule: Rule) -> Tensor:
        """query (T, H, D) over the keys and values that `latent` would expand from rows (T, 1, R + P) -> (T, H, E)."""
        scale = query.shape[-1] ** -0.5 if rule.scale is None else rule.scale
        rule, rows = replace(rule, scale=scale, latent=latent.rank), latent.same(rows)
        return latent.restored(self.attend(layer, latent.absorbed(query), rows, rows[..., :0], rule))

    def attend_wanted(
        self, layer: int, wanted: Tensor, query: Tensor, keys: Tensor, values: Tensor, rule: Rule
    ) -> Tensor:
        """Attention of the rows `wanted` alone, each a sequence of one query: query (W, H, D) -> (W, H, D). keys and
        values come from `context`."""
        place = self.restore[wanted]
        width = rule.values(keys, values).shape[2]
        out = torch.empty(len(query), query.shape[1], width, dtype=query.dtype, device=query.device)
        start = 0
        for group in self.groups:
            size = group.queries.numel()
            here = ((place >= start) & (place < start + size)).nonzero()[:, 0]
            width = group.keys.shape[1] * (keys[0].numel() + values[0].numel()) * keys.itemsize  # bytes per row
            for some in torch.split(here, max(1, GATHERED // width)) if len(here) else ():
                at = place[some] - start
                rows = group.keys[at // group.queries.shape[1]]
                mask = row_mask(group.positions.reshape(-1)[at], rows.shape[1], rule.window, query.dtype)
                k = rows_at(keys, rows)
                v = rule.values(k, rows_at(values, rows))
                attend = explicit if self.exact else attend_group
                out[some] = attend(query[some][:, None], k, v, mask, rule)[:, 0]
            start += size
        return out

    def mix(self, mixer: Mixer, hidden: Tensor) -> Tensor:
        """Apply a recurrent layer's mixer to the row: (1, T, width) -> (1, T, width)."""
        return mix_whole(mixer, hidden, self.extents, self.rows_of)

    def context(self, layer: int, key: Tensor, value: Tensor) -> tuple[Tensor, Tensor]:
        """The tensor that `Group.keys` indexes: here the row itself, in a paged layout the cache."""
        return key, value

    def mask_of(self, index: int, window: int | None, dtype: torch.dtype) -> Tensor | None:
        """The mask of a group, built once for all layers with this window; None where plain causal attention
        suffices."""
        group = self.groups[index]
        if window is not None and window >= group.keys.shape[1]:
            window = None
        if group.whole and window is None:
            return None
        made = self._masks.get((index, window, dtype))
        if made is None:
            made = self._masks[index, window, dtype] = group.mask(window, dtype)
        return made


def rows_at(x: Tensor, at: Tensor) -> Tensor:
    """x[at]: x (N, ...), `at` (...) row indices. Uses the variant whose backward pass sums in a fixed order:
    index_select on a CPU, which is also several times as fast, and x[at] on a GPU."""
    if torch.is_grad_enabled() and x.requires_grad and x.device.type != "cpu":
        return x[at]
    return x.index_select(0, at.flatten()).view(*at.shape, *x.shape[1:])


def _taken(x: Tensor, at: Sequence[Tensor]) -> list[Tensor]:
    """x[each] for each of `at`, gathered in one call."""
    taken = torch.split(rows_at(x, torch.cat([each.flatten() for each in at])), [each.numel() for each in at])
    return [rows.view(*each.shape, *x.shape[1:]) for rows, each in zip(taken, at, strict=True)]


def row_mask(position: Tensor, keys: int, window: int | None, dtype: torch.dtype) -> Tensor:
    """(B, 1, 1, keys) for one query per row at these positions: 0 where it attends to a key and -inf elsewhere."""
    return _mask(position[:, None], 0, keys, window, dtype)


def _mask(position_BQ: Tensor, first: int, end: int, window: int | None, dtype: torch.dtype) -> Tensor:
    """(B, 1, Q, end - first), for the keys from `first` on."""
    key, position = torch.arange(first, end, device=position_BQ.device), position_BQ[:, None, :, None]
    hidden = key > position
    if window is not None:
        hidden |= key <= position - window
    return torch.zeros(hidden.shape, dtype=dtype, device=hidden.device).masked_fill_(hidden, float("-inf"))


def attend_group(q_BQHD: Tensor, k_BSKD: Tensor, v_BSKD: Tensor, mask: Tensor | None, rule: Rule) -> Tensor:
    """Attention of a group -> (B, Q, H, D). mask: (B, 1, Q, S); without one, causal from the first token."""
    if not rule.fused:
        return explicit(q_BQHD, k_BSKD, v_BSKD, mask, rule)
    B, Q, H, _ = q_BQHD.shape
    K = k_BSKD.shape[2]
    q_BHQD, k_BKSD, v_BKSD = q_BQHD.transpose(1, 2), k_BSKD.transpose(1, 2), v_BSKD.transpose(1, 2)
    if Q == 1 and H != K:
        # One query: the heads of a key-value group become rows of one product, and no key is repeated.
        q_BKGD = q_BHQD.reshape(B, K, H // K, -1)
        out_BKGD = F.scaled_dot_product_attention(q_BKGD, k_BKSD, v_BKSD, mask, rule.dropout, scale=rule.scale)
        return out_BKGD.reshape(B, 1, H, -1)
    out_BHQD = F.scaled_dot_product_attention(
        q_BHQD, k_BKSD, v_BKSD, mask, rule.dropout, is_causal=mask is None, scale=rule.scale, enable_gqa=H != K
    )
    return out_BHQD.transpose(1, 2)


def _tile(
    q_BKRD: Tensor, k_BKSD: Tensor, v_BKSE: Tensor, position_BQ: Tensor, first: int, rule: Rule
) -> Tensor:  # fmt: skip
    """Attention over the keys from `first` on. The mask is built in here: as an input it would be saved for every
    layer."""
    mask = _mask(position_BQ, first, first + k_BKSD.shape[2], rule.window, q_BKRD.dtype)
    return products(q_BKRD, k_BKSD, v_BKSE, mask, rule)


def explicit(q_BQHD: Tensor, k_BSKD: Tensor, v_BSKD: Tensor, mask: Tensor | None, rule: Rule) -> Tensor:
    """`products` -> (B, Q, H, D). mask: (B, 1, Q, S); without one, causal from the first token."""
    B, Q, H, D = q_BQHD.shape
    S, K = k_BSKD.shape[1:3]
    q_BQHD = q_BQHD * (D**-0.5 if rule.scale is None else rule.scale)
    if mask is None:
        future_QS = torch.ones(Q, S, dtype=torch.bool, device=q_BQHD.device).triu(1)
        mask = q_BQHD.new_zeros(Q, S).masked_fill_(future_QS, float("-inf"))[None, None]
    q_BKRD = q_BQHD.reshape(B, Q, K, -1).transpose(1, 2).reshape(B, K, -1, D)
    out_BKRE = products(q_BKRD, k_BSKD.transpose(1, 2), v_BSKD.transpose(1, 2), mask, rule)
    return out_BKRE.reshape(B, K, Q, -1).transpose(1, 2).reshape(B, Q, H, -1)


def products(q_BKRD: Tensor, k_BKSD: Tensor, v_BKSE: Tensor, mask_B1QS: Tensor, rule: Rule) -> Tensor:
    """Attention by plain products, with soft caps and sinks -> (B, K, R, E). The R rows are the scaled queries of a
    key-value head: for each of the Q queries the heads of its group.

    Its order of sums is that of a decode step (device/cpu_decode.py): scores of at least two rows and LEAST_KEYS keys;
    a softmax over the keys from the first on, preceded by a sink; values in products of SUMMED keys, added in order.
    So a row has the same bits whatever rows and masked keys are in the batch, wherever the library's products do."""
    B, K, R, D = q_BKRD.shape
    S, Q = k_BKSD.shape[2], mask_B1QS.shape[2]
    if S < LEAST_KEYS:
        k_BKSD, v_BKSE = (F.pad(x, (0, 0, 0, LEAST_KEYS - S)) for x in (k_BKSD, v_BKSE))
        mask_B1QS = F.pad(mask_B1QS, (0, LEAST_KEYS - S), value=float("-inf"))
    # In the layout of a decode step: columns, or latents as they are stored.
    keys_NDS = (k_BKSD.mT if rule.latent is not None else k_BKSD.mT.contiguous()).flatten(0, 1)
    rows_NRD = q_BKRD.reshape(B * K, R, D)
    if q_BKRD.dtype in HALVES and not q_BKRD.is_cuda:  # scores of hundreds, rounded to eight bits, are another model's
        rows_NRD, keys_NDS = rows_NRD.float(), keys_NDS.float()
    scores_NRS = first_rows(torch.bmm(two_rows(rows_NRD), keys_NDS), R)
    if rule.softcap is not None:
        scores_NRS = torch.tanh(scores_NRS / rule.softcap) * rule.softcap
    scores_BKQGS = scores_NRS.view(B, K, Q, R // Q, -1).add_(mask_B1QS[:, :, :, None])
    if rule.sinks is not None:  # one more key, for the sink
        sink_BKQG1 = rule.sinks.to(scores_BKQGS.dtype).reshape(1, K, 1, -1, 1).expand(B, -1, Q, -1, 1)
        scores_BKQGS = torch.cat([sink_BKQG1, scores_BKQGS], dim=-1)
    weights_BKQGS = torch.softmax(scores_BKQGS, dim=-1, dtype=torch.float32).to(q_BKRD.dtype)
    if rule.sinks is not None:
        weights_BKQGS = weights_BKQGS[..., 1:]
    if rule.dropout:
        weights_BKQGS = F.dropout(weights_BKQGS, rule.dropout)
    return weighted(weights_BKQGS.reshape(B * K, R, -1), v_BKSE.flatten(0, 1)).view(B, K, R, -1)


def weighted(weights_NRS: Tensor, values_NSD: Tensor) -> Tensor:
    """(N, R, D): the values in sums of SUMMED keys from the first on, added in order."""
    rows = weights_NRS.shape[1]
    weights_NRS = two_rows(weights_NRS)
    if weights_NRS.shape[2] <= SUMMED:
        return first_rows(torch.bmm(weights_NRS, values_NSD), rows)
    out = torch.bmm(weights_NRS[..., :SUMMED], values_NSD[:, :SUMMED])
    for first in range(SUMMED, values_NSD.shape[1], SUMMED):
        keys = slice(first, first + SUMMED)
        weights, values = weights_NRS[..., keys], values_NSD[:, keys]
        if (missing := LEAST_KEYS - values.shape[1]) > 0:
            weights, values = F.pad(weights, (0, missing)), F.pad(values, (0, 0, 0, missing))
        out = out + torch.bmm(weights, values)
    return first_rows(out, rows)


def two_rows(x_NRD: Tensor) -> Tensor:
    """Duplicate a single row: alone it would be computed by another kernel."""
    return x_NRD if x_NRD.shape[1] > 1 else x_NRD.expand(-1, 2, -1)


def first_rows(x_NRD: Tensor, rows: int) -> Tensor:
    """The rows that were passed to `two_rows`. A slice of all rows would be copied in the backward pass."""
    return x_NRD if x_NRD.shape[1] == rows else x_NRD[:, :rows]


def packed_attention(
    module: nn.Module, query: Tensor, key: Tensor, value: Tensor, attention_mask: Tensor | None, *,
    layout: Layout | None = None, scaling: float | None = None, dropout: float = 0.0,
    sliding_window: int | None = None, softcap: float | None = None, s_aux: Tensor | None = None, **_: Any,
) -> tuple[Tensor, None]:  # fmt: skip
    """transformers' attention interface: query (1, H, T, D), key and value (1, K, T, D) -> (1, T, H, D)."""
    if layout is None:
        raise RuntimeError(
            f"{type(module).__name__} was set to packed attention but called without a layout: "
            "call it through plaudit.core, or restore it with model.set_attn_implementation('sdpa')"
        )
    rule = Rule(scaling, sliding_window, softcap, s_aux, dropout)
    layer: int = module.layer_idx  # type: ignore[assignment]
    rows, keys, values = (x[0].transpose(0, 1) for x in (query, key, value))
    if values.shape[-1]:
        return layout.attend(layer, rows, keys, values, rule)[None], None
    latent = Latent(module)
    if rule.window is None and rule.plain:
        return layout.attend_latent(layer, latent, rows, keys, rule)[None], None
    return layout.attend(layer, rows, *latent.expanded(keys), rule)[None], None


AttentionInterface.register(ATTENTION, packed_attention)


def use_packed_attention(model: nn.Module) -> None:
    choose_library(next(model.parameters()))
    if model.config._attn_implementation != ATTENTION:  # type: ignore[union-attr]
        model.set_attn_implementation(ATTENTION)  # type: ignore[operator]
        pack_mixers(model)
        pack_latents(model)
        number_shared(model)


def number_shared(model: nn.Module) -> None:
    """Make attention that several layers share (Zamba 2) use the index of the layer that calls it."""
    for part in model.modules():
        number = getattr(part, "layer_idx", None)
        if isinstance(number, int) and number < 0 and "layer_idx" in inspect.signature(type(part).forward).parameters:
            part.forward = MethodType(_numbered, part)


def _numbered(self: Any, *args: Any, **kwargs: Any) -> Any:
    called = inspect.signature(type(self).forward).bind(self, *args, **kwargs)
    self.layer_idx = called.arguments["layer_idx"]
    return type(self).forward(self, *args, **kwargs)


def send(values: np.ndarray, device: torch.device | str) -> Tensor:
    """Copy to the device; to a GPU from pinned memory, so that the host does not wait for the GPU's queued work."""
    tensor = torch.from_numpy(np.ascontiguousarray(values))
    return tensor if torch.device(device).type == "cpu" else tensor.pin_memory().to(device, non_blocking=True)


def group_spans(
    spans: Sequence[tuple[int, int, int]], alone: int, ratio: float = 1.25, slack: int = 4
) -> list[list[int]]:
    """Group (first row, new tokens, tokens before them) spans of similar shape: indices into `spans`, by group. A whole
    sequence of `alone` tokens or more is a group by itself."""
    order = sorted(range(len(spans)), key=lambda i: (spans[i][1], spans[i][2], i))
    groups: list[list[int]] = []
    for i in order:
        _, new, before = spans[i]
        if groups:
            _, new0, before0 = spans[groups[-1][0]]
            lone = new >= alone and not (before and before0)
            if (
                not lone
                and new <= new0 * ratio + slack
                and abs(before - before0) <= (new0 + before0) * (ratio - 1) + slack
            ):
                groups[-1].append(i)
                continue
        groups.append([i])
    return groups
