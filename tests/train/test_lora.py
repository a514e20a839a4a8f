"""Adapters on a mixture of experts: which modules they are added to, and what is saved at the end."""

from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoModelForCausalLM, Qwen3MoeConfig

from plaudit.config.supervised import LoraTable
from plaudit.plan.shape.model_shape import ModelShape
from plaudit.train.policy import lora

CONFIG = Qwen3MoeConfig(
    vocab_size=50, hidden_size=32, num_hidden_layers=2, num_attention_heads=4, num_key_value_heads=2, head_dim=8,
    intermediate_size=48, moe_intermediate_size=16, num_experts=4, num_experts_per_tok=2, mlp_only_layers=[1],
    pad_token_id=0,
)  # fmt: skip


def adapted(**options: Any) -> Any:
    torch.manual_seed(1)
    module = AutoModelForCausalLM.from_config(CONFIG).eval()
    lora.attach(module, LoraTable(rank=2, **options), seed=3)
    for name, parameter in module.named_parameters():
        if ".lora_B." in name:
            parameter.data.normal_(std=0.3)
    return module


def test_mixture_adapters_are_added_to_attention_layers_only() -> None:
    adapted_layers = {name.partition(".lora_")[0] for name, p in adapted().named_parameters() if p.requires_grad}
    assert adapted_layers == {f"model.layers.{n}.self_attn.{which}_proj" for n in (0, 1) for which in "qkvo"}


@pytest.mark.filterwarnings("ignore:The following .*_pattern keys")  # caused by peft itself
@pytest.mark.parametrize("options", [{}, {"targets": ("q_proj", "gate_proj", "up_proj", "down_proj")}])
def test_merged_model_equals_the_adapted_model(options: dict[str, Any]) -> None:
    module = adapted(**options)
    ids = torch.randint(1, 50, (2, 9))
    with torch.no_grad():
        expected = module(ids).logits
        plain = AutoModelForCausalLM.from_config(CONFIG).eval()
        plain.load_state_dict(lora.merged(module).state_dict())
        result = plain(ids).logits
        module.disable_adapters()
        without = module(ids).logits
    torch.testing.assert_close(result, expected, rtol=1e-5, atol=1e-5)
    assert (result - without).abs().max() > 1e-3


def test_planner_counts_the_adapter_parameters(tmp_path: Path) -> None:
    CONFIG.save_pretrained(tmp_path)
    expected = sum(p.numel() for p in adapted().parameters() if p.requires_grad)
    assert ModelShape.from_config(tmp_path / "config.json").adapter_parameters(2) == expected
