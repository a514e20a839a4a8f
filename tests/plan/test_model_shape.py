import json
from pathlib import Path

import pytest

from plaudit.errors import ModelError
from plaudit.plan.shape.model_shape import ModelShape, built_in, canonical

# Billions of total and of active parameters, as published by the makers.
PUBLISHED = {
    "llama-3.1-8b": (8.03, None), "llama-3.1-70b": (70.6, None), "llama-3.1-405b": (405.9, None),
    "qwen2.5-7b": (7.62, None), "qwen2.5-72b": (72.7, None), "qwen3-32b": (32.8, None), "qwen3-30b-a3b": (30.5, 3.3),
    "qwen3-235b-a22b": (235.1, 22.0), "deepseek-v3": (671.0, 37.0), "gpt-oss-120b": (116.8, 5.1),
    "gpt-oss-20b": (20.9, 3.6), "mixtral-8x7b": (46.7, 12.9), "smollm2-135m": (0.135, None), "opt-66b": (65.7, None),
    "opt-175b": (174.6, None), "llama-2-34b": (33.7, None),
    "llama-4-maverick": (400.7, 17.2), "kimi-k2": (1026.0, 32.0),
}  # fmt: skip


@pytest.mark.parametrize("name", PUBLISHED)
def test_parameter_counts_match_the_published_ones(name: str) -> None:
    total, active = PUBLISHED[name]
    shape = ModelShape.named(name)
    assert shape.parameters / 1e9 == pytest.approx(total, rel=0.005)
    if active is not None:  # makers differ in whether they count the input embedding
        assert shape.active_parameters / 1e9 == pytest.approx(active, rel=0.1)


def test_cache_bytes_by_hand() -> None:
    assert ModelShape.named("llama-3.1-8b").kv_numbers(1) * 2 == 2 * 32 * 8 * 128 * 2
    assert ModelShape.named("llama-3.1-70b").kv_numbers(1) * 2 == 327_680
    assert ModelShape.named("deepseek-v3").kv_numbers(1) * 2 == 61 * (512 + 64) * 2


def test_a_sliding_window_limits_the_cache() -> None:
    shape = ModelShape.named("gpt-oss-120b")
    assert shape.kv_numbers(4096) == 2 * 8 * 64 * (18 * 4096 + 18 * 128)
    assert shape.kv_numbers(100) == 2 * 8 * 64 * 36 * 100


def test_attention_flops_by_hand() -> None:
    assert ModelShape.named("llama-3.1-8b").attention_flops(1000) == 4 * 32 * 32 * 128 * 1000


@pytest.mark.parametrize(
    ("written", "meant"),
    [
        ("meta-llama/Llama-3.1-70B-Instruct", "llama-3.1-70b"), ("Qwen/Qwen3-235B-A22B-FP8", "qwen3-235b-a22b"),
        ("DeepSeek-R1-0528", "deepseek-v3"), ("openai/gpt-oss-120b", "gpt-oss-120b"),
        ("Llama-3.3-70B", "llama-3.1-70b"), ("Qwen2.5-Math-7B", "qwen2.5-7b"),
    ],
)  # fmt: skip
def test_spellings_of_model_names_are_normalised(written: str, meant: str) -> None:
    assert canonical(written) == meant


def test_an_unknown_model_suggests_the_nearest() -> None:
    with pytest.raises(ModelError, match=r"did you mean 'llama-3\.1-70b'"):
        ModelShape.named("llama-3.1-71b")


def test_a_deepseek_config_gives_the_built_in_shape(tmp_path: Path) -> None:
    config = {
        "model_type": "deepseek_v3", "vocab_size": 129280, "hidden_size": 7168, "num_hidden_layers": 61,
        "num_attention_heads": 128, "num_key_value_heads": 128, "intermediate_size": 18432,
        "moe_intermediate_size": 2048, "n_routed_experts": 256, "num_experts_per_tok": 8, "n_shared_experts": 1,
        "first_k_dense_replace": 3, "q_lora_rank": 1536, "kv_lora_rank": 512, "qk_rope_head_dim": 64,
        "qk_nope_head_dim": 128, "v_head_dim": 128, "tie_word_embeddings": False, "max_position_embeddings": 163840,
    }  # fmt: skip
    (tmp_path / "config.json").write_text(json.dumps(config))
    loaded, known = ModelShape.named(str(tmp_path)), built_in()["deepseek-v3"]
    assert loaded.parameters == known.parameters
    assert loaded.active_parameters == known.active_parameters
    assert loaded.kv_numbers(100) == known.kv_numbers(100)


def test_recurrent_models_are_rejected(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text(json.dumps({"model_type": "mamba2", "num_hidden_layers": 2}))
    with pytest.raises(ModelError, match="no formulas for recurrent layers"):
        ModelShape.named(str(tmp_path))
