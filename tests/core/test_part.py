"""A rank reads only its shard of a model from the files, with the same numbers as when sharding the full model."""

from __future__ import annotations

import os
import subprocess
import sys
from copy import deepcopy
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from transformers import LlamaConfig, LlamaForCausalLM

from plaudit.core.model.packing import trunk
from plaudit.core.model.split import keep_part
from plaudit.core.model.stages import Elsewhere, RankPosition
from plaudit.errors import ModelError
from plaudit.models import load_any, load_tokenizer, resolve
from plaudit.models.part import fill, outline
from plaudit.models.weights import Cut, Stacked
from tests.core.mixtures import mixture
from tests.core.rank_engine import module as made
from tests.core.tiny import SIZES, model


def saved(module: Any, directory: Path, **options: Any) -> Path:
    module.save_pretrained(directory, **options)
    load_tokenizer(resolve("sums")).save_pretrained(directory)
    return directory


def part(directory: Path, position: RankPosition, dtype: str = "float32") -> tuple[nn.Module, dict[str, Any], set[str]]:
    full = outline(directory, dtype)
    module = deepcopy(full.module)
    cuts = keep_part(module, position)
    fill(module, full.read, cuts, "cpu")
    return module, cuts, {file.name for file in full.files(module)}


def check_parts(directory: Path, sizes: tuple[int, int], dtype: str = "float32") -> None:
    """Every tensor of a part is a slice of the full model; together the parts cover it."""
    full = load_any(directory, dtype=dtype).module
    expected = {**dict(full.named_parameters(remove_duplicate=False)), **dict(full.named_buffers())}
    covered: dict[str, int] = dict.fromkeys(full.state_dict(), 0)
    for rank in range(sizes[0] * sizes[1]):
        module, cuts, _ = part(directory, RankPosition(rank, *sizes), dtype)
        tensors = {**dict(module.named_parameters(remove_duplicate=False)), **dict(module.named_buffers())}
        for name, tensor in tensors.items():
            cut = cuts.get(name)
            assert torch.equal(tensor, expected[name] if cut is None else cut.of(expected[name])), name
            assert (tensor.dtype, tensor.is_contiguous()) == (expected[name].dtype, True)
            if name in covered:
                covered[name] += tensor.numel() if cut is not None else expected[name].numel()
    for name, count in covered.items():
        assert count >= expected[name].numel(), name
        assert count % expected[name].numel() == 0


@pytest.mark.parametrize("family", ["llama", "qwen2", "qwen3", "gemma2", "gemma3"])
def test_parts_equal_slices_of_the_full_model(family: str, tmp_path: Path) -> None:
    saved(model(family), tmp_path)
    for sizes in ((2, 1), (1, 2), (2, 2)):
        check_parts(tmp_path, sizes)


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_parts_of_other_heads_dtypes_and_sharded_files(dtype: str, tmp_path: Path) -> None:
    check_parts(saved(model("llama", "sequence"), tmp_path / "a", max_shard_size="8KB"), (2, 2), dtype)
    check_parts(saved(model("qwen2", "token", torch.bfloat16), tmp_path / "b"), (2, 2), dtype)
    check_parts(saved(made("llama-values"), tmp_path / "c"), (2, 2), dtype)
    check_parts(saved(model("gpt_neox"), tmp_path / "d"), (1, 2), dtype)


@pytest.mark.parametrize("family", ["qwen3_moe", "mixtral", "deepseek_v3"])
def test_experts_stored_as_separate_tensors_are_read_in_part(family: str, tmp_path: Path) -> None:
    """The module stacks all experts of a layer in one tensor; slices of experts, rows and columns are read from it."""
    saved(mixture(family), tmp_path, max_shard_size="40KB")
    files, full = outline(tmp_path), load_any(tmp_path).module
    assert files.readable
    assert not files.plain
    names = [name for name, source in files.stored.items() if isinstance(source, Stacked)]
    assert {name.rpartition(".")[2] for name in names} == {"gate_up_proj", "down_proj"}
    assert {name for name in full.state_dict() if ".experts." in name} == set(names)
    for name, tensor in full.state_dict().items():
        source = files.stored[name]
        assert torch.equal(source.read(), tensor), name
        if name not in names:
            continue
        assert source.shape == tensor.shape
        for cuts in ((Cut(0, 1, 3),), (Cut(0, 2, 4), Cut(0, 1, 2)), (Cut(1, 5, 40), Cut(2, 3, 9)), (Cut(0, 2, 2),)):
            part = tensor
            for cut in cuts:
                part = cut.of(part)
            assert torch.equal(source.read(*cuts), part), (name, cuts)
    for sizes in ((1, 2), (2, 1), (2, 2)):
        check_parts(tmp_path, sizes)


