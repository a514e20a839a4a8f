"""Builds a stand-in: a small model with the classes and the config of a large one, in which only sizes differ.

Widths, expert counts and the vocabulary are reduced; windows, chunks and position thresholds are reduced so that LENGTH
tokens cross them; every flag and factor is kept. Weights are so large that each factor has a measurable effect.
"""

from __future__ import annotations

import copy
from collections.abc import Iterator
from typing import Any

import numpy as np
import torch
from torch import nn
from transformers import PreTrainedConfig, PreTrainedModel

from plaudit.models.fresh import seeded
from plaudit.models.heads.value_head import ValueModel
from plaudit.models.positions import SHIFTING, rope_tables
from plaudit.models.quiet import quiet

LENGTH = 64  # tokens of the longest sequence in a trial
POSITIONS = 4 * LENGTH
WIDTH, HEADS, HEAD = 64, 4, 16
EDGE = 7  # tokens of a window or a chunk
TURN = 24  # the position from which scaling applies
VOCABULARY = 160
INNER = 96

# The names of sizes in transformers' configs, and their values in a stand-in.
NAMES: list[tuple[int, str]] = [
    (WIDTH, """hidden_size n_embd d_model dim embedding_size emb_dim word_embed_proj_dim input_size pooler_hidden_size
        backbone_hidden_size lru_width attention_hidden_size hidden_size_global"""),
    (HEADS, """num_attention_heads n_head n_heads num_heads attention_heads decoder_attention_heads
        encoder_attention_heads num_encoder_attention_heads num_decoder_attention_heads swa_num_attention_heads
        index_n_heads linear_num_value_heads linear_num_heads
        num_experts num_local_experts n_routed_experts moe_num_experts"""),
    (HEAD, """head_dim global_head_dim swa_head_dim v_head_dim qk_nope_head_dim index_head_dim kv_channels d_kv
        attention_head_dim attention_head_size dim_head linear_head_dim d_head linear_key_head_dim linear_value_head_dim
        q_lora_rank kv_lora_rank o_lora_rank hc_lowrank laurel_rank gated_norm_rank router_hidden_size
        hidden_size_per_layer_input ple_embed_dim"""),
    (HEAD // 2, "rotary_dim qk_rope_head_dim"),
    (HEAD + HEAD // 2, "qk_head_dim"),
    (POSITIONS, """max_position_embeddings n_positions n_ctx max_seq_len max_sequence_length model_max_length
        max_target_positions context_length"""),
    (INNER, """intermediate_size moe_intermediate_size shared_expert_intermediate_size intermediate_size_mlp
        dense_intermediate_size shared_intermediate_size moe_shared_expert_intermediate_size ffn_hidden_size
        expert_ffn_hidden_size n_inner d_ff dff dim_ff d_inner ffn_dim decoder_ffn_dim encoder_ffn_dim hidden_dim"""),
    (2, """num_experts_per_tok num_experts_per_token moe_top_k moe_topk moe_k top_k n_group zero_expert_num
        index_topk_blocks o_groups"""),
    (1, "topk_group n_groups"),
    (VOCABULARY, """vocab_size vocab_size_per_layer_input decoder_vocab_size encoder_hash_byte_group_vocab
        entity_vocab_size shape_vocab_size pronunciation_vocab_size num_hash_buckets ngram_vocab_size_base"""),
    (EDGE, """sliding_window sliding_window_size window_size attention_window_size keep_window_size attention_chunk_size
        local_attention attention_window local_attn_chunk_length lsh_attn_chunk_length index_topk block_size rel_extent
        index_block_size make_ngram_vocab_size_divisible_by split_ngram_parts"""),
    (TURN, "original_max_position_embeddings floor_scale"),
]  # fmt: skip
SIZES = {name: size for size, names in NAMES for name in names.split()}
KEY_HEADS = (
    "num_key_value_heads", "num_kv_heads", "swa_num_key_value_heads", "num_global_key_value_heads",
    "linear_num_key_heads",
)  # fmt: skip


def shrunk(config: PreTrainedConfig) -> PreTrainedConfig:
    """A copy of the config for a model that takes milliseconds to create and run."""
    small: Any = copy.deepcopy(config)
    for part in _parts(small):
        _shrink(part)
    vars(small).pop("quantization_config", None)
    return small


def _parts(config: Any) -> Iterator[Any]:
    yield config
    for value in list(vars(config).values()):
        if isinstance(value, PreTrainedConfig):
            yield from _parts(value)


def _shrink(config: Any) -> None:
    values = dict(vars(config))
    heads = values.get("num_attention_heads", values.get("n_head", values.get("linear_num_value_heads")))
    for name, value in values.items():
        if isinstance(value, dict) and name not in ("id2label", "label2id"):
            setattr(config, name, _shrunk_table(value))
        elif name in KEY_HEADS and isinstance(value, int):
            setattr(config, name, 1 if value == 1 else min(HEADS, value) if value == heads else HEADS // 2)
        elif name in SIZES:
            setattr(config, name, _shrunk_value(name, value))
        elif name.endswith(("token_id", "token_index")):
            setattr(config, name, _within(value))
    if (
        values.get("qk_rope_head_dim") and "qk_nope_head_dim" in values
    ):  # the rotary parameters may depend on their ratio
        rotated = config.qk_rope_head_dim
        config.qk_nope_head_dim = rotated * values["qk_nope_head_dim"] // values["qk_rope_head_dim"]
        config.qk_head_dim = config.qk_nope_head_dim + rotated
    if "qk_rope_head_dim" in values and values.get("head_dim") is not None:  # one of the sizes of a compressed head
        known = ("qk_rope_head_dim", "qk_head_dim", "qk_nope_head_dim", "v_head_dim")
        config.head_dim = getattr(config, next((n for n in known if values["head_dim"] == values.get(n)), "head_dim"))
    if values.get("attention_hidden_size") == 2 * values.get("hidden_size", 0) > 0:  # attends over two rows
        config.attention_hidden_size = 2 * config.hidden_size
        config.attention_head_dim = config.attention_hidden_size // config.num_attention_heads
    _shrink_mamba(config, values)
    _shrink_rope(config, values, heads)


def _shrink_rope(config: Any, values: dict[str, Any], heads: Any) -> None:
    """The sections for time, height and width add up to half the rotated head size, as do longrope's factors, whose
    threshold is beyond the tested lengths."""
    head = values.get("head_dim") or values.get("hidden_size", 0) // (heads or 1)
    for table in rope_tables(config):
        sections = table.get("mrope_section")
        if isinstance(sections, list) and 2 * sum(sections) > HEAD:
            total = sum(sections) * min(HEAD, head) // head
            each = total // len(sections)
            table["mrope_section"] = [total - each * (len(sections) - 1), *[each] * (len(sections) - 1)]
        for name in ("long_factor", "short_factor"):
            if isinstance(factors := table.get(name), list):
                table[name] = factors[:: max(1, head // HEAD)][: max(1, len(factors) * min(HEAD, head) // head)]
        if table.get("rope_type") in SHIFTING:
            config.max_position_embeddings = POSITIONS
            for place in (table, vars(config)):
                if "original_max_position_embeddings" in place:
                    place["original_max_position_embeddings"] = POSITIONS


def _shrink_mamba(config: Any, values: dict[str, Any]) -> None:
    """A Mamba layer's heads add up to its width, a multiple of the model's; 64 tokens span several chunks."""
    if not any(name in values for name in ("mamba_n_heads", "n_mamba_heads", "mamba_num_heads")):
        return
    width = config.hidden_size * int(values.get("mamba_expand") or 2)
    sizes = [
        (2 * HEADS, ("mamba_n_heads", "n_mamba_heads", "mamba_num_heads")), (width, ("mamba_d_ssm",)),
        (width // (2 * HEADS), ("mamba_d_head", "mamba_headdim", "mamba_head_dim")),
        (EDGE, ("mamba_chunk_size", "chunk_size")), (HEADS, ("mamba_d_state", "ssm_state_size")),
    ]  # fmt: skip
    for size, names in sizes:
        for name in names:
            if isinstance(values.get(name), int):
                setattr(config, name, size)
    for name in ("mamba_n_groups", "mamba_ngroups"):
        if isinstance(values.get(name), int):
            setattr(config, name, min(2, values[name]))


def _shrunk_value(name: str, value: Any) -> Any:
    if isinstance(value, (list, tuple)):  # one per layer
        return type(value)(_shrunk_value(name, each) for each in value)
    return min(value, SIZES[name]) if name in SIZES and type(value) is int and value > 0 else value


def _shrunk_table(table: dict[Any, Any]) -> dict[Any, Any]:
    return {
        name: _shrunk_table(value)
        if isinstance(value, dict)
        else _shrunk_value(name, value)
        if name in SIZES
        else value
        for name, value in table.items()
    }


def _within(value: Any) -> Any:
    """A special token's id within the smaller vocabulary."""
    if isinstance(value, (list, tuple)):
        return type(value)(_within(each) for each in value)
    return value % VOCABULARY if isinstance(value, int) and value >= VOCABULARY else value


def stand_in(module: nn.Module, seed: int) -> nn.Module:
    """A small model with the module's classes, on its device, in float32 and in eval mode."""
    if isinstance(module, ValueModel):
        made: nn.Module = ValueModel(stand_in(module.trunk, seed))
    elif not isinstance(module, PreTrainedModel):
        raise TypeError(f"{type(module).__name__} is not a transformers model class that can be built from a config")
    else:
        config = shrunk(module.config)
        made = _made(type(module), config)
        kinds = [_kind(layer) for layer in _layers(made)]
        count = max((kinds.index(kind) + 1 for kind in kinds), default=0)
        if 0 < max(count, 2) < len(kinds):
            made = _fewer(made, config, kinds, max(count, 2))
    stir(made, seed)
    return made.to(next(module.parameters()).device).eval()


def _fewer(whole: nn.Module, config: Any, kinds: list[tuple[Any, ...]], first: int) -> nn.Module:
    """A model with only the first layers, if its config can express that; else the whole one."""
    try:
        few = _made(type(whole), _cut(config, len(kinds), first))
    except Exception:
        return whole
    return few if [_kind(layer) for layer in _layers(few)] == kinds[:first] else whole


def _made(kind: Any, config: Any) -> nn.Module:
    with seeded(0), quiet():
        made: nn.Module = kind._from_config(copy.deepcopy(config), attn_implementation="eager", dtype=torch.float32)
    return made.float()


def _layers(module: nn.Module) -> nn.ModuleList | list[nn.Module]:
    config = module.config.get_text_config()  # type: ignore[operator, union-attr]
    count = getattr(config, "num_hidden_layers", 0)
    return next((m for m in module.modules() if isinstance(m, nn.ModuleList) and len(m) == count), [])


def _kind(layer: nn.Module) -> tuple[Any, ...]:
    """What distinguishes layers of a model: classes, flags and shapes, but not the layer number or weights."""
    plain = (bool, int, float, str, type(None))
    return tuple(
        (
            name, type(part), tuple((n, tuple(p.shape)) for n, p in part.named_parameters(recurse=False)),
            tuple(sorted((n, v) for n, v in vars(part).items() if n != "layer_idx" and isinstance(v, plain))),
        )
        for name, part in layer.named_modules()
    )  # fmt: skip


def _cut(config: Any, count: int, first: int) -> Any:
    """The config of a model with only the first layers."""
    cut = copy.deepcopy(config)
    text = cut.get_text_config()
    for name, value in vars(text).items():
        if isinstance(value, (list, tuple)) and len(value) == count:
            setattr(text, name, value[:first])
    text.num_hidden_layers = first
    return cut


def tokens_for(module: nn.Module, seed: int, length: int) -> list[int]:
    """Random token ids without special tokens."""
    config = module.config
    special: set[Any] = set()
    for part in _parts(config):
        for name, value in vars(part).items():
            if name.endswith(("token_id", "token_index")):
                special |= set(value) if isinstance(value, (list, tuple)) else {value}
    usual = [t for t in range(3, min(VOCABULARY, config.get_text_config().vocab_size)) if t not in special]  # type: ignore[operator, union-attr]
    return [int(token) for token in np.random.default_rng(seed).choice(usual, length)]


def stir(module: nn.Module, seed: int) -> None:
    """Set weights so large that every factor, cap and window affects the hidden rows."""
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for name, weight in module.named_parameters():
            noise = torch.randn(weight.shape, generator=generator)
            if weight.ndim > 1:
                weight.copy_(noise * 1.5 * weight.shape[-1] ** -0.5)
            else:
                weight.copy_(0.4 * noise + (1.0 if name.endswith("norm.weight") else 0.0))
