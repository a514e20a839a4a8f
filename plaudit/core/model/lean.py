"""The trunk of a Llama-shaped decoder, run on the module's own weights without the module overhead.

For small models on a CPU most of a step is overhead: nested module calls, norms and rotary embeddings of many small
operations; on a GPU it is launches. This is the same arithmetic in few calls, with `operations` for the steps between
the matrix products. It is used only for a module that has exactly these parts and whose own forward gave the same rows
in a trial; every other model runs unchanged. It has no weights of its own: they are read from the module in every
call, so new weights are used at once; several steps may share a copy of small ones (device/columns.py).
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager, nullcontext
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from plaudit.algo.tokens.products import CPU_MOST, SteadyProducts, least_rows
from plaudit.core.model.attention import Layout, Rule
from plaudit.core.model.fusion import are_experts, is_silu
from plaudit.core.model.operations import Operations, Rotation
from plaudit.core.model.split import RowLinear

PARTS = ("input_layernorm", "self_attn", "post_attention_layernorm", "mlp")
# Rotary embeddings whose angles depend on the position only, in sequences of models.positions.longest_sequence.
FIXED_ANGLES = ("default", "linear", "llama3", "yarn", "dynamic", "longrope")
OPTIONAL_NORMS = ("q_norm", "k_norm")  # per head, as in Qwen 3


class Layer(NamedTuple):
    """The parts of one layer by name. Attribute access on a module is slow, so these are the modules' own tables, in
    which an adapter that replaces a part is seen at once."""

    norms: dict[str, nn.Module]
    attention: dict[str, nn.Module]
    mlp: dict[str, nn.Module]
    gated: bool  # whether it is a gated MLP (gate, up, down): else the module is called unchanged
    dim: int
    rule: Rule


class Columns(NamedTuple):
    """Weights of one layer for few rows, (inputs, outputs) each."""

    query_key_value: Tensor
    out: Tensor
    gate: Tensor
    up: Tensor
    down: Tensor


class LeanTrunk:
    def __init__(self, trunk: Any, rules: Sequence[Rule], operations: Operations) -> None:
        self.trunk = trunk
        self.operations = operations
        self.layers = [_parts(layer, rule) for layer, rule in zip(trunk.layers, rules, strict=True)]
        self._columns: Sequence[Columns] | None = None  # of the current steps
        self._least: int | None = None  # minimum rows of its products, once known
        # The modules' own tables of hooks, so that hooks registered later are seen.
        self._hooks = [hooks for part in trunk.modules() for hooks in (part._forward_hooks, part._forward_pre_hooks)]

    @property
    def hooked(self) -> bool:
        """Whether a hook is registered on any part of the trunk."""
        return any(self._hooks)

    @property
    def adapted(self) -> bool:
        """Whether an adapter replaces a linear layer; it may have narrow products of its own."""
        tables = (table for layer in self.layers for table in (layer.attention, layer.mlp))
        return any(name.endswith("_proj") and type(part) is not nn.Linear for t in tables for name, part in t.items())

    @property
    def plain(self) -> bool:
        """Whether it consists of its linear layers only: no experts, and no adapter."""
        return all(layer.gated for layer in self.layers) and not self.adapted

    def angles(self, positions: int) -> tuple[Tensor, Tensor] | None:
        """cos and sin for this many positions, where an angle depends on its position only."""
        if getattr(self.trunk.rotary_emb, "rope_type", None) not in FIXED_ANGLES:
            return None
        like = next(self.trunk.parameters())
        cos, sin = self.trunk.rotary_emb(like.new_empty(1, 1), torch.arange(positions, device=like.device)[None])
        return cos[0], sin[0]

    @property
    def replaced(self) -> list[nn.Module]:
        """The parts of the module that `operations` replace, except the rotary embedding."""
        parts: list[nn.Module] = [self.trunk.norm]
        for layer in self.trunk.layers:
            parts += [layer.input_layernorm, layer.post_attention_layernorm]
            parts += [layer.mlp] if _is_gated(layer.mlp) else []
            parts += [norm for name in OPTIONAL_NORMS if (norm := getattr(layer.self_attn, name, None)) is not None]
        return parts

    @staticmethod
    def fits(trunk: Any, operations: Operations) -> bool:
        """Whether the trunk has these parts and no others; the trial compares what they compute."""
        layers = getattr(trunk, "layers", None)
        if not isinstance(layers, nn.ModuleList) or set(dict(trunk.named_children())) - {
            "embed_tokens", "layers", "norm", "rotary_emb"
        }:  # fmt: skip
            return False
        rotary = getattr(trunk, "rotary_emb", None)
        turned = 2 * len(getattr(rotary, "inv_freq", ()))  # head size
        return type(trunk.embed_tokens) is nn.Embedding and all(
            _layer_fits(layer, turned, operations.mixtures) for layer in layers
        )

    @contextmanager
    def stepping(self, columns: Sequence[Columns] | None) -> Iterator[None]:
        """Inside, `hidden` is called for all tokens of a few rows, with these weights."""
        self._columns = columns
        try:
            yield
        finally:
            self._columns = None

    @property
    def normed(self) -> bool:
        """Whether heads have their own norms."""
        return any(name in layer.attention for layer in self.layers for name in OPTIONAL_NORMS)

    def hidden(self, input_ids: Tensor, position_ids: Tensor, layout: Layout, wanted: Tensor | None = None) -> Tensor:
        """(1, T) tokens -> (T, hidden), or only the rows `wanted`."""
        if layout.exact:
            return self._exact_hidden(input_ids, position_ids, layout, wanted)
        return self._hidden(input_ids, position_ids, layout, wanted)

    def _exact_hidden(self, input_ids: Tensor, position_ids: Tensor, layout: Layout, wanted: Tensor | None) -> Tensor:
        """Pads a few rows with copies of the last one, so that every product has enough rows to give the bits of
        many."""
        tokens = input_ids.shape[1]
        count = tokens if wanted is None else len(wanted)
        if count >= CPU_MOST:
            return self._hidden(input_ids, position_ids, layout, wanted)
        if self._least is None:
            self._least = least_rows(part for layer in self.trunk.layers for part in layer.modules())
        if tokens < self._least:
            input_ids, position_ids = (_with_copies(x[0], self._least)[None] for x in (input_ids, position_ids))
            layout = _FirstRows(layout, tokens)
        if wanted is not None:
            wanted = _with_copies(wanted, self._least)
        with SteadyProducts() if self.adapted else nullcontext():
            return self._hidden(input_ids, position_ids, layout, wanted)[:count]

    def _hidden(self, input_ids: Tensor, position_ids: Tensor, layout: Layout, wanted: Tensor | None) -> Tensor:
        x = self.trunk.embed_tokens(input_ids[0])
        if layout.angles is None:
            cos, sin = (each[0] for each in self.trunk.rotary_emb(x[None], position_ids))
        else:
            cos, sin = (each.index_select(0, position_ids[0]) for each in layout.angles)
        rotation = self.operations.rotation(cos, sin)
        norms = [layer.norms["input_layernorm"] for layer in self.layers] + [self.trunk.norm]
        last = len(self.layers) - 1
        y = self._norm(x, norms[0])
        columns = self._columns
        for i, layer in enumerate(self.layers):
            if columns is not None:
                x, y = self._few_rows(i, columns[i], x, y, rotation, layout, norms[i + 1])
                continue
            chosen = wanted if i == last else None
            attended = self._attention(i, layer, y, rotation, layout, chosen)
            x = x if chosen is None else x[chosen]
            x, y = self._add_norm(x, attended, layer.norms["post_attention_layernorm"])
            x, y = self._add_norm(x, self._mlp(layer, y), norms[i + 1])
        return y

    def _attention(
        self, index: int, layer: Layer, y: Tensor, rotation: Rotation, layout: Layout, wanted: Tensor | None
    ) -> Tensor:
        parts = layer.attention
        if wanted is None:
            projected = self.operations.products(y, [parts["q_proj"], parts["k_proj"], parts["v_proj"]])
            query, key, value = (rows.view(len(y), -1, layer.dim) for rows in projected)
            query, key = self._normed(query, key, parts)
            out = layout.attend_rotated(index, rotation, query, key, value, layer.rule)
        else:
            projected = self.operations.products(y, [parts["k_proj"], parts["v_proj"]])
            projected += self.operations.products(y[wanted], [parts["q_proj"]])
            key, value, query = (rows.view(len(rows), -1, layer.dim) for rows in projected)
            query, key = self._normed(query, key, parts)
            query = rotation.at(wanted).one(query)
            keys, values = layout.context(index, rotation.one(key), value)
            out = layout.attend_wanted(index, wanted, query, keys, values, layer.rule)
        (attended,) = self.operations.products(out.reshape(len(out), -1), [parts["o_proj"]])
        return attended

    def _mlp(self, layer: Layer, y: Tensor) -> Tensor:
        if not layer.gated:
            out = layer.norms["mlp"](y[None])
            rows: Tensor = (out if isinstance(out, Tensor) else out[0])[0]  # with a router's choices in some models
            return rows
        gated = self.operations.gated_products(y, layer.mlp["gate_proj"], layer.mlp["up_proj"])
        (down,) = self.operations.products(gated, [layer.mlp["down_proj"]])
        return down

    def _few_rows(
        self, index: int, columns: Columns, x: Tensor, y: Tensor, rotation: Rotation, layout: Layout, norm: nn.Module
    ) -> tuple[Tensor, Tensor]:
        """A whole layer: the rows after it, and their norm."""
        layer = self.layers[index]
        heads = torch.mm(y, columns.query_key_value).view(len(y), -1, layer.dim)
        query = columns.out.shape[0] // layer.dim
        turned = (query + heads.shape[1]) // 2  # the norms of queries and keys
        rotated = rotation.one(heads[:, :turned])
        out = layout.attend(index, rotated[:, :query], rotated[:, query:], heads[:, turned:], layer.rule)
        attended = torch.mm(out.reshape(len(out), -1), columns.out)
        x, y = self._add_norm(x, attended, layer.norms["post_attention_layernorm"])
        gated = self.operations.gated(torch.mm(y, columns.gate), torch.mm(y, columns.up))
        return self._add_norm(x, torch.mm(gated, columns.down), norm)

    def _normed(self, query: Tensor, key: Tensor, parts: dict[str, Any]) -> tuple[Tensor, Tensor]:
        first, second = (parts.get(name) for name in OPTIONAL_NORMS)
        weights = [None if part is None else part._parameters.get("weight") for part in (first, second)]
        if first is None or second is None or weights[0] is None or weights[1] is None:
            query = query if first is None else self._norm(query, first)
            return query, key if second is None else self._norm(key, second)
        epsilons = first.variance_epsilon, second.variance_epsilon
        return self.operations.both_norms((query, key), (weights[0], weights[1]), epsilons)

    def _norm(self, x: Tensor, part: Any) -> Tensor:
        weight = part._parameters.get("weight")
        if weight is None:
            adapted: Tensor = part(x)
            return adapted
        return self.operations.norm(x, weight, part.variance_epsilon)

    def _add_norm(self, x: Tensor, y: Tensor, part: Any) -> tuple[Tensor, Tensor]:
        weight = part._parameters.get("weight")
        if weight is None:
            x = x + y
            return x, part(x)
        return self.operations.add_norm(x, y, weight, part.variance_epsilon)


class _FirstRows(Layout):
    """Restricts a layout to the first `count` of the computed rows."""

    def __init__(self, inner: Layout, count: int) -> None:
        super().__init__(inner.groups, inner.restore, exact=inner.exact)
        self.inner = inner
        self.count = count

    def attend(self, layer: int, query: Tensor, key: Tensor, value: Tensor, rule: Rule) -> Tensor:
        n = self.count
        out = self.inner.attend(layer, query[:n], key[:n], value[:n], rule)
        return F.pad(out, (0, 0, 0, 0, 0, len(query) - self.count))

    def attend_wanted(
        self, layer: int, wanted: Tensor, query: Tensor, keys: Tensor, values: Tensor, rule: Rule
    ) -> Tensor:
        return self.inner.attend_wanted(layer, wanted, query, keys, values, rule)

    def context(self, layer: int, key: Tensor, value: Tensor) -> tuple[Tensor, Tensor]:
        return self.inner.context(layer, key[: self.count], value[: self.count])


def _with_copies(x: Tensor, least: int) -> Tensor:
    """Pads with copies of the last element: (N,) -> (max(N, least),)."""
    return x if len(x) >= least else torch.cat([x, x[-1:].expand(least - len(x))])


def _parts(layer: Any, rule: Rule) -> Layer:
    attention = layer.self_attn
    gated = _is_gated(layer.mlp)
    return Layer(layer._modules, attention._modules, layer.mlp._modules, gated, attention.head_dim, rule)


def _is_gated(mlp: nn.Module) -> bool:
    names = {name for name, _ in mlp.named_children()}
    return {"gate_proj", "up_proj", "down_proj"} <= names <= {"gate_proj", "up_proj", "down_proj", "act_fn"}


def _layer_fits(layer: Any, turned: int, mixtures: bool) -> bool:
    if set(dict(layer.named_children())) != set(PARTS):
        return False
    attention, mlp = dict(layer.self_attn.named_children()), dict(layer.mlp.named_children())
    linear = [attention.pop(f"{name}_proj", None) for name in "qkvo"]
    if _is_gated(layer.mlp):
        linear += [mlp.pop(f"{name}_proj", None) for name in ("gate", "up", "down")]
    elif mixtures and any(are_experts(part) for part in layer.mlp.modules()):
        mlp = {}
    activation = mlp.pop("act_fn", None)
    norms = [attention.pop(name) for name in OPTIONAL_NORMS if name in attention]
    norms += [layer.input_layernorm, layer.post_attention_layernorm]
    return (
        not attention and not mlp and all(type(part) in (nn.Linear, RowLinear) for part in linear)
        and all(hasattr(norm, "weight") and hasattr(norm, "variance_epsilon") for norm in norms)
        and getattr(layer.self_attn, "head_dim", None) == turned and (activation is None or is_silu(activation))
    )  # fmt: skip
