"""Every decoder family of the installed transformers as a tiny random model on disk, and the outcome for each."""

from __future__ import annotations

import functools
import re
from collections import defaultdict
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from transformers import AutoModelForCausalLM, AutoModelForImageTextToText, AutoModelForSequenceClassification
from transformers.models.auto.configuration_auto import CONFIG_MAPPING
from transformers.models.auto.modeling_auto import (
    MODEL_FOR_CAUSAL_LM_MAPPING_NAMES,
    MODEL_FOR_IMAGE_TEXT_TO_TEXT_MAPPING_NAMES,
    MODEL_FOR_SEQUENCE_CLASSIFICATION_MAPPING_NAMES,
)

from plaudit.core.proof.stand_in import HEAD, WIDTH, shrunk, stir
from plaudit.models import load_any, save

NO_TEXT = ("pp_formulanet", "vision-encoder-decoder")  # without a language model
MAPPINGS: dict[str, tuple[Any, Any]] = {
    "causal": (AutoModelForCausalLM, MODEL_FOR_CAUSAL_LM_MAPPING_NAMES),
    "sequence": (AutoModelForSequenceClassification, MODEL_FOR_SEQUENCE_CLASSIFICATION_MAPPING_NAMES),
    "multimodal": (
        AutoModelForImageTextToText,
        {
            name: kind
            for name, kind in MODEL_FOR_IMAGE_TEXT_TO_TEXT_MAPPING_NAMES.items()
            if kind not in MODEL_FOR_CAUSAL_LM_MAPPING_NAMES.values() and name not in NO_TEXT
        },
    ),
}
LAYERS = 4
PROVED = "proved"