@pytest.mark.parametrize("family", ["gpt_oss", "qwen2_moe", "olmoe"])
def test_fused_experts_sinks_and_full_width_norms_are_read_in_part(family: str, tmp_path: Path) -> None:
    check_parts(saved(mixture(family), tmp_path), (2, 1))


def test_tied_embeddings_stay_tied(tmp_path: Path) -> None:
    torch.manual_seed(1)
    tied = LlamaForCausalLM(LlamaConfig(**SIZES, tie_word_embeddings=True))
    check_parts(saved(tied, tmp_path), (2, 2))
    first: Any = part(tmp_path, RankPosition(0, 1, 2))[0]
    assert first.lm_head.weight is first.model.embed_tokens.weight
    second: Any = part(tmp_path, RankPosition(1, 1, 2))[0]
    assert isinstance(second.lm_head, Elsewhere)
    assert "embed_tokens" not in " ".join(second.state_dict())


def test_stage_reads_only_the_files_of_its_layers(tmp_path: Path) -> None:
    saved(model("llama"), tmp_path, max_shard_size="8KB")
    files = {file.name for file in tmp_path.glob("*.safetensors")}
    first, second = (part(tmp_path, RankPosition(rank, 1, 2))[2] for rank in (0, 1))
    assert first | second == files
    assert len(first & second) < len(files) / 2


def test_layers_are_divided_and_too_many_stages_are_rejected_with_the_equation() -> None:
    assert [list(RankPosition(rank, 1, 3).layers(7)) for rank in range(3)] == [[0, 1, 2], [3, 4], [5, 6]]
    assert [RankPosition(rank, 2, 2).layers(3) for rank in range(4)] == [range(2), range(2), range(2, 3), range(2, 3)]
    with pytest.raises(ModelError, match=r"2 layers over pipeline_parallel = 3 stages: 2 / 3 = 0\.666667"):
        keep_part(model("llama").to("meta"), RankPosition(0, 1, 3))


def test_trunk_without_a_pipeline_plan_is_rejected() -> None:
    module = model("llama").to("meta")
    trunk(module).per_layer_inputs = nn.Linear(2, 2)
    with pytest.raises(ModelError, match="has no pipeline plan for its layers"):
        keep_part(module, RankPosition(0, 1, 2))


MEMORY = """
import resource, sys
from tests.core.test_part import RankPosition, part
from plaudit.models import load_any
path, size, rank, ranks, stages = sys.argv[1], *map(int, sys.argv[2:])
part(path, RankPosition(0, 1))[0].state_dict().clear()  # what libraries keep is there
import gc; gc.collect()
now = next(int(line.split()[1]) << 10 for line in open("/proc/self/status") if line.startswith("VmData"))
resource.setrlimit(resource.RLIMIT_DATA, (now + size, -1))
if ranks:
    part(path, RankPosition(rank, ranks, stages))
else:
    load_any(path)
"""


@pytest.mark.slow
def test_rank_needs_memory_only_for_its_part(tmp_path: Path) -> None:
    """With two thirds of the memory for the full model, each half can be loaded and the full model cannot."""
    config = LlamaConfig(**{**SIZES, "hidden_size": 512, "intermediate_size": 1536, "num_hidden_layers": 8})
    saved(LlamaForCausalLM(config), tmp_path, max_shard_size="20MB")
    size = sum(file.stat().st_size for file in tmp_path.glob("*.safetensors"))
    assert size > 100 << 20

    def loads(rank: int, ranks: int, stages: int) -> bool:
        arguments = map(str, (size * 2 // 3, rank, ranks, stages))
        command = [sys.executable, "-c", MEMORY, str(tmp_path), *arguments]
        run = subprocess.run(
            command, env={**os.environ, "OMP_NUM_THREADS": "1"}, timeout=120, check=False, capture_output=True
        )
        assert run.returncode == 0 or b"memory" in run.stderr.lower(), run.stderr
        return run.returncode == 0

    assert loads(1, 2, 1)
    assert loads(0, 1, 2)
    assert not loads(0, 0, 1)
