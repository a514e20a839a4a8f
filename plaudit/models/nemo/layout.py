"""Converts Megatron tensor names and shapes to those of transformers, for two decoder architectures.

    llama  rope, rmsnorm, swiglu, no biases
    gpt2   learned positions, layernorm, gelu, biases

Of each group of queries Megatron stores the queries, then their key, then their value; a gated layer's gate above its
other half. Layers may be one tensor with an axis for the layer, as megatron-core's distributed checkpoints have them.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from transformers import GPT2Config, LlamaConfig, PreTrainedConfig

from plaudit.errors import ModelError

LAYER = re.compile(r"^decoder\.layers\.(\d+)\.(.+)$")
STACKED = re.compile(r"^decoder\.layers\.(?!\d)(.+)$")
LOCAL = {  # names where the norm is a layer of its own
    "input_layernorm.": "self_attention.linear_qkv.layer_norm_",
    "pre_mlp_layernorm.": "mlp.linear_fc1.layer_norm_",
}
UNREAD = ("output_layer.", "rotary_pos_emb.")  # a language model's head is stored beside the reward's
QKV, GATED = "self_attention.linear_qkv.", "mlp.linear_fc1."


@dataclass(frozen=True, slots=True)
class Sizes:
    layers: int
    hidden: int
    inner: int
    heads: int
    groups: int
    head: int
    length: int
    epsilon: float
    vocabulary: int
    labels: int


def converted(
    cfg: Mapping[str, Any], stored: Mapping[str, Tensor], labels: int
) -> tuple[PreTrainedConfig, dict[str, Tensor]]:
    """The config and the tensors of a sequence classifier of transformers; of the head only its matrix."""
    shape = _shape(cfg)
    tensors = _plain_names(stored)
    embedding = tensors.get("embedding.word_embeddings.weight")
    if embedding is None:
        raise ModelError(f"the archive has no embedding.word_embeddings.weight; its tensors begin with {min(stored)!r}")
    sizes = _sizes(cfg, len(embedding), labels)
    config, convert = (_llama_config, _llama) if shape == "llama" else (_gpt2_config, _gpt2)
    result: dict[str, Tensor] = {}
    for name, tensor in tensors.items():
        for new, value in convert(name, tensor, sizes, cfg):
            result[new] = value.contiguous()
    return config(cfg, sizes), result


def _shape(cfg: Mapping[str, Any]) -> str:
    for key in ("num_moe_experts", "multi_latent_attention", "qk_layernorm", "rotary_interleaved", "qkv_bias", "fp8"):
        if cfg.get(key):
            raise ModelError(f"model_config.yaml has {key}: {cfg[key]!r}, for which there is no conversion")
    position = cfg.get("position_embedding_type", "learned_absolute")
    norm = str(cfg.get("normalization", "layernorm")).lower()
    activation = str(cfg.get("activation", "gelu")).removeprefix("fast-")
    bias = bool(cfg.get("bias", True))
    whole = float(cfg.get("rotary_percentage") or 1.0) == 1.0
    if (position, norm, activation, bias) == ("rope", "rmsnorm", "swiglu", False) and whole:
        return "llama"
    if position == "learned_absolute" and norm in ("layernorm", "layernorm1p") and (activation, bias) == ("gelu", True):
        return "gpt2"
    raise ModelError(
        f"the archive has position_embedding_type {position}, normalization {norm}, activation "
        f"{activation}, bias {bias}, rotary_percentage {cfg.get('rotary_percentage', 1.0)}; converted are "
        "the shapes of Llama (rope, rmsnorm, swiglu, no bias) and of GPT-2 (learned_absolute, layernorm, gelu, bias)"
    )


def _sizes(cfg: Mapping[str, Any], vocabulary: int, labels: int) -> Sizes:
    def number(key: str) -> int:
        value = cfg.get(key)
        if type(value) is not int or value < 1:
            raise ModelError(f"model_config.yaml has {key}: {value!r}, expected a number")
        return value

    hidden, heads = number("hidden_size"), number("num_attention_heads")
    inner = number("ffn_hidden_size") if cfg.get("ffn_hidden_size") else 4 * hidden
    return Sizes(
        number("num_layers"), hidden, inner, heads,
        number("num_query_groups") if cfg.get("num_query_groups") else heads,
        number("kv_channels") if cfg.get("kv_channels") else hidden // heads, number("encoder_seq_length"),
        float(cfg.get("layernorm_epsilon", 1e-5)), vocabulary, labels,
    )  # fmt: skip


def _plain_names(stored: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Each layer by its number, without the wrappers' prefixes."""
    tensors: dict[str, Tensor] = {}
    for name, tensor in stored.items():
        short = name.removeprefix("model.").removeprefix("module.")
        if short.startswith(UNREAD):
            continue
        if stacked := STACKED.match(short):
            tensors |= {f"decoder.layers.{at}.{_fused(stacked[1])}": layer for at, layer in enumerate(tensor)}
        elif single := LAYER.match(short):
            tensors[f"decoder.layers.{single[1]}.{_fused(single[2])}"] = tensor
        else:
            tensors[short] = tensor
    return tensors


def _fused(name: str) -> str:
    for local, fused in LOCAL.items():
        if name.startswith(local):
            return fused + name.removeprefix(local)
    return name


def _split(tensor: Tensor, sizes: Sizes) -> tuple[Tensor, Tensor, Tensor]:
    """(groups * (queries + 2) * head, ...) to queries, keys and values, each (heads * head, ...)."""
    queries = sizes.heads // sizes.groups
    grouped = tensor.reshape(sizes.groups, queries + 2, sizes.head, *tensor.shape[1:])
    parts = (grouped[:, :queries], grouped[:, queries : queries + 1], grouped[:, queries + 1 :])
    query, key, value = (part.reshape(-1, *tensor.shape[1:]) for part in parts)
    return query, key, value


