"""The trunk of a Llama-shaped decoder, run on its own weights without the cost of its modules.

For small models on a CPU most of a step is overhead: modules calling modules, norms and rotary embeddings of many small
operations. This is the same arithmetic in few calls. It is used only for a module that has just these parts and whose
own forward gave the same rows in a trial; every other model runs as it is. It holds no weights: they are read from the
module's parts in every call, so new weights are used at once.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from plaudit.core.attention import Layout, Rule

PARTS = ("input_layernorm", "self_attn", "post_attention_layernorm", "mlp")
OPTIONAL_NORMS = ("q_norm", "k_norm")  # of every head, as in Qwen 3


class Layer(NamedTuple):
    """The parts of one layer, looked up once: attribute access on a module is slow. Their weights are read anew."""

    before: nn.Module
    q: nn.Module
    k: nn.Module
    v: nn.Module
    o: nn.Module
    q_norm: nn.Module | None
    k_norm: nn.Module | None
    dim: int
    after: nn.Module
    gate: nn.Module
    up: nn.Module
    down: nn.Module
    rule: Rule


class LeanTrunk:
    def __init__(self, trunk: Any, rules: Sequence[Rule]) -> None:
        self.trunk = trunk
        self.layers = [_parts(layer, rule) for layer, rule in zip(trunk.layers, rules, strict=True)]

    @staticmethod
    def fits(trunk: Any) -> bool:
        """Whether the trunk has the parts, and no others; what they compute is for the trial to say."""
        layers = getattr(trunk, "layers", None)
        if not isinstance(layers, nn.ModuleList) or set(dict(trunk.named_children())) - {
            "embed_tokens", "layers", "norm", "rotary_emb"
        }:  # fmt: skip
            return False
        return type(trunk.embed_tokens) is nn.Embedding and all(map(_layer_fits, layers))

    def hidden(self, input_ids: Tensor, position_ids: Tensor, layout: Layout, wanted: Tensor | None = None) -> Tensor:
        """(1, T) tokens -> (T, hidden), or the rows `wanted` of it."""
        x = self.trunk.embed_tokens(input_ids[0])
        cos, sin = (part[0][:, None] for part in self.trunk.rotary_emb(x[None], position_ids))
        sin = torch.cat((-sin[..., : sin.shape[-1] // 2], sin[..., sin.shape[-1] // 2 :]), dim=-1)
        last = len(self.layers) - 1
        for i, layer in enumerate(self.layers):
            chosen = wanted if i == last else None
            attended = _attention(i, layer, x, cos, sin, layout, chosen)
            x = (x if chosen is None else x[chosen]) + attended
            y = _norm(x, layer.after)
            gated = F.silu(_linear(y, layer.gate), inplace=True).mul_(_linear(y, layer.up))
            x = x.add_(_linear(gated, layer.down))
        return _norm(x, self.trunk.norm)


def _attention(
    index: int, layer: Layer, x: Tensor, cos: Tensor, sin: Tensor, layout: Layout, wanted: Tensor | None
) -> Tensor:
    y = _norm(x, layer.before)
    key = _heads(y, layer.k, layer.k_norm, layer.dim)
    value = _linear(y, layer.v).view(len(y), -1, layer.dim)
    if wanted is None:
        query = _heads(y, layer.q, layer.q_norm, layer.dim)
        both = _rotate(torch.cat((query, key), dim=1), cos, sin)
        count = query.shape[1]
        out = layout.attend(index, both[:, :count], both[:, count:], value, layer.rule)
    else:
        query = _rotate(_heads(y[wanted], layer.q, layer.q_norm, layer.dim), cos[wanted], sin[wanted])
        keys, values = layout.context(index, _rotate(key, cos, sin), value)
        out = layout.attend_wanted(index, wanted, query, keys, values, layer.rule)
    return _linear(out.reshape(len(out), -1), layer.o)


def _parts(layer: Any, rule: Rule) -> Layer:
    attention, mlp = layer.self_attn, layer.mlp
    return Layer(
        layer.input_layernorm, attention.q_proj, attention.k_proj, attention.v_proj, attention.o_proj,
        getattr(attention, "q_norm", None), getattr(attention, "k_norm", None), attention.head_dim,
        layer.post_attention_layernorm, mlp.gate_proj, mlp.up_proj, mlp.down_proj, rule,
    )  # fmt: skip


def _layer_fits(layer: Any) -> bool:
    if set(dict(layer.named_children())) != set(PARTS):
        return False
    attention, mlp = dict(layer.self_attn.named_children()), dict(layer.mlp.named_children())
    linear = [attention.pop(f"{name}_proj", None) for name in "qkvo"]
    linear += [mlp.pop(f"{name}_proj", None) for name in ("gate", "up", "down")]
    mlp.pop("act_fn", None)
    norms = [attention.pop(name) for name in OPTIONAL_NORMS if name in attention]
    norms += [layer.input_layernorm, layer.post_attention_layernorm]
    return (
        not attention and not mlp and all(type(part) is nn.Linear for part in linear)
        and all(hasattr(norm, "weight") and hasattr(norm, "variance_epsilon") for norm in norms)
        and hasattr(layer.self_attn, "head_dim")
    )  # fmt: skip


def _linear(x: Tensor, part: nn.Module) -> Tensor:
    parameters = part._parameters
    # An adapter may have taken the place of the layer since the trial: then it is called, and does its part.
    out: Tensor = F.linear(x, parameters["weight"], parameters["bias"]) if type(part) is nn.Linear else part(x)  # type: ignore[arg-type]
    return out


def _norm(x: Tensor, part: Any) -> Tensor:
    weight = part._parameters["weight"]
    return F.rms_norm(x, weight.shape, weight, part.variance_epsilon)


def _heads(y: Tensor, projection: nn.Module, norm: nn.Module | None, dim: int) -> Tensor:
    heads = _linear(y, projection).view(len(y), -1, dim)
    return heads if norm is None else _norm(heads, norm)


def _rotate(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """x (T, heads, D), cos and sin (T, 1, D), the first half of sin negated."""
    return (x * cos).addcmul_(x.roll(x.shape[-1] // 2, dims=-1), sin)
