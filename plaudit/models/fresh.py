"""Creates randomly initialised models, deterministic by seed."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import nn
from transformers import (
    LlamaConfig,
    LlamaForCausalLM,
    LlamaForSequenceClassification,
    LlamaForTokenClassification,
    LlamaModel,
)

from plaudit.errors import ModelError, nearest
from plaudit.models.heads.value_head import ValueModel
from plaudit.models.quiet import quiet

LLAMAS: dict[str, Any] = {
    "policy": LlamaForCausalLM,
    "reward": LlamaForSequenceClassification,
    "steps": LlamaForTokenClassification,
    "value": LlamaModel,
}
LABELS = {"reward": 1, "steps": 2}


def new_llama(
    kind: str, *, vocab_size: int, hidden_size: int, layers: int, heads: int, kv_heads: int | None = None,
    intermediate_size: int, max_positions: int, seed: int, tie_embeddings: bool = True, pad_token_id: int | None = None,
    bos_token_id: int | None = None, eos_token_id: int | None = None, labels: int | None = None,
) -> nn.Module:  # fmt: skip
    """A Llama of the given kind ("policy" | "reward" | "steps" | "value"), float32, in eval mode."""
    if kind not in LLAMAS:
        raise ModelError(f"unknown kind of model {kind!r}; {nearest(kind, LLAMAS)}")
    kv_heads = heads if kv_heads is None else kv_heads
    if hidden_size % heads or heads % kv_heads:
        raise ModelError(
            f"hidden_size {hidden_size} must be a multiple of heads {heads}, and heads of kv_heads {kv_heads}"
        )
    config = LlamaConfig(
        vocab_size=vocab_size, hidden_size=hidden_size, num_hidden_layers=layers, num_attention_heads=heads,
        num_key_value_heads=kv_heads, intermediate_size=intermediate_size, max_position_embeddings=max_positions,
        tie_word_embeddings=tie_embeddings, pad_token_id=None, bos_token_id=bos_token_id, eos_token_id=eos_token_id,
        num_labels=LABELS.get(kind, 1) if labels is None else labels, classifier_dropout=0.0,
    )  # fmt: skip
    with seeded(seed), quiet():
        module: nn.Module = LLAMAS[kind](config)
        if kind == "value":
            module = ValueModel(module)
            init_head(module.score, config, seed)
    set_pad(module, pad_token_id)
    return module.float().eval()


@contextmanager
def seeded(seed: int) -> Iterator[None]:
    """Set torch's CPU seed within the block and restore the state afterwards. Models are created on the CPU, so CUDA's
    state is not changed."""
    with torch.random.fork_rng(devices=[]):
        torch.default_generator.manual_seed(seed)
        yield


def init_head(head: nn.Module, config: Any, seed: int) -> None:
    """Initialise head weights that depend only on the seed and the shape."""
    generator = torch.Generator().manual_seed(seed)
    for name, tensor in sorted(head.named_parameters()):
        if name.endswith("bias"):
            nn.init.zeros_(tensor)
        else:
            nn.init.normal_(tensor, std=getattr(config, "initializer_range", 0.02), generator=generator)


def set_pad(module: nn.Module, pad_token_id: int | None) -> None:
    """Tell plain transformers users what to pad with, but freeze nothing.

    An embedding's `padding_idx` gets no gradient: where pad = eos the end token would stop learning after a reload.
    """
    config: Any = module.config
    config.pad_token_id = pad_token_id
    generation: Any = getattr(module, "generation_config", None)
    if generation is not None:
        generation.pad_token_id = pad_token_id
    embeddings: Any = module.get_input_embeddings()  # type: ignore[operator]
    embeddings.padding_idx = None
