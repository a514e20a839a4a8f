"""The shape of a decoder, read from its Hugging Face config.json or from the planner's built-in list.

Dense and mixture-of-experts layers, grouped-query and latent (MLA) attention, sliding windows. Models with state space
or linear attention layers are refused: their cache and FLOPs follow other formulas.
"""

from __future__ import annotations

import json
import re
import tomllib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, fields
from functools import cache, cached_property
from pathlib import Path
from typing import Any

from plaudit.errors import ModelError, nearest

_BUILT_IN = Path(__file__).parents[1] / "data" / "models.toml"
_RECURRENT = ("mamba", "jamba", "nemotron_h", "qwen3_next", "falcon_h1", "rwkv", "recurrent_gemma", "bamba", "zamba")


@dataclass(frozen=True)
class ModelShape:
    # No slots: the cached properties need a __dict__, as a search reads the counts a hundred thousand times.
    vocab: int
    hidden: int
    layers: int
    heads: int
    kv_heads: int
    head_dim: int
    ffn: int
    """Width of the dense MLP; may be zero if all layers have experts."""
    tied: bool
    attention_bias: bool = False
    gated: bool = True
    """A gated MLP has three matrices, an ungated one two."""
    experts: int = 0
    top_k: int = 0
    expert_ffn: int = 0
    shared_ffn: int = 0
    """Total width of the shared experts that every token uses."""
    dense_layers: int = 0
    """In a mixture-of-experts model: layers with a dense MLP instead of experts."""
    q_rank: int = 0
    kv_rank: int = 0
    """Latent attention: the cache stores kv_rank + rope_dim values per token and layer."""
    rope_dim: int = 0
    v_dim: int = 0
    window: int = 0
    windowed_layers: int = 0
    positions: int = 0
    """Learned position embeddings."""
    max_context: int = 0
    """0 = unknown"""
    name: str = ""

    @staticmethod
    def from_config(path: Path) -> ModelShape:
        try:
            config = json.loads(path.read_text())
            return _from_hugging_face(config.get("text_config", config), path)
        except (OSError, ValueError) as error:
            raise ModelError(f"cannot read {path}: {error}") from None
        except KeyError as error:
            raise ModelError(f"{path} has no {error}: it is not the config of a Llama-like decoder") from None

    @staticmethod
    def named(name: str) -> ModelShape:
        """The shape of a built-in model, of a directory with a config.json, or of that file."""
        path = Path(name)
        if path.suffix == ".json" and path.is_file():
            return ModelShape.from_config(path)
        if (path / "config.json").is_file():
            return ModelShape.from_config(path / "config.json")
        key = canonical(name)
        shapes = built_in()
        if key not in shapes:
            raise ModelError(
                f"unknown model {name!r}; {nearest(key, shapes)} "
                "Or give a directory with a config.json of Hugging Face, or that file"
            )
        return shapes[key]

    @cached_property
    def moe_layers(self) -> int:
        return self.layers - self.dense_layers if self.experts else 0

    @property
    def latent(self) -> bool:
        return self.kv_rank > 0

    @cached_property
    def attention_parameters(self) -> int:
        """Parameters of one layer's attention, norms included."""
        h, n = self.hidden, self.heads
        if self.latent:
            query = self.q_rank * (h + n * (self.head_dim + self.rope_dim)) if self.q_rank else (
                h * n * (self.head_dim + self.rope_dim)
            )  # fmt: skip
            latent = h * (self.kv_rank + self.rope_dim) + self.kv_rank * n * (self.head_dim + self.v_dim)
            return query + latent + n * self.v_dim * h + self.q_rank + self.kv_rank + 2 * h
        queries, keys = n * self.head_dim, self.kv_heads * self.head_dim
        biases = (queries + 2 * keys) if self.attention_bias else 0
        return h * (queries + 2 * keys) + queries * h + biases + 2 * h

    def copied_parameters(self, tp: int, keys_whole: bool = False) -> float:
        """Parameters of all layers that a tensor rank stores beyond its share, because they are replicated.

        These are the down-projections to latents, and key-value heads if there are more ranks than heads: a rank has
        the one that it uses, or all of them (`keys_whole`).
        """
        if self.latent:
            made = self.hidden * (self.q_rank + self.kv_rank + self.rope_dim) + self.q_rank + self.kv_rank
            return self.layers * made * (1 - 1 / tp)
        if tp <= self.kv_heads:
            return 0.0
        own = self.kv_heads if keys_whole else 1
        return self.layers * 2 * self.hidden * self.head_dim * (own - self.kv_heads / tp)

    @property
    def dense_mlp_parameters(self) -> int:
        return (3 if self.gated else 2) * self.hidden * self.ffn

    @cached_property
    def expert_parameters(self) -> int:
        """Parameters of one expert."""
        return 3 * self.hidden * self.expert_ffn

    @property
    def shared_parameters(self) -> int:
        """Parameters of one MoE layer that every token uses besides attention, including the router."""
        return 3 * self.hidden * self.shared_ffn + self.hidden * self.experts

    @property
    def embedding_parameters(self) -> int:
        return (self.vocab * (1 if self.tied else 2) + self.positions) * self.hidden

    @cached_property
    def parameters(self) -> int:
        dense = (self.layers - self.moe_layers) * self.dense_mlp_parameters
        moe = self.moe_layers * (self.shared_parameters + self.experts * self.expert_parameters)
        return self.embedding_parameters + self.layers * self.attention_parameters + dense + moe + self.hidden

    @cached_property
    def routed_parameters(self) -> int:
        """Parameters of all experts, of which a token uses top_k per layer."""
        return self.moe_layers * self.experts * self.expert_parameters

    @cached_property
    def active_parameters(self) -> int:
        """Parameters that one token is multiplied with: no input embedding, top_k of the experts."""
        inside = self.parameters - self.embedding_parameters - self.routed_parameters
        return inside + self.moe_layers * self.top_k * self.expert_parameters + self.vocab * self.hidden

    def adapter_parameters(self, rank: int, targets: Sequence[str] = ()) -> int:
        """Parameters of LoRA: rank · (inputs + outputs) of every linear layer but the head (in a mixture-of-experts
        model only of the attention: train/policy/lora.py), or of the layers whose names end in one of `targets`."""
        layers = self._linear_layers()
        if not targets and self.moe_layers:
            layers = {
                name: of for name, of in layers.items() if not name.endswith(("gate_proj", "up_proj", "down_proj"))
            }
        chosen = (of for name, of in layers.items() if not targets or name.endswith(tuple(targets)))
        return rank * sum(copies * (inputs + outputs) for inputs, outputs, copies in chosen)

    def _linear_layers(self) -> dict[str, tuple[int, int, int]]:
        """(inputs, outputs, count) of all linear layers, by their Hugging Face module names."""
        h, n, out = self.hidden, self.layers, self.heads * (self.v_dim or self.head_dim)
        query, keys = self.heads * (self.head_dim + self.rope_dim), self.kv_heads * self.head_dim
        found = {"q_proj": (h, query, n), "k_proj": (h, keys, n), "v_proj": (h, keys, n), "o_proj": (out, h, n)}
        if self.latent:
            found = {
                "kv_a_proj_with_mqa": (h, self.kv_rank + self.rope_dim, n),
                "kv_b_proj": (self.kv_rank, self.heads * (self.head_dim + self.v_dim), n),
                "o_proj": (out, h, n),
            }  # fmt: skip
            low = {"q_a_proj": (h, self.q_rank, n), "q_b_proj": (self.q_rank, query, n)}
            found |= low if self.q_rank else {"q_proj": (h, query, n)}
        dense = n - self.moe_layers
        for name, (inputs, outputs) in {"gate_proj": (0, 1), "up_proj": (0, 1), "down_proj": (1, 0)}.items():
            if name == "gate_proj" and not self.gated:
                continue
            widths = ((self.ffn, dense), (self.expert_ffn, self.moe_layers * self.experts),
                      (self.shared_ffn, self.moe_layers))  # fmt: skip
            for kind, (width, copies) in zip(("", "experts.", "shared_experts."), widths, strict=True):
                if width and copies:
                    found[kind + name] = ((h, width)[inputs], (h, width)[outputs], copies)
        return found

    @property
    def kv_numbers_per_layer(self) -> int:
        return self.kv_rank + self.rope_dim if self.latent else 2 * self.kv_heads * self.head_dim

    def kv_numbers(self, context: float) -> float:
        """Values in the KV cache of one sequence of `context` tokens; layers with a window store no more than the
        window."""
        full = (self.layers - self.windowed_layers) * context
        windowed = self.windowed_layers * min(context, self.window) if self.window else 0.0
        return (full + windowed) * self.kv_numbers_per_layer

    def attention_flops(self, context: float) -> float:
        """FLOPs of one token that attends to `context` others, in all layers: scores and the weighted sum."""
        width = self.heads * (self.head_dim + self.rope_dim + self.v_dim) if self.latent else (
            2 * self.heads * self.head_dim
        )  # fmt: skip
        full = (self.layers - self.windowed_layers) * context
        windowed = self.windowed_layers * min(context, self.window) if self.window else 0.0
        return 2 * width * (full + windowed)

    @cached_property
    def activation_numbers(self) -> float:
        """Values that the forward pass of one token writes between kernels, in all layers."""
        width = self.heads * (self.head_dim + self.rope_dim) + self.kv_heads * (
            self.head_dim + (self.v_dim or self.head_dim)
        )
        attention = self.layers * (8 * self.hidden + 2 * width)
        dense = (self.layers - self.moe_layers) * (3 if self.gated else 2) * self.ffn
        experts = self.moe_layers * (self.top_k * (2 * self.hidden + 3 * self.expert_ffn) + 3 * self.shared_ffn)
        return float(attention + dense + experts)

    @property
    def tensors(self) -> int:
        """Number of tensors in a checkpoint: some weight channels have a cost per tensor."""
        mlp = 3 if self.gated else 2
        dense = (self.layers - self.moe_layers) * mlp
        moe = self.moe_layers * (3 * self.experts + (3 if self.shared_ffn else 0) + 1)
        return 3 + self.layers * (9 if self.latent else 6) + dense + moe