INDEXER = {
    "indexer_n_heads": 2, "indexer_kv_heads": 1, "indexer_head_dim": 256, "indexer_budget": 8,
    "indexer_compress_ratio": 2,
}  # fmt: skip
# Required config options: with its defaults the family cannot be built in plain transformers either.
NEEDED: dict[str, dict[str, Any]] = {
    **{name: {"head_dim": HEAD} for name in ("hunyuan_v1_dense", "hunyuan_v1_moe", "ministral")},
    **{
        name: {"text_encoder": {"model_type": "t5"}, "audio_encoder": {"model_type": "encodec"}, "decoder": {}}
        for name in ("musicgen", "musicgen_melody")
    },
    "bamba": {"attn_layer_indices": [1, 3]},
    "cohere_compass_text": {
        "rope_parameters": {
            "full_attention": {"rope_type": "default", "rope_theta": 10_000.0, "mrope_section": [2, 3, 3]}
        }
    },
    "dbrx": {"attn_config": {"rope_theta": 10_000.0, "clip_qkv": 8.0}, "n_layers": LAYERS},
    "deepseek_v2": {"num_experts_per_tok": 2},
    "dots1": {"n_routed_experts": 4, "n_shared_experts": 1, "num_experts_per_tok": 2},
    "granitemoehybrid": {"layer_types": ["linear_attention", "full_attention"] * (LAYERS // 2)},
    "kimi_linear": {"layer_types": ["linear_attention", "full_attention"] * (LAYERS // 2)},
    "gemma3n_text": {"num_hidden_layers": 10, "num_kv_shared_layers": 4},
    **{name: {"layer_types": ["conv", "full_attention"] * (LAYERS // 2)} for name in ("lfm2", "lfm2_moe")},
    "nemotron": {"head_dim": HEAD, "num_key_value_heads": 8},
    **{
        name: {
            "text_config": {
                "num_hidden_layers": LAYERS,
                "rope_parameters": {"rope_type": "default", "rope_theta": 10_000.0, "mrope_section": sections},
            }
        }
        for name, sections in {
            "qwen2_vl": [16, 24, 24],
            "qwen2_5_vl": [16, 24, 24],
            "qwen2_5_omni_thinker": [16, 24, 24],
            "paddleocr_vl": [16, 24, 24],
            "glm4v": [16, 24, 24],
            "glm46v": [16, 24, 24],
            "glmga": [16, 24, 24],
        }.items()
    },
    **{
        name: {
            "text_config": {
                "num_hidden_layers": LAYERS,
                "head_dim": head,
                "rope_parameters": {
                    "rope_type": "default",
                    "rope_theta": 10_000.0,
                    "mrope_section": [8, 12, 12],
                    "partial_rotary_factor": 64 / head,
                },
            }
        }
        for name, head in {"glm_ocr": 64, "glm4v_moe": 128}.items()
    },
    **{name: {"text_config": {"num_hidden_layers": LAYERS}} for name in ("qwen3_5", "qwen3_5_moe")},
    **{name: {"text_config": {"num_hidden_layers": 6}} for name in ("gemma4", "gemma4_unified")},
    "qwen4_exp": {"text_config": INDEXER},
    "qwen4_exp_text": INDEXER,
    "reformer": {"is_decoder": True},
    "xmod": {"default_language": "en_XX"},
    "zamba": {"num_hidden_layers": 12},
    "zamba2": {"layers_block_type": ["linear_attention", "hybrid"] * (LAYERS // 2)},
}
# Sizes that must match each other: the heads of a recurrent layer add up to its width, twice the model's.
FITTED: dict[str, dict[str, Any]] = {
    "mamba2": {"num_heads": 8, "head_dim": 2 * WIDTH // 8},
    "perceiver": {"d_latents": WIDTH, "num_latents": 8, "num_self_attends_per_block": 1},
    "reformer": {"axial_pos_embds_dim": (16, 48), "axial_pos_shape": (16, 16)},
}
# Features that a family has only if its config enables them.
VARIANTS: dict[str, tuple[str, dict[str, Any]]] = {
    "gemma3_text, use_bidirectional_attention": ("gemma3_text", {"use_bidirectional_attention": True}),
    "falcon_h1, mamba_rms_norm": ("falcon_h1", {"mamba_rms_norm": True, "mamba_norm_before_gate": False}),
    "granite, all multipliers": (
        "granite",
        {"embedding_multiplier": 12.0, "residual_multiplier": 0.22, "attention_multiplier": 0.1, "logits_scaling": 8.0},
    ),
    "minimax_m3_vl_text, sparse layers": (
        "minimax_m3_vl_text", {"layer_types": ["full_attention", *["minimax_m3_sparse"] * (LAYERS - 1)]},
    ),
    "llama, dynamic": ("llama", {"rope_parameters": {"rope_type": "dynamic", "factor": 2.0, "rope_theta": 1e4}}),
    "phi3, longrope": (
        "phi3",
        {
            "max_position_embeddings": 131_072, "original_max_position_embeddings": 4096,
            "rope_parameters": {
                "rope_type": "longrope", "rope_theta": 1e4, "original_max_position_embeddings": 4096,
                "short_factor": [1.0 + 0.05 * i for i in range(48)], "long_factor": [1.0 + i for i in range(48)],
            },
        },
    ),
    "phimoe, sliding_window": ("phimoe", {"sliding_window": 512}),
    "qwen2, use_sliding_window": ("qwen2", {"use_sliding_window": True, "max_window_layers": 2}),
    "qwen2_moe, use_sliding_window": ("qwen2_moe", {"use_sliding_window": True, "max_window_layers": 2}),
}  # fmt: skip


@dataclass(frozen=True)
class Case:
    kind: str
    name: str
    family: str
    options: Mapping[str, Any] = field(default_factory=dict, compare=False)

    def __str__(self) -> str:
        return f"{self.kind} {self.name}"


def cases() -> list[Case]:
    result = []
    for kind, (_, names) in MAPPINGS.items():
        result += [Case(kind, name, name, NEEDED.get(name, {})) for name in sorted(names)]
        if kind != "multimodal":
            result += [Case(kind, n, family, options) for n, (family, options) in VARIANTS.items() if family in names]
    return result


def tiny_config(case: Case) -> Any:
    config = shrunk(_config(CONFIG_MAPPING[case.family], case))
    for name, value in FITTED.get(case.family, {}).items():
        setattr(config, name, value)
    config.architectures = [MAPPINGS[case.kind][1][case.family]]
    return config


def _config(config_class: Any, case: Case) -> Any:
    layers: dict[str, Any] = {"num_hidden_layers": LAYERS}
    if case.kind == "multimodal":
        layers = {"text_config": layers, "vision_config": {"num_hidden_layers": 1, "depth": 1}}
    for options in ({**layers, **case.options}, {"text_config": layers.get("text_config"), **case.options}):
        try:
            return config_class(**options)
        except Exception:  # this config names its number of layers differently
            continue
    return config_class(**case.options)


@functools.cache
def _tokenizer() -> Any:
    return load_any("sums-policy").tokenizer


def on_disk(case: Case, directory: Path) -> Path:
    """Saves the model with random weights large enough that every factor has an effect. Where plain transformers cannot
    build the model, only its config is saved."""
    return saved(MAPPINGS[case.kind][0], tiny_config(case), directory)


def saved(auto: Any, config: Any, directory: Path) -> Path:
    """The same of a class of transformers and a small config."""
    tokenizer = _tokenizer()
    torch.manual_seed(7)
    try:
        module = auto.from_config(config, attn_implementation="eager")
    except Exception:
        directory.mkdir()
        config.save_pretrained(directory)
        tokenizer.save_pretrained(directory)
        from safetensors.torch import save_file

        save_file({"none": torch.zeros(1)}, directory / "model.safetensors", {"format": "pt"})
        return directory
    stir(module, 7)
    if not hasattr(config.get_text_config(), "vocab_size"):  # such a config has no place for a pad token
        module.save_pretrained(directory)
        tokenizer.save_pretrained(directory)
        return directory
    return save(module, tokenizer, directory)


def reason(case: Case, message: str, directory: Path) -> str:
    """The reason of a refusal without names and numbers."""
    text = message.replace(str(directory), "").replace("/config.json", "")
    text = re.sub(r" \(relative difference [^)]*\)", "", text)
    return re.sub(r"^\w+ (\([\w-]+\) )?", "", text.strip(": "))


# The table in docs/core.md

BEGIN, END = "<!-- families -->\n", "<!-- end of families -->\n"


def table(outcomes: Mapping[Case, str]) -> str:
    by_reason: dict[str, dict[str, list[str]]] = defaultdict(lambda: defaultdict(list))
    for case, outcome in outcomes.items():
        by_reason[outcome][case.kind].append(f"`{case.name}`")
    counts = [sum(case.kind == kind for case in outcomes) for kind in MAPPINGS]
    heads = f"| | {counts[0]} as causal LM | {counts[1]} as sequence classifier | {counts[2]} with pictures, on text |"
    lines = [heads, "| --- | --- | --- | --- |"]
    for outcome in sorted(by_reason, key=lambda r: (r != PROVED, -sum(map(len, by_reason[r].values())), r)):
        label = f"**{PROVED}**" if outcome == PROVED else f"refused: {outcome}"
        cells = []
        for kind in MAPPINGS:
            names = sorted(by_reason[outcome].get(kind, []))
            cells.append(f"{len(names)}: {' '.join(names)}" if names else "")
        lines.append(f"| {label} | {' | '.join(cells)} |")
    return "\n".join(lines) + "\n"


def from_table(page: str) -> dict[tuple[str, str], str]:
    """The outcome on the page for each (kind, name)."""
    outcomes = {}
    for line in page.partition(BEGIN)[2].partition(END)[0].splitlines()[2:]:
        _, outcome, *cells, _ = re.split(r"(?<!\\) ?\| ?", line)
        outcome = PROVED if outcome == f"**{PROVED}**" else outcome.removeprefix("refused: ")
        for kind, cell in zip(MAPPINGS, cells, strict=True):
            outcomes |= {(kind, name): outcome for name in re.findall(r"`([^`]+)`", cell)}
    return outcomes
