"""Tiny random models of every family the core is tested on, with plain transformers as the reference."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import torch
from torch import nn
from transformers import (
    AutoModelForCausalLM,
    AutoModelForSequenceClassification,
    AutoModelForTokenClassification,
    DeepseekV2Config,
    DeepseekV3Config,
    Gemma2Config,
    Gemma3TextConfig,
    GPTNeoXConfig,
    GptOssConfig,
    LlamaConfig,
    MistralConfig,
    MixtralConfig,
    NanoChatConfig,
    Olmo2Config,
    PreTrainedConfig,
    Qwen2Config,
    Qwen3Config,
)

VOCAB = 89
SIZES: dict[str, Any] = {
    "vocab_size": VOCAB, "hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 4, "intermediate_size": 48,
    "max_position_embeddings": 256, "eos_token_id": 2, "bos_token_id": 1, "pad_token_id": 0, "initializer_range": 0.25,
}  # fmt: skip
GROUPED = {**SIZES, "num_key_value_heads": 2}
LAYERS = ["sliding_attention", "full_attention"]

CONFIGS: dict[str, PreTrainedConfig] = {
    "llama": LlamaConfig(**GROUPED),
    "qwen2": Qwen2Config(**GROUPED),
    "qwen3": Qwen3Config(**GROUPED, head_dim=16),
    "mistral": MistralConfig(**GROUPED, sliding_window=7),
    "gemma2": Gemma2Config(**GROUPED, head_dim=16, sliding_window=7, layer_types=LAYERS, query_pre_attn_scalar=16),
    "gemma3": Gemma3TextConfig(**GROUPED, head_dim=16, sliding_window=7, layer_types=LAYERS),
    "gpt_neox": GPTNeoXConfig(**SIZES),
    "olmo2": Olmo2Config(**GROUPED),
    "nanochat": NanoChatConfig(**GROUPED),  # norms without weights
    "mixtral": MixtralConfig(**GROUPED, num_local_experts=4, sliding_window=None),
    "gpt_oss": GptOssConfig(
        **GROUPED, head_dim=16, sliding_window=7, layer_types=LAYERS, num_local_experts=4, num_experts_per_tok=2
    ),
    "one_key": Qwen3Config(**SIZES, num_key_value_heads=1, head_dim=16, attention_bias=True),
    "deepseek_v2": DeepseekV2Config(  # without a low-rank query
        **SIZES, num_key_value_heads=4, q_lora_rank=None, kv_lora_rank=24, qk_nope_head_dim=16, qk_rope_head_dim=8,
        v_head_dim=12, head_dim=8, first_k_dense_replace=2, n_routed_experts=4,
    ),
    "deepseek_v3": DeepseekV3Config(  # latents of 24 + 8 numbers, without experts
        **SIZES, num_key_value_heads=4, q_lora_rank=16, kv_lora_rank=24, qk_nope_head_dim=16, qk_rope_head_dim=8,
        v_head_dim=12, head_dim=8, first_k_dense_replace=2, n_routed_experts=4,
    ),
}  # fmt: skip

AUTO = {
    "causal": AutoModelForCausalLM,
    "sequence": AutoModelForSequenceClassification,
    "token": AutoModelForTokenClassification,
}


def model(
    family: str, kind: str = "causal", dtype: torch.dtype = torch.float32, labels: int = 1, layers: int = 2
) -> nn.Module:  # fmt: skip
    torch.manual_seed(7)
    fields = CONFIGS[family].to_diff_dict()
    changed: dict[str, Any] = {"num_labels": labels, "num_hidden_layers": layers}
    if "layer_types" in fields:
        changed["layer_types"] = (fields["layer_types"] * layers)[:layers]
    config = CONFIGS[family].__class__(**{**fields, **changed})
    module = AUTO[kind].from_config(config, attn_implementation="eager")
    for name, parameter in module.named_parameters():
        if name.endswith("sinks"):
            nn.init.normal_(parameter)
    result: nn.Module = module.to(dtype).eval()
    return result


def sequences(seed: int, count: int, low: int, high: int) -> list[list[int]]:
    random = np.random.default_rng(seed)
    return [random.integers(3, VOCAB, int(random.integers(low, high + 1))).tolist() for _ in range(count)]


@torch.inference_mode()
def plain(module: Any, ids: Sequence[int]) -> torch.Tensor:
    """Logits of one sequence by plain transformers with eager attention."""
    before = module.config._attn_implementation
    module.set_attn_implementation("eager")
    try:
        logits: torch.Tensor = module(input_ids=torch.tensor([list(ids)]), use_cache=False).logits[0]
        return logits
    finally:
        module.set_attn_implementation(before)


def plain_logprobs(module: nn.Module, ids: Sequence[int]) -> np.ndarray:
    table = torch.log_softmax(plain(module, ids).float(), dim=-1)
    return table[torch.arange(len(ids) - 1), torch.tensor(list(ids[1:]))].numpy()


@torch.inference_mode()
def plain_greedy(module: Any, ids: Sequence[int], tokens: int) -> list[int]:
    before = module.config._attn_implementation
    module.set_attn_implementation("eager")
    prompt = torch.tensor([list(ids)])
    try:
        out = module.generate(
            prompt, attention_mask=torch.ones_like(prompt), do_sample=False, max_new_tokens=tokens, pad_token_id=0
        )
        result: list[int] = out[0, len(ids) :].tolist()
        return result
    finally:
        module.set_attn_implementation(before)
