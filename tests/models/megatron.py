"""Reward models in NeMo-Aligner's format: tensors in Megatron's layout, the forward pass of megatron-core, and archives
in the three layouts that NeMo has written. Modelled on megatron-core 0.8, NeMo 2.4 and NeMo-Aligner 0.7; none of their
code is copied, and none of their archives is small enough for a test.
"""

from __future__ import annotations

import io
import itertools
import json
import tarfile
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.distributed.checkpoint as distributed_checkpoint
import torch.nn.functional as F
import yaml
from torch import Tensor, distributed
from torch.distributed._shard.metadata import ShardMetadata
from torch.distributed._shard.sharded_tensor import Shard, ShardedTensor, ShardedTensorMetadata
from torch.distributed._shard.sharded_tensor.metadata import TensorProperties

Tensors = dict[str, Tensor]
VOCABULARY, HIDDEN, INNER, LENGTH = 300, 16, 32, 64
COMMON = {
    "mcore_gpt": True, "num_layers": 2, "hidden_size": HIDDEN, "ffn_hidden_size": INNER, "num_attention_heads": 4,
    "kv_channels": None, "encoder_seq_length": LENGTH, "max_position_embeddings": "${.encoder_seq_length}",
    "layernorm_epsilon": 1e-5, "tokenizer": {"library": "huggingface", "type": "meta-llama/Meta-Llama-3-8B"},
    "target": "nemo_aligner.models.nlp.gpt.megatron_gpt_reward_model.MegatronGPTRewardModel",
}  # fmt: skip
CONFIGS: dict[str, dict[str, Any]] = {
    "llama": {**COMMON, "position_embedding_type": "rope", "normalization": "rmsnorm", "activation": "fast-swiglu",
              "bias": False, "num_query_groups": 2, "rotary_base": 500_000, "rotary_percentage": 1.0},
    "gpt2": {**COMMON, "num_query_groups": None, "normalization": "layernorm1p"},
}  # fmt: skip


def random_tensors(cfg: dict[str, Any], labels: int = 1) -> Tensors:
    """Tensors as in megatron-core's sharded state, with an axis for the layers."""
    torch.manual_seed(11)
    layers, head = cfg["num_layers"], HIDDEN // cfg["num_attention_heads"]
    groups = cfg["num_query_groups"] or cfg["num_attention_heads"]
    qkv = (cfg["num_attention_heads"] + 2 * groups) * head
    gated = 2 if str(cfg.get("activation")).endswith("glu") else 1
    shapes = {
        "self_attention.linear_qkv.weight": (qkv, HIDDEN), "self_attention.linear_proj.weight": (HIDDEN, HIDDEN),
        "mlp.linear_fc1.weight": (gated * INNER, HIDDEN), "mlp.linear_fc2.weight": (HIDDEN, INNER),
        "self_attention.linear_qkv.layer_norm_weight": (HIDDEN,), "mlp.linear_fc1.layer_norm_weight": (HIDDEN,),
    }  # fmt: skip
    norm_biases = {
        f"{name}_bias": (HIDDEN,) for name in ("self_attention.linear_qkv.layer_norm", "mlp.linear_fc1.layer_norm")
    }
    linears = {name.replace(".weight", ".bias"): shape[:1] for name, shape in shapes.items() if len(shape) == 2}
    shapes |= {} if cfg.get("normalization") == "rmsnorm" else norm_biases
    shapes |= linears if cfg.get("bias", True) else {}
    outside: dict[str, tuple[int, ...]] = {
        "embedding.word_embeddings.weight": (VOCABULARY, HIDDEN), "decoder.final_layernorm.weight": (HIDDEN,),
        "output_layer.weight": (VOCABULARY, HIDDEN), "rm_head.weight": (labels, HIDDEN), "rm_head.bias": (labels,),
    }  # fmt: skip
    if cfg.get("normalization") != "rmsnorm":
        outside["decoder.final_layernorm.bias"] = (HIDDEN,)
    if cfg.get("position_embedding_type") != "rope":
        outside["embedding.position_embeddings.weight"] = (LENGTH, HIDDEN)
    named = {f"decoder.layers.{name}": (layers, *shape) for name, shape in shapes.items()}
    return {f"model.{name}": torch.randn(shape) * 0.4 for name, shape in {**named, **outside}.items()}


