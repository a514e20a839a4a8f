from __future__ import annotations

import json
import shutil
import struct
from contextlib import suppress
from pathlib import Path

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from safetensors.torch import load_file, save_file

from plaudit import models
from plaudit.errors import ModelError
from plaudit.models.weights import read_header

from .builders import causal, write_plain


@pytest.fixture(scope="module")
def single(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_plain(causal(), tmp_path_factory.mktemp("single"))


@pytest.fixture
def copy(single: Path, tmp_path: Path) -> Path:
    return Path(shutil.copytree(single, tmp_path / "copy"))


def refusal(directory: Path) -> str:
    with pytest.raises(ModelError) as caught:
        models.load_policy(directory)
    assert "\n" not in str(caught.value)
    return str(caught.value)


def edit(directory: Path, change: dict[str, torch.Tensor | None]) -> None:
    file = directory / "model.safetensors"
    tensors = {**load_file(file), **{name: tensor for name, tensor in change.items() if tensor is not None}}
    save_file(
        {n: t.clone() for n, t in tensors.items() if change.get(n, t) is not None}, file, metadata={"format": "pt"}
    )


def test_truncated_file_error_names_the_tensor(copy: Path) -> None:
    file = copy / "model.safetensors"
    content = file.read_bytes()
    spans = sorted((v["data_offsets"], k) for k, v in _header(content).items() if k != "__metadata__")
    file.write_bytes(content[:-1])
    assert f"is truncated: tensor {spans[-1][1]!r}" in refusal(copy)
    length = 8 + struct.unpack("<Q", content[:8])[0] + spans[3][0][0] + 1
    file.write_bytes(content[:length])
    assert f"tensor {spans[3][1]!r}" in refusal(copy)


def _header(content: bytes) -> dict[str, dict[str, list[int]]]:
    header: dict[str, dict[str, list[int]]] = json.loads(content[8 : 8 + struct.unpack("<Q", content[:8])[0]])
    return header


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (b"", "truncated or not safetensors: 0 bytes"),
        (b"\x10\0\0", "truncated or not safetensors: 3 bytes"),
        (b"\xff" * 40, "truncated or not safetensors: 40 bytes"),
        (struct.pack("<Q", 4) + b"nope", "header that is not JSON"),
        (struct.pack("<Q", 2) + b"[]", "not a JSON object"),
        (b"version https://git-lfs.github.com/spec/v1\noid", "Git LFS pointer"),
    ],
)
def test_invalid_safetensors_files_are_rejected(content: bytes, message: str, copy: Path) -> None:
    (copy / "model.safetensors").write_bytes(content)
    assert message in refusal(copy)


@pytest.mark.parametrize(
    ("entry", "message"),
    [
        ({"dtype": "F32", "shape": [2], "data_offsets": [0, 4]}, "needs 8 bytes, has 4"),
        ({"dtype": "F99", "shape": [2], "data_offsets": [0, 8]}, "dtype 'F99'"),
        ({"dtype": "F32", "shape": [-2], "data_offsets": [0, 8]}, "broken header entry"),
        ({"dtype": "F32", "shape": [2]}, "broken header entry"),
        ({"dtype": "F32", "shape": [1], "data_offsets": [4, 8]}, "begins at byte 4, expected 0"),
        ({"dtype": "F32", "shape": [1], "data_offsets": [0, 4]}, "4 bytes that belong to no tensor"),
        ({"dtype": "F32", "shape": [10**9, 10**9], "data_offsets": [0, 4 * 10**18]}, "is truncated: tensor 'x'"),
    ],
)
def test_invalid_header_entries_are_rejected(entry: dict[str, object], message: str, tmp_path: Path) -> None:
    header = json.dumps({"x": entry}).encode()
    file = tmp_path / "x.safetensors"
    file.write_bytes(struct.pack("<Q", len(header)) + header + b"\0" * 8)
    with pytest.raises(ModelError, match=message):
        read_header(file)


@settings(max_examples=150, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(data=st.data())
def test_a_damaged_header_is_refused_or_read_and_never_crashes(
    data: st.DataObject, single: Path, tmp_path: Path
) -> None:
    content = bytearray((single / "model.safetensors").read_bytes())
    length = 8 + struct.unpack("<Q", content[:8])[0]
    for _ in range(data.draw(st.integers(1, 4))):
        content[data.draw(st.integers(0, length - 1))] = data.draw(st.integers(0, 255))
    file = tmp_path / "damaged.safetensors"
    file.write_bytes(content)
    with suppress(ModelError):
        read_header(file)


def test_wrong_shape_error_names_the_tensor_and_both_shapes(copy: Path) -> None:
    edit(copy, {"model.layers.1.mlp.up_proj.weight": torch.zeros(32, 15)})
    message = refusal(copy)
    assert "tensor 'model.layers.1.mlp.up_proj.weight' has shape [32, 15], config.json makes it [32, 16]" in message


def test_missing_and_unexpected_tensors_are_named(copy: Path) -> None:
    edit(copy, {"model.norm.weight": None, "lm_head.weight": None})
    assert "lacks tensor 'lm_head.weight' and 1 more" in refusal(copy)
    edit(copy, {"model.norm.weight": torch.ones(16), "lm_head.weight": torch.ones(300, 16), "stray": torch.ones(1)})
    assert "has the unexpected tensor 'stray'" in refusal(copy)


def test_damaged_shards_and_index_are_rejected(tmp_path: Path) -> None:
    write_plain(causal(), tmp_path, max_shard_size="8KB")
    index = tmp_path / "model.safetensors.index.json"
    weight_map = json.loads(index.read_text())["weight_map"]
    shard = tmp_path / weight_map["model.norm.weight"]
    content = shard.read_bytes()
    shard.unlink()
    assert f"lacks the shard {shard.name}" in refusal(tmp_path)
    shard.write_bytes(content[:-2])
    assert "is truncated" in refusal(tmp_path)
    shard.write_bytes(content)
    other = next(name for name in weight_map.values() if name != shard.name)
    index.write_text(json.dumps({"weight_map": {**weight_map, "model.norm.weight": other}}))
    assert "lacks tensor 'model.norm.weight', which model.safetensors.index.json puts there" in refusal(tmp_path)
    index.write_text(json.dumps({"weight_map": {**weight_map, "model.norm.weight": "../x.safetensors"}}))
    assert "not a file name" in refusal(tmp_path)
    index.write_text("{}")
    assert "has no weight_map" in refusal(tmp_path)


def test_fused_mixture_of_experts_weights_are_loaded(tmp_path: Path) -> None:
    from transformers import MixtralConfig, MixtralForCausalLM

    torch.manual_seed(1)
    config = MixtralConfig(
        vocab_size=300, hidden_size=16, num_hidden_layers=1, num_attention_heads=2, num_key_value_heads=2,
        intermediate_size=16, num_local_experts=2, pad_token_id=None,
    )  # fmt: skip
    module = MixtralForCausalLM(config)
    write_plain(module, tmp_path)
    loaded = models.load_policy(tmp_path).module
    assert all(
        torch.equal(a, b) for a, b in zip(module.state_dict().values(), loaded.state_dict().values(), strict=True)
    )
