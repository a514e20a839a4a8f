"""Tiny models with the statistics of real weights: large key biases, massive activations, sinks. In half precision they
are accepted, and damage is still found; transformers' eager attention rounds its scores and is no reference for
them."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn
from transformers import AutoModelForCausalLM, Gemma2Config, GptOssConfig, LlamaConfig, PreTrainedConfig, Qwen2Config

from plaudit.core.proof.own import Computed, own_rows
from plaudit.core.proof.support import inspect
from plaudit.errors import ModelError
from tests.core import tiny

SIZES = {**tiny.GROUPED, "vocab_size": 160, "hidden_size": 64, "num_hidden_layers": 4, "intermediate_size": 96}
SLOW = {"rope_parameters": {"rope_type": "default", "rope_theta": 1e6}}
FIRST = 3  # the token whose activations are massive: every text begins with it
IDS = [FIRST, *range(40, 63)]


def random_model(config: PreTrainedConfig, dtype: torch.dtype) -> Any:
    torch.manual_seed(0)
    module = AutoModelForCausalLM.from_config(config).eval()
    with torch.no_grad():
        for parameter in module.parameters():
            if parameter.ndim > 1:
                parameter.normal_(std=1.5 * parameter.shape[-1] ** -0.5)
    return module.to(dtype)


def biased(module: Any, sinks: float = 0.0) -> Any:
    """Keys that are only a large bias where the rotation is slow, as in Qwen 2.5: scores of thousands, nearly the same
    for all keys, whose differences matter."""
    with torch.no_grad():
        for layer in module.model.layers:
            attention = layer.self_attn
            size = attention.head_dim
            slow = slice(size // 2 - 1, None, size // 2)  # the last of each half
            for projection, value in ((attention.q_proj, 16.0), (attention.k_proj, 128.0)):
                projection.weight.view(-1, size, projection.in_features)[:, slow] = 0
                projection.bias.zero_().view(-1, size)[:, slow] = value
            if sinks:
                attention.sinks.fill_(sinks)
    return module


def massive(module: Any) -> Any:
    """The first token has two channels of a thousand times the others' size, and draws nearly all attention."""
    with torch.no_grad():
        module.model.embed_tokens.weight[FIRST, 5:7] = torch.tensor([400.0, -900.0])
        module.model.embed_tokens.weight[FIRST, 9] = 50.0
        for layer in module.model.layers:
            layer.self_attn.k_proj.weight[:, 5] += 3.0
            layer.self_attn.q_proj.weight[:, 11] += 1.0
    return module


MODELS: dict[str, Callable[[torch.dtype], Any]] = {
    "key biases": lambda dtype: biased(random_model(Qwen2Config(**SIZES, **SLOW), dtype)),
    "massive activations": lambda dtype: massive(random_model(LlamaConfig(**SIZES), dtype)),
    "sinks": lambda dtype: biased(
        random_model(GptOssConfig(**SIZES, head_dim=16, num_local_experts=4, num_experts_per_tok=2), dtype), 4.0
    ),
    "soft caps": lambda dtype: biased(
        random_model(Gemma2Config(**SIZES, **SLOW, head_dim=16, attention_bias=True), dtype)
    ),
}


def eager_distance(module: Any) -> float:
    """How far transformers' own eager attention is from the truth."""
    with torch.inference_mode():
        with Computed(torch.float32):
            true = own_rows(module, IDS)
        module.set_attn_implementation("eager")
        rounded = module.model(input_ids=torch.tensor([IDS]), use_cache=False).last_hidden_state[0].float()
    return float((rounded - true).norm() / true.norm())


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32])
@pytest.mark.parametrize("name", MODELS)
def test_real_statistics_are_accepted_in_every_precision(name: str, dtype: torch.dtype) -> None:
    inspect(MODELS[name](dtype))


def test_eager_attention_in_half_precision_is_no_reference() -> None:
    assert eager_distance(MODELS["key biases"](torch.bfloat16)) > 0.1
    assert eager_distance(MODELS["sinks"](torch.bfloat16)) > 0.1


def mixed(module: Any) -> None:
    norm = module.model.norm
    plain = norm.forward
    norm.forward = lambda x: plain(x + x.mean(dim=1, keepdim=True))


def foreign_rows(module: Any) -> None:
    """A layer that does not see what the others see, as a rank with another model's shard."""
    layer = module.model.layers[2].mlp
    plain, calls = layer.forward, iter(range(10**6))

    def forward(x: torch.Tensor) -> Any:
        out = plain(x)
        return out if next(calls) % 2 else out * 0

    layer.forward = forward


@pytest.mark.parametrize("damage", [mixed, foreign_rows])
@pytest.mark.parametrize("name", ["key biases", "massive activations"])
def test_damage_is_found_in_half_precision(name: str, damage: Callable[[Any], None]) -> None:
    module = MODELS[name](torch.bfloat16)
    damage(module)
    with pytest.raises(ModelError, match=r"gives different rows packed than alone.*by rounding to bfloat16"):
        inspect(module)


@pytest.mark.parametrize("name", ["key biases", "massive activations"])
def test_replaced_layer_is_not_run_in_few_calls(name: str) -> None:
    module = MODELS[name](torch.bfloat16)
    assert inspect(module).lean is not None
    for layer in module.model.layers:
        layer.mlp.act_fn = nn.GELU()
    assert inspect(module).lean is None


@pytest.mark.parametrize("name", MODELS)
def test_damaged_weights_are_named(name: str) -> None:
    module = MODELS[name](torch.bfloat16)
    with torch.no_grad():
        module.get_parameter("model.layers.1.self_attn.o_proj.weight")[0, :3] = float("nan")
    with pytest.raises(ModelError, match=r"weights are damaged: 3 of \d+ in model.layers.1.self_attn.o_proj.weight"):
        inspect(module)