Converted = list[tuple[str, Tensor]]
HEAD = {"rm_head.weight": "score.weight"}
LLAMA_NAMES = {
    "self_attention.linear_qkv.layer_norm_weight": "input_layernorm.weight",
    "self_attention.linear_proj.weight": "self_attn.o_proj.weight",
    "mlp.linear_fc1.layer_norm_weight": "post_attention_layernorm.weight",
    "mlp.linear_fc2.weight": "mlp.down_proj.weight",
}
LLAMA_OUTSIDE = {
    "embedding.word_embeddings.weight": "model.embed_tokens.weight",
    "decoder.final_layernorm.weight": "model.norm.weight",
    **HEAD,
}  # fmt: skip


def _llama(name: str, tensor: Tensor, sizes: Sizes, cfg: Mapping[str, Any]) -> Converted:
    if name in LLAMA_OUTSIDE:
        return [(LLAMA_OUTSIDE[name], tensor)]
    if layer := LAYER.match(name):
        prefix, part = f"model.layers.{layer[1]}.", layer[2]
        if part in LLAMA_NAMES:
            return [(prefix + LLAMA_NAMES[part], tensor)]
        if part == QKV + "weight":
            return [
                (f"{prefix}self_attn.{letter}_proj.weight", value)
                for letter, value in zip("qkv", _split(tensor, sizes), strict=True)
            ]
        if part == GATED + "weight":
            gate, up = tensor.chunk(2)
            return [(prefix + "mlp.gate_proj.weight", gate), (prefix + "mlp.up_proj.weight", up)]
    raise ModelError(f"the archive has a tensor {name!r} {list(tensor.shape)}, for which there is no conversion")


GPT2_NAMES = {
    "self_attention.linear_qkv.layer_norm_": "ln_1.", "mlp.linear_fc1.layer_norm_": "ln_2.",
    "self_attention.linear_qkv.": "attn.c_attn.", "self_attention.linear_proj.": "attn.c_proj.",
    "mlp.linear_fc1.": "mlp.c_fc.", "mlp.linear_fc2.": "mlp.c_proj.",
}  # fmt: skip
GPT2_OUTSIDE = {
    "embedding.word_embeddings.weight": "transformer.wte.weight",
    "embedding.position_embeddings.weight": "transformer.wpe.weight",
    "decoder.final_layernorm.weight": "transformer.ln_f.weight",
    "decoder.final_layernorm.bias": "transformer.ln_f.bias",
    **HEAD,
}  # fmt: skip


def _gpt2(name: str, tensor: Tensor, sizes: Sizes, cfg: Mapping[str, Any]) -> Converted:
    centred = str(cfg.get("normalization")).lower() == "layernorm1p" or bool(cfg.get("layernorm_zero_centered_gamma"))
    value = tensor.float() + 1 if centred and re.search(r"layer_?norm[._]weight$", name) else tensor
    if name in GPT2_OUTSIDE:
        return [(GPT2_OUTSIDE[name], value)]
    layer = LAYER.match(name)
    for old, new in GPT2_NAMES.items() if layer is not None else ():
        assert layer is not None
        if layer[2].startswith(old):
            if old == QKV:
                value = torch.cat(_split(tensor, sizes))
            # GPT-2's matrices lie the other way round
            turned = value.T if value.dim() == 2 else value
            return [(f"transformer.h.{layer[1]}.{new}{layer[2].removeprefix(old)}", turned)]
    raise ModelError(f"the archive has a tensor {name!r} {list(tensor.shape)}, for which there is no conversion")


def _rope_parameters(cfg: Mapping[str, Any]) -> dict[str, Any]:
    rope: dict[str, Any] = {"rope_type": "default", "rope_theta": float(cfg.get("rotary_base") or 10_000)}
    if factor := cfg.get("seq_len_interpolation_factor"):
        rope |= {"rope_type": "linear", "factor": float(factor)}
    return rope


def _llama_config(cfg: Mapping[str, Any], sizes: Sizes) -> PreTrainedConfig:
    return LlamaConfig(
        vocab_size=sizes.vocabulary, hidden_size=sizes.hidden, intermediate_size=sizes.inner,
        num_hidden_layers=sizes.layers, num_attention_heads=sizes.heads, num_key_value_heads=sizes.groups,
        head_dim=sizes.head, max_position_embeddings=sizes.length, rms_norm_eps=sizes.epsilon,
        rope_parameters=_rope_parameters(cfg), tie_word_embeddings=False, num_labels=sizes.labels,
    )  # fmt: skip


def _gpt2_config(cfg: Mapping[str, Any], sizes: Sizes) -> PreTrainedConfig:
    if sizes.groups != sizes.heads or sizes.head * sizes.heads != sizes.hidden:
        raise ModelError(
            "GPT-2 in transformers has as many key heads as heads and hidden_size = heads x kv_channels; the archive "
            f"has {sizes.heads} heads, {sizes.groups} groups, kv_channels {sizes.head} and hidden_size {sizes.hidden}"
        )
    # Megatron's fused kernel of bias and gelu is the approximation by tanh.
    near = bool(cfg.get("openai_gelu")) or bool(cfg.get("bias_activation_fusion", True))
    return GPT2Config(
        vocab_size=sizes.vocabulary, n_positions=sizes.length, n_embd=sizes.hidden, n_layer=sizes.layers,
        n_head=sizes.heads, n_inner=sizes.inner, activation_function="gelu_new" if near else "gelu",
        layer_norm_epsilon=sizes.epsilon, num_labels=sizes.labels, bos_token_id=None, eos_token_id=None,
    )  # fmt: skip
