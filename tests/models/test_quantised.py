"""Quantised checkpoints load as their dequantised weights, for formats that transformers reads."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor
from transformers import AutoModelForCausalLM, GptOssConfig, LlamaConfig, Mxfp4Config, Qwen3MoeConfig

from plaudit import models
from plaudit.core.model.split import keep_part
from plaudit.core.model.stages import RankPosition
from plaudit.errors import ModelError
from plaudit.models.part import fill, outline
from plaudit.place.memory.fit import parameters
from tests.models.builders import byte_tokenizer

SIZES: dict[str, Any] = {
    "vocab_size": 320, "hidden_size": 64, "num_hidden_layers": 2, "num_attention_heads": 4, "num_key_value_heads": 2,
    "head_dim": 16, "intermediate_size": 96, "max_position_embeddings": 128, "tie_word_embeddings": False,
}  # fmt: skip
FP8 = {"quant_method": "fp8", "fmt": "e4m3", "activation_scheme": "dynamic", "weight_block_size": [32, 32]}


def saved(config: Any, directory: Path) -> dict[str, Tensor]:
    torch.manual_seed(1)
    models.save(AutoModelForCausalLM.from_config(config).bfloat16(), byte_tokenizer(), directory)
    return load_file(directory / "model.safetensors")


def quantised(directory: Path, tensors: dict[str, Tensor], settings: dict[str, Any]) -> Path:
    save_file({name: tensor.contiguous() for name, tensor in tensors.items()}, directory / "model.safetensors")
    file = directory / "config.json"
    file.write_text(json.dumps({**json.loads(file.read_text()), "quantization_config": settings}))
    return directory


def in_fp8(tensors: dict[str, Tensor], size: int) -> dict[str, Tensor]:
    result = {}
    for name, tensor in tensors.items():
        if tensor.ndim != 2 or "proj" not in name:
            result[name] = tensor
            continue
        rows, columns = (-(-n // size) for n in tensor.shape)
        scale = torch.empty(rows, columns)
        values = torch.empty(tensor.shape, dtype=torch.float8_e4m3fn)
        for i in range(rows):
            for j in range(columns):
                part = slice(size * i, size * (i + 1)), slice(size * j, size * (j + 1))
                scale[i, j] = tensor[part].float().abs().max() / 448
                values[part] = (tensor[part].float() / scale[i, j]).to(torch.float8_e4m3fn)
        result |= {name: values, f"{name}_scale_inv": scale}
    return result


def same(module: Any, other: Any) -> None:
    actual, expected = module.state_dict(), other.state_dict()
    assert actual.keys() == expected.keys()
    for name, tensor in actual.items():
        assert torch.equal(tensor, expected[name]), name


def same_parts(directory: Path, module: torch.nn.Module) -> None:
    """Two ranks of an engine read their slices of the weights; of a mixture, half of the experts each."""
    expected = module.state_dict()
    for rank in range(2):
        part = outline(directory, dtype="bfloat16")
        cuts = keep_part(part.module, RankPosition(rank, 2))
        fill(part.module, part.read, cuts, "cpu")
        for name, tensor in part.module.state_dict().items():
            assert torch.equal(tensor, cuts[name].of(expected[name]) if name in cuts else expected[name]), name


@pytest.mark.parametrize(
    "config",
    [LlamaConfig(**SIZES), Qwen3MoeConfig(**SIZES, num_experts=4, num_experts_per_tok=2, moe_intermediate_size=32)],
    ids=lambda config: config.model_type,
)
def test_block_fp8_loads_like_transformers(config: Any, tmp_path: Path) -> None:
    pytest.importorskip("accelerate")
    directory = quantised(tmp_path, in_fp8(saved(config, tmp_path), 32), FP8)
    loaded = models.load_policy(directory, dtype="bfloat16").module
    expected = AutoModelForCausalLM.from_pretrained(directory, dtype=torch.bfloat16)
    same(loaded, expected)
    assert parameters(str(directory)) == sum(p.numel() for p in loaded.parameters())
    part = outline(directory, dtype="bfloat16")
    assert part.readable
    fill(part.module, part.read, {}, "cpu")
    same(part.module, loaded)
    same_parts(directory, loaded)


def test_partial_fp8_block_at_the_end_of_a_matrix(tmp_path: Path) -> None:
    """As in DeepSeek-V3, whose keys and values have 576 rows, four and a half blocks of 128."""
    tensors = saved(LlamaConfig(**SIZES), tmp_path)
    small = in_fp8(tensors, 40)
    directory = quantised(tmp_path, small, {**FP8, "weight_block_size": [40, 40]})
    name = "model.layers.1.mlp.down_proj.weight"
    assert small[f"{name}_scale_inv"].shape == (2, 3)
    loaded = models.load_policy(directory).module.state_dict()[name]
    assert loaded[63, 95] == (small[name][63, 95].float() * small[f"{name}_scale_inv"][1, 2]).bfloat16()
    assert float((loaded - tensors[name].float()).abs().max()) < 0.07 * float(tensors[name].float().abs().max())


def test_mxfp4_loads_like_transformers_and_is_saved_unquantised(tmp_path: Path) -> None:
    config = GptOssConfig(**SIZES, num_local_experts=4, num_experts_per_tok=2)
    plain = saved(config, tmp_path)
    generator = torch.Generator().manual_seed(2)
    packed = {}
    for name, tensor in plain.items():
        if name.endswith("_proj") and tensor.ndim == 3:
            experts, inputs, outputs = tensor.shape
            packed[f"{name}_blocks"] = torch.randint(
                256, (experts, outputs, inputs // 32, 16), generator=generator, dtype=torch.uint8
            )
            packed[f"{name}_scales"] = torch.randint(
                118, 125, (experts, outputs, inputs // 32), generator=generator, dtype=torch.uint8
            )
        else:
            packed[name] = tensor
    directory = quantised(tmp_path, packed, {"quant_method": "mxfp4", "modules_to_not_convert": ["lm_head"]})
    loaded = models.load_policy(directory, dtype="bfloat16")
    expected = AutoModelForCausalLM.from_pretrained(
        directory, dtype=torch.bfloat16, quantization_config=Mxfp4Config(dequantize=True)
    )
    same(loaded.module, expected)
    same_parts(directory, loaded.module)
    resaved = models.save(loaded.module, loaded.tokenizer, tmp_path / "again")
    assert "quantization_config" not in json.loads((resaved / "config.json").read_text())
    same(models.load_policy(resaved, dtype="bfloat16").module, loaded.module)


def test_missing_or_mismatched_scales_are_rejected_by_name(tmp_path: Path) -> None:
    small = in_fp8(saved(LlamaConfig(**SIZES), tmp_path), 32)
    name = "model.layers.0.self_attn.q_proj.weight"
    directory = quantised(tmp_path, small, {**FP8, "weight_block_size": [16, 32]})
    with pytest.raises(
        ModelError,
        match=r"down_proj.weight' of \[64, 96\] has scales of \[2, 3\], and its blocks of 16 × 32 are \[4, 3\]",
    ):
        models.load_policy(directory)
    quantised(tmp_path, {key: value for key, value in small.items() if key != f"{name}_scale_inv"}, FP8)
    with pytest.raises(ModelError, match=r"q_proj.weight' is in fp8 and has no '.*q_proj.weight_scale_inv'"):
        models.load_policy(directory)
    quantised(tmp_path, small, {"quant_method": "fp8"})
    with pytest.raises(ModelError, match=r"is quantised \(fp8\); Plaudit reads fp8 with weight_block_size and mxfp4"):
        models.load_policy(directory)