def rewards(cfg: dict[str, Any], tensors: Tensors, rows: list[list[int]]) -> Tensor:
    """(rows, labels): the result of GPTRewardModel, row by row in float64."""
    wide = {name.removeprefix("model."): tensor.double() for name, tensor in tensors.items()}
    return torch.stack([_reward(cfg, wide, torch.tensor(row)) for row in rows])


def _reward(cfg: dict[str, Any], t: Tensors, ids: Tensor) -> Tensor:
    x = t["embedding.word_embeddings.weight"][ids]
    if "embedding.position_embeddings.weight" in t:
        x = x + t["embedding.position_embeddings.weight"][: len(ids)]
    for index in range(cfg["num_layers"]):
        layer = {name.removeprefix("decoder.layers."): value[index] for name, value in t.items() if ".layers." in name}
        x = x + _attention(cfg, layer, _norm(cfg, layer, "self_attention.linear_qkv.layer_norm_", x))
        x = x + _mlp(cfg, layer, _norm(cfg, layer, "mlp.linear_fc1.layer_norm_", x))
    x = _norm(cfg, t, "decoder.final_layernorm.", x)
    state = x.mean(0) if cfg.get("use_avg_pool") else x[-1]
    return F.linear(state, t["rm_head.weight"], t["rm_head.bias"])


def _norm(cfg: dict[str, Any], t: Tensors, prefix: str, x: Tensor) -> Tensor:
    weight, epsilon = t[prefix + "weight"], cfg["layernorm_epsilon"]
    if cfg.get("normalization") == "rmsnorm":
        return F.rms_norm(x, (HIDDEN,), weight, epsilon)
    centred = cfg.get("normalization") == "layernorm1p"
    return F.layer_norm(x, (HIDDEN,), weight + 1 if centred else weight, t[prefix + "bias"], epsilon)


def _linear(t: Tensors, name: str, x: Tensor) -> Tensor:
    return F.linear(x, t[f"{name}.weight"], t.get(f"{name}.bias"))


