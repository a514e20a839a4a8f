"""Tiny mixtures of experts, and plain transformers with experts chosen by the test."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from transformers import (
    AutoModelForCausalLM,
    DeepseekV3Config,
    FlexOlmoConfig,
    Glm4MoeConfig,
    GptOssConfig,
    LagunaConfig,
    MiniMaxM2Config,
    MixtralConfig,
    OlmoeConfig,
    PhimoeConfig,
    Qwen2MoeConfig,
    Qwen3MoeConfig,
)

from plaudit.core.proof.stand_in import stir

VOCAB = 64
SIZES: dict[str, Any] = {
    "vocab_size": VOCAB, "hidden_size": 32, "num_hidden_layers": 3, "num_attention_heads": 4, "num_key_value_heads": 2,
    "intermediate_size": 48, "max_position_embeddings": 256, "eos_token_id": 2, "bos_token_id": 1, "pad_token_id": 0,
}  # fmt: skip
CONFIGS: dict[str, Any] = {
    "qwen3_moe": Qwen3MoeConfig(
        **SIZES, head_dim=8, num_experts=8, num_experts_per_tok=2, moe_intermediate_size=24, norm_topk_prob=True
    ),
    "mixtral": MixtralConfig(**SIZES, num_local_experts=4, sliding_window=None),
    "deepseek_v3": DeepseekV3Config(
        **{**SIZES, "num_key_value_heads": 4}, n_routed_experts=8, num_experts_per_tok=3, n_group=4, topk_group=2,
        first_k_dense_replace=1, moe_intermediate_size=24, q_lora_rank=16, kv_lora_rank=16, qk_rope_head_dim=8,
        qk_nope_head_dim=8, v_head_dim=16, n_shared_experts=1,
    ),
    "gpt_oss": GptOssConfig(
        **SIZES, head_dim=8, sliding_window=7, layer_types=["sliding_attention", "full_attention", "full_attention"],
        num_local_experts=4, num_experts_per_tok=2,
    ),
}  # fmt: skip
OTHERS: dict[str, Any] = {  # tested on several ranks only
    "qwen2_moe": Qwen2MoeConfig(
        **SIZES, num_experts=4, num_experts_per_tok=2, moe_intermediate_size=24, shared_expert_intermediate_size=40,
        mlp_only_layers=[1],
    ),
    "glm4_moe": Glm4MoeConfig(
        **SIZES, head_dim=8, n_routed_experts=8, num_experts_per_tok=2, moe_intermediate_size=24, n_shared_experts=1,
        first_k_dense_replace=1, use_qk_norm=True, attention_bias=True,
    ),
    "olmoe": OlmoeConfig(**SIZES, num_experts=4, num_experts_per_tok=2),
    "flex_olmo": FlexOlmoConfig(**SIZES, num_experts=4, num_experts_per_tok=2),
    "minimax_m2": MiniMaxM2Config(
        **SIZES, head_dim=8, num_local_experts=8, num_experts_per_tok=2, rotary_dim=8, scoring_func="sigmoid"
    ),
    "laguna": LagunaConfig(  # each layer has its own number of heads, and two ranks share a key-value head
        **{**SIZES, "num_key_value_heads": 1}, head_dim=8, num_attention_heads_per_layer=[4, 8, 4], num_experts=8,
        num_experts_per_tok=2, moe_intermediate_size=24, shared_expert_intermediate_size=24, sliding_window=7,
        layer_types=["full_attention", "sliding_attention", "full_attention"],
        mlp_layer_types=["dense", "sparse", "sparse"],
    ),
    "phimoe": PhimoeConfig(**SIZES, num_local_experts=4, num_experts_per_tok=2, attention_bias=True),
}  # fmt: skip
ROUTERS = {"qwen3_moe": "mlp.gate", "mixtral": "mlp.gate", "deepseek_v3": "mlp.gate", "gpt_oss": "mlp.router"}


def mixture(family: str, seed: int = 7) -> nn.Module:
    torch.manual_seed(seed)
    config = {**CONFIGS, **OTHERS}[family]
    module: nn.Module = AutoModelForCausalLM.from_config(config, attn_implementation="eager").eval()
    stir(module, seed)
    for router in module.modules():
        if hasattr(router, "e_score_correction_bias"):
            correction: Any = router.e_score_correction_bias
            correction.copy_(0.2 * torch.randn(8))
    return module


def routers(module: Any, family: str) -> list[Any]:
    paths = [f"model.layers.{i}.{ROUTERS[family]}" for i in range(len(module.model.layers))]
    modules = dict(module.named_modules())
    return [modules[path] for path in paths if path in modules]


def decoded(record: bytes, module: nn.Module, family: str) -> np.ndarray:
    """(tokens, routers, k); at most 256 experts."""
    config: Any = module.config
    return np.frombuffer(record, np.uint8).reshape(-1, len(routers(module, family)), config.num_experts_per_tok)


@torch.no_grad()
def own_experts(module: Any, family: str, ids: Sequence[int]) -> np.ndarray:
    """(tokens, routers, k): the experts that plain transformers chooses, sorted."""
    chosen: list[Tensor] = []
    handles = [
        router.register_forward_hook(lambda _, __, out: chosen.append(out[2])) for router in routers(module, family)
    ]  # fmt: skip
    before = module.config._attn_implementation
    module.set_attn_implementation("eager")
    try:
        module(input_ids=torch.tensor([list(ids)]), use_cache=False)
    finally:
        module.set_attn_implementation(before)
        for handle in handles:
            handle.remove()
    return np.sort(torch.stack(chosen, dim=1).numpy(), axis=-1)


class Forced(nn.Module):
    """Replaces a router: uses the given experts, weighted by the router's own scores as in the family's paper."""

    def __init__(self, router: Any, family: str, chosen: Tensor) -> None:
        super().__init__()
        self.weight = router.weight
        self.bias = getattr(router, "bias", None)
        self.weigh = WEIGHTS[family]
        self.scale = getattr(router, "routed_scaling_factor", 1.0)
        self.chosen = chosen
        self.correction = getattr(router, "e_score_correction_bias", None)
        self.apart = torch.empty(0)

    def forward(self, hidden: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        logits = nn.functional.linear(hidden.reshape(-1, hidden.shape[-1]), self.weight, self.bias)
        own = grouped(logits.sigmoid() + self.correction) if self.correction is not None else logits
        own = own.topk(self.chosen.shape[-1]).indices
        self.apart = (own.sort(-1).values != self.chosen.sort(-1).values).any(-1)
        return logits, self.scale * self.weigh(logits, self.chosen), self.chosen


def grouped(scores: Tensor, groups: int = 4, keep: int = 2) -> Tensor:
    """Keeps the scores of the groups with the largest sum of their two best experts; the others become -inf."""
    masked = torch.full_like(scores, -torch.inf)
    size = scores.shape[-1] // groups
    for row in range(len(scores)):
        sums = [sum(sorted(scores[row, g * size : (g + 1) * size].tolist())[-2:]) for g in range(groups)]
        for g in sorted(range(groups), key=sums.__getitem__)[-keep:]:
            masked[row, g * size : (g + 1) * size] = scores[row, g * size : (g + 1) * size]
    return masked


def _softmax_then_top(logits: Tensor, chosen: Tensor) -> Tensor:
    weights = logits.softmax(-1).gather(-1, chosen)
    return weights / weights.sum(-1, keepdim=True)


def _top_then_softmax(logits: Tensor, chosen: Tensor) -> Tensor:
    return logits.gather(-1, chosen).softmax(-1)


def _sigmoid(logits: Tensor, chosen: Tensor) -> Tensor:
    weights = logits.sigmoid().gather(-1, chosen)
    return weights / weights.sum(-1, keepdim=True)


WEIGHTS: dict[str, Callable[[Tensor, Tensor], Tensor]] = {
    "qwen3_moe": _softmax_then_top, "mixtral": _softmax_then_top, "deepseek_v3": _sigmoid, "gpt_oss": _top_then_softmax,
}  # fmt: skip


def forced_logprobs(module: Any, family: str, ids: Sequence[int], chosen: np.ndarray) -> tuple[Tensor, Tensor]:
    """Log-probs of plain transformers with these experts: (len(ids) - 1,) of each token after the first, with
    gradients; and (len(ids) - 1, routers) where the router would have chosen other experts."""
    before, original = module.config._attn_implementation, routers(module, family)
    module.set_attn_implementation("eager")
    modules = dict(module.named_modules())
    layers = [layer for layer in module.model.layers if hasattr(layer.mlp, "experts")]
    name = ROUTERS[family].partition(".")[2]
    try:
        for number, layer in enumerate(layers):
            experts = torch.from_numpy(chosen[:, number].astype(np.int64))
            setattr(layer.mlp, name, Forced(original[number], family, experts))
        logits = module(input_ids=torch.tensor([list(ids[:-1])]), use_cache=False).logits[0]
        differs = torch.stack([getattr(layer.mlp, name).apart for layer in layers], dim=1)
    finally:
        for layer, router in zip(layers, original, strict=True):
            setattr(layer.mlp, name, router)
        module.set_attn_implementation(before)
    assert dict(module.named_modules()).keys() == modules.keys()
    table = torch.log_softmax(logits.float(), dim=-1)
    return table.gather(-1, torch.tensor(list(ids[1:]))[:, None])[:, 0], differs
