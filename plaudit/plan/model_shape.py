"""The size of a decoder, read from its Hugging Face config.json."""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path

from plaudit.errors import ModelError


@dataclass(frozen=True, slots=True)
class ModelShape:
    """A dense decoder of the Llama family: grouped-query attention, gated MLP, RMS norms."""

    vocab: int
    hidden: int
    layers: int
    heads: int
    kv_heads: int
    head_dim: int
    ffn: int
    tied: bool
    attention_bias: bool = False

    @staticmethod
    def from_config(path: Path) -> ModelShape:
        try:
            config = json.loads(path.read_text())
            heads = config["num_attention_heads"]
            return ModelShape(
                vocab=config["vocab_size"], hidden=config["hidden_size"], layers=config["num_hidden_layers"],
                heads=heads, kv_heads=config.get("num_key_value_heads") or heads,
                head_dim=config.get("head_dim") or config["hidden_size"] // heads, ffn=config["intermediate_size"],
                tied=config.get("tie_word_embeddings", False),
                attention_bias=config.get("attention_bias", config.get("model_type") == "qwen2"),
            )  # fmt: skip
        except (OSError, ValueError) as error:
            raise ModelError(f"cannot read {path}: {error}") from None
        except KeyError as error:
            raise ModelError(f"{path} has no {error}: it is not the config of a Llama-like decoder") from None

    @property
    def layer_parameters(self) -> int:
        queries, keys = self.heads * self.head_dim, self.kv_heads * self.head_dim
        attention = self.hidden * (queries + 2 * keys) + queries * self.hidden
        biases = (queries + 2 * keys) if self.attention_bias else 0
        return attention + biases + 3 * self.hidden * self.ffn + 2 * self.hidden

    @property
    def parameters(self) -> int:
        embeddings = self.vocab * self.hidden * (1 if self.tied else 2)
        return embeddings + self.layers * self.layer_parameters + self.hidden

    def kv_bytes_per_token(self, bytes_per_number: int = 2) -> int:
        return 2 * self.layers * self.kv_heads * self.head_dim * bytes_per_number