def _attention(cfg: dict[str, Any], t: Tensors, x: Tensor) -> Tensor:
    heads = cfg["num_attention_heads"]
    groups, head = cfg["num_query_groups"] or heads, HIDDEN // heads
    mixed = _linear(t, "self_attention.linear_qkv", x).view(len(x), groups, -1)
    query, key, value = mixed.split([heads // groups * head, head, head], dim=2)
    query = query.reshape(len(x), heads, head)
    if cfg.get("position_embedding_type") == "rope":
        query, key = _rotate(cfg, query), _rotate(cfg, key)
    key, value = (part.repeat_interleave(heads // groups, dim=1) for part in (key, value))
    y = F.scaled_dot_product_attention(*(part.transpose(0, 1) for part in (query, key, value)), is_causal=True)
    return _linear(t, "self_attention.linear_proj", y.transpose(0, 1).reshape(len(x), -1))


def _rotate(cfg: dict[str, Any], x: Tensor) -> Tensor:
    dim = x.shape[-1]
    frequencies = cfg.get("rotary_base", 10_000) ** -(torch.arange(0, dim, 2, dtype=torch.float64) / dim)
    angles = torch.outer(torch.arange(len(x), dtype=torch.float64), frequencies).repeat(1, 2)[:, None]
    first, second = x.chunk(2, dim=-1)
    return x * angles.cos() + torch.cat((-second, first), -1) * angles.sin()


def _mlp(cfg: dict[str, Any], t: Tensors, x: Tensor) -> Tensor:
    y = _linear(t, "mlp.linear_fc1", x)
    activation = cfg.get("activation", "gelu")
    if activation == "fast-swiglu":
        gate, up = y.chunk(2, dim=-1)
        y = F.silu(gate) * up
    else:  # the fused kernel, the default
        y = 0.5 * y * (1 + torch.tanh(0.79788456 * y * (1 + 0.044715 * y * y)))
    return _linear(t, "mlp.linear_fc2", y)


def write_archive(file: Path, cfg: dict[str, Any], tensors: Tensors, layout: str, **artifacts: bytes) -> Path:
    folder = file.with_suffix(".folder")
    weights = folder / "model_weights"
    folder.mkdir(parents=True)
    (folder / "model_config.yaml").write_text(yaml.safe_dump(cfg), encoding="utf-8")
    for name, content in artifacts.items():
        (folder / name.replace("__", ".")).write_bytes(content)
    if layout == "ckpt":
        write_checkpoint(folder / "model_weights.ckpt", tensors)
    else:
        weights.mkdir()
        (weights / "metadata.json").write_text(json.dumps({"sharded_backend": layout, "sharded_backend_version": 1}))
        torch.save({}, weights / "common.pt")
        (write_zarr if layout == "zarr" else write_distributed)(weights, tensors)
    with tarfile.open(file, "w:") as archive:
        archive.add(folder, arcname="./")
    return file


def write_checkpoint(file: Path, tensors: Tensors) -> None:
    state: dict[str, Any] = {}
    for name, tensor in tensors.items():
        if ".layers." in name:
            state |= {name.replace(".layers.", f".layers.{index}."): layer for index, layer in enumerate(tensor)}
        else:
            state[name] = tensor
    state["model.decoder.layers.0.self_attention.linear_qkv._extra_state"] = io.BytesIO(b"fp8")
    torch.save({name.replace("model.", "model.module.", 1): value for name, value in state.items()}, file)


def _pieces(tensor: Tensor, name: str) -> list[tuple[tuple[int, ...], Tensor]]:
    """Shards as two tensor-parallel ranks store them: per layer, with the first axis of each matrix in halves."""
    part = [1 if ".layers." in name and dim == 0 else size for dim, size in enumerate(tensor.shape)]
    axis = 1 if ".layers." in name else 0
    if len(part) > axis + 1 and part[axis] % 2 == 0:
        part[axis] //= 2
    starts = itertools.product(*(range(0, size, step) for size, step in zip(tensor.shape, part, strict=True)))
    return [
        (start, tensor[tuple(slice(a, a + step) for a, step in zip(start, part, strict=True))].contiguous())
        for start in starts
    ]


def write_zarr(directory: Path, tensors: Tensors) -> None:
    for name, tensor in tensors.items():
        pieces = _pieces(tensor.to(torch.bfloat16) if "rm_head" not in name else tensor, name)
        chunks = pieces[0][1].shape
        folder = directory / name
        folder.mkdir()
        (folder / ".zarray").write_text(json.dumps({
            "chunks": list(chunks), "compressor": None, "fill_value": None, "filters": None, "order": "C",
            "dtype": "<f4" if "rm_head" in name else "bfloat16", "shape": list(tensor.shape), "zarr_format": 2,
        }))  # fmt: skip
        for start, piece in pieces:
            raw = piece.view(torch.int16) if piece.dtype == torch.bfloat16 else piece
            file_name = ".".join(str(a // step) for a, step in zip(start, chunks, strict=True))
            (folder / file_name).write_bytes(np.ascontiguousarray(raw.numpy()).tobytes())
    state = directory / "model.decoder.layers.self_attention.linear_qkv._extra_state"
    state.mkdir()
    torch.save(io.BytesIO(b"fp8"), state / "shard_0_2.pt")


def write_distributed(directory: Path, tensors: Tensors) -> None:
    """Writes with PyTorch's distributed checkpoint writer, with the shards of megatron-core."""
    distributed.init_process_group("gloo", store=distributed.HashStore(), rank=0, world_size=1)
    try:
        state: dict[str, Any] = {name: _sharded(tensor, name) for name, tensor in tensors.items()}
        state["model.decoder.layers.self_attention.linear_qkv._extra_state/shard_0_2"] = io.BytesIO(b"fp8")
        distributed_checkpoint.save(state, storage_writer=distributed_checkpoint.FileSystemWriter(directory))
    finally:
        distributed.destroy_process_group()


def _sharded(tensor: Tensor, name: str) -> ShardedTensor:
    pieces = _pieces(tensor, name)
    shards = [Shard.from_tensor_and_offsets(piece, list(start), 0) for start, piece in pieces]
    metadata = ShardedTensorMetadata(
        [ShardMetadata(list(start), list(piece.shape), "rank:0/cpu") for start, piece in pieces],
        torch.Size(tensor.shape), TensorProperties(dtype=tensor.dtype),
    )  # fmt: skip
    return ShardedTensor._init_from_local_shards_and_global_metadata(shards, sharded_tensor_metadata=metadata)
