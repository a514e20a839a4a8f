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
from plaudit.core.split import RowLinear

PARTS = ("input_layernorm", "self_attn", "post_attention_layernorm", "mlp")
MANY_ROWS = 256  # up to here one more call costs more than to copy queries and keys into one tensor
OPTIONAL_NORMS = ("q_norm", "k_norm")  # of every head, as in Qwen 3


class Layer(NamedTuple):
    """The parts of one layer by name. Attribute access on a module is slow, so these are the modules' own tables, in
    which an adapter that takes a part's place is found at once."""

    norms: dict[str, nn.Module]
    attention: dict[str, nn.Module]
    mlp: dict[str, nn.Module]
    dim: int
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
            y = _norm(x, layer.norms["post_attention_layernorm"])
            mlp = layer.mlp
            gated = F.silu(_linear(y, mlp["gate_proj"]), inplace=True).mul_(_linear(y, mlp["up_proj"]))
            x = x.add_(_linear(gated, mlp["down_proj"]))
        return _norm(x, self.trunk.norm)


def _attention(
    index: int, layer: Layer, x: Tensor, cos: Tensor, sin: Tensor, layout: Layout, wanted: Tensor | None
) -> Tensor:
    parts = layer.attention
    y = _norm(x, layer.norms["input_layernorm"])
    key = _heads(y, parts, "k", layer.dim)
    value = _linear(y, parts["v_proj"]).view(len(y), -1, layer.dim)
    if wanted is None:
        query = _heads(y, parts, "q", layer.dim)
        if len(y) > MANY_ROWS:
            query, key = _rotate(query, cos, sin), _rotate(key, cos, sin)
        else:
            count = query.shape[1]
            both = _rotate(torch.cat((query, key), dim=1), cos, sin)
            query, key = both[:, :count], both[:, count:]
        out = layout.attend(index, query, key, value, layer.rule)
    else:
        query = _rotate(_heads(y[wanted], parts, "q", layer.dim), cos[wanted], sin[wanted])
        keys, values = layout.context(index, _rotate(key, cos, sin), value)
        out = layout.attend_wanted(index, wanted, query, keys, values, layer.rule)
    return _linear(out.reshape(len(out), -1), parts["o_proj"])


def _parts(layer: Any, rule: Rule) -> Layer:
    attention = layer.self_attn
    return Layer(layer._modules, attention._modules, layer.mlp._modules, attention.head_dim, rule)


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
        not attention and not mlp and all(type(part) in (nn.Linear, RowLinear) for part in linear)
        and all(hasattr(norm, "weight") and hasattr(norm, "variance_epsilon") for norm in norms)
        and hasattr(layer.self_attn, "head_dim")
    )  # fmt: skip


def _linear(x: Tensor, part: nn.Module) -> Tensor:
    if type(part) is not nn.Linear:  # its ranks add up, or an adapter has taken its place since the trial
        adapted: Tensor = part(x)
        return adapted
    parameters = part._parameters
    return F.linear(x, parameters["weight"], parameters["bias"])  # type: ignore[arg-type]


def _norm(x: Tensor, part: Any) -> Tensor:
    weight = part._parameters.get("weight")
    if weight is None:
        adapted: Tensor = part(x)
        return adapted
    return F.rms_norm(x, weight.shape, weight, part.variance_epsilon)


def _heads(y: Tensor, parts: dict[str, nn.Module], name: str, dim: int) -> Tensor:
    heads = _linear(y, parts[f"{name}_proj"]).view(len(y), -1, dim)
    norm = parts.get(f"{name}_norm")
    return heads if norm is None else _norm(heads, norm)


def _rotate(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """x (T, heads, D), cos and sin (T, 1, D), the first half of sin negated."""
    return (x * cos).addcmul_(x.roll(x.shape[-1] // 2, dims=-1), sin)