def _from_hugging_face(config: Mapping[str, Any], path: Path) -> ModelShape:
    kind = str(config.get("model_type", ""))
    if any(kind.startswith(name) for name in _RECURRENT):
        raise ModelError(f"{path} describes a {kind} model: the planner has no formulas for recurrent layers")
    heads, layers = config["num_attention_heads"], config["num_hidden_layers"]
    experts = config.get("n_routed_experts") or config.get("num_local_experts") or config.get("num_experts") or 0
    expert_ffn = config.get("moe_intermediate_size") or (config.get("intermediate_size", 0) if experts else 0)
    shared = config.get("shared_expert_intermediate_size") or (config.get("n_shared_experts") or 0) * expert_ffn
    windowed = sum(1 for k in config.get("layer_types") or () if k in ("sliding_attention", "chunked_attention"))
    window = config.get("sliding_window") or config.get("attention_chunk_size") or 0
    kv_rank = config.get("kv_lora_rank") or 0
    head_dim = config.get("head_dim") or config["hidden_size"] // heads
    return ModelShape(
        vocab=config["vocab_size"], hidden=config["hidden_size"], layers=layers, heads=heads,
        kv_heads=config.get("num_key_value_heads") or heads,
        head_dim=config["qk_nope_head_dim"] if kv_rank else head_dim,
        ffn=next((config[k] for k in ("intermediate_size_mlp", "intermediate_size", "ffn_dim") if config.get(k)),
                 4 * config["hidden_size"]),
        tied=config.get("tie_word_embeddings", False),
        attention_bias=config.get("attention_bias", kind == "qwen2"),
        gated=kind not in ("opt", "gpt2", "gpt_neox", "gpt_bigcode"),
        experts=experts, top_k=config.get("num_experts_per_tok") or 0, expert_ffn=expert_ffn if experts else 0,
        shared_ffn=shared if experts else 0, dense_layers=(config.get("first_k_dense_replace") or 0) if experts else 0,
        q_rank=config.get("q_lora_rank") or 0, kv_rank=kv_rank,
        rope_dim=(config.get("qk_rope_head_dim") or 0) if kv_rank else 0,
        v_dim=(config.get("v_head_dim") or 0) if kv_rank else 0,
        window=window if windowed else 0, windowed_layers=windowed if window else 0,
        max_context=config.get("max_position_embeddings") or 0,
        name=str(config.get("_name_or_path") or path.parent.name),
    )  # fmt: skip


@cache
def built_in() -> dict[str, ModelShape]:
    names = {field.name for field in fields(ModelShape)}
    tables = tomllib.loads(_BUILT_IN.read_text(encoding="utf-8"))
    return {
        name: ModelShape(**{k: v for k, v in table.items() if k in names}, name=name) for name, table in tables.items()
    }


@cache
def _aliases() -> dict[str, str]:
    tables = tomllib.loads(_BUILT_IN.read_text(encoding="utf-8"))
    return {_plain(alias): name for name, table in tables.items() for alias in (name, *table.get("aliases", ()))}


def canonical(name: str) -> str:
    """The built-in name for any of the common spellings of a model."""
    # The organisation prefix and a dtype or tuning suffix do not change the shape.
    plain = _plain(name.rsplit("/", 1)[-1])
    aliases = _aliases()
    while plain not in aliases:
        shorter = re.sub(
            r"(instruct|base|chat|it|hf|fp8|fp4|nvfp4|bf16|dynamic|thinking|2507|2506|0528|0324|v1|v0\.\d|99)$",
            "",
            plain,
        )
        if shorter == plain or not shorter:
            return name.lower()
        plain = shorter
    return aliases[plain]


def _plain(name: str) -> str:
    return re.sub(r"[^a-z0-9.]", "", name.lower()).replace("meta", "")
