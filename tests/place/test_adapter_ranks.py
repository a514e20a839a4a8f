"""LoRA with engines of several ranks, on the training ranks and separate: the samples and numbers of one rank."""

from __future__ import annotations

import math
import subprocess
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import LlamaConfig, LlamaForCausalLM, Qwen3Config, Qwen3ForCausalLM

from plaudit.config import to_toml
from plaudit.config.supervised import LoraTable
from plaudit.models import load_policy, load_tokenizer, resolve, save
from plaudit.rl.loop import RlTraining
from plaudit.train.policy import lora
from plaudit.train.run.run import Run
from tests.core.mixtures import mixture
from tests.place.test_engine_parts import GRPO, SIZES, STAGE_ENGINE, TENSOR_ENGINE, ranks_that_generate
from tests.train.rl_world import Silent, recipe
from tests.train.test_ranks import (
    ENV,
    KINDS,
    LIMIT,
    STAGES,
    STEPS,
    TWO,
    Shape,
    check_ten,
    command,
    fork_ranks,
    steps,
    written,
)

SLOW = pytest.mark.slow
TENSOR = (1, 1, 2)
TEN = {"steps": 10, "checkpoint": {"every": 5}}


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> dict[str, str]:
    root, tokenizer = tmp_path_factory.mktemp("models"), load_tokenizer(resolve("sums-policy"))
    torch.manual_seed(0)
    save(LlamaForCausalLM(LlamaConfig(vocab_size=len(tokenizer), **SIZES)).float().eval(), tokenizer, root / "llama")
    save(Qwen3ForCausalLM(Qwen3Config(vocab_size=len(tokenizer), **SIZES)).float().eval(), tokenizer, root / "qwen3")
    save(mixture("qwen3_moe"), tokenizer, root / "mixture")
    return {"sums-policy": "sums-policy", **{name: str(root / name) for name in ("llama", "qwen3", "mixture")}}


@pytest.fixture(scope="module")
def of_one(models: dict[str, str], tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Path]:
    made: dict[str, Path] = {}

    def run(model: str) -> Path:
        if model not in made:
            made[model] = tmp_path_factory.mktemp("one") / "run"
            tree = recipe(**with_ten(tables_of(models[model])))
            with Run(made[model], tree) as opened:
                RlTraining(tree, opened, Silent()).fit()
        return made[model]

    return run


def tables_of(path: str) -> dict[str, Any]:
    return {**GRPO, "model": {"path": path, "lora": {"rank": 4}}, "train": {"prompts_per_step": 5, "lr": 3e-4}}


def with_ten(tables: dict[str, Any]) -> dict[str, Any]:
    return {**tables, "train": {**tables["train"], **STEPS, **TEN}}


def test_adapter_initialisation_does_not_depend_on_loaded_weights() -> None:
    table = LoraTable(rank=4)
    module = load_policy("sums-policy").module
    lora.attach(module, table, 7)
    actual, expected = lora.drawn(module.to("meta"), table, 7), load_policy("sums-policy").module
    lora.attach(expected, table, 7)
    tensors = lora.adapter_tensors(expected)
    assert actual.keys() == tensors.keys()
    assert all(torch.equal(actual[name], tensor) for name, tensor in tensors.items())
    assert any(tensor.any() for tensor in tensors.values())


@SLOW
@pytest.mark.parametrize(
    ("model", "shape", "rollout", "placement"),
    [
        pytest.param("sums-policy", TWO, TENSOR_ENGINE, "colocated", id="tensor-colocated"),
        pytest.param("mixture", TWO, TENSOR_ENGINE, "colocated", id="mixture-colocated"),
        pytest.param("qwen3", TENSOR, STAGE_ENGINE, "hybrid", id="stages-hybrid"),
        pytest.param("llama", STAGES, TENSOR_ENGINE, "swapped", id="tensor-swapped"),
        pytest.param("qwen3", (2, 1, 2), {**TENSOR_ENGINE, **STAGE_ENGINE}, "swapped", id="four-swapped"),
    ],
)
def test_lora_on_ranks_that_train_and_generate_matches_one_rank(
    model: str, shape: Shape, rollout: dict[str, int], placement: str, models: dict[str, str],
    of_one: Callable[[str], Path], tmp_path: Path,
) -> None:  # fmt: skip
    file, run = written(tmp_path / "recipe.toml", tables_of(models[model]), **TEN), tmp_path / "many"
    words = command(file, run, shape, "--set", f"placement.name={placement}", *ranks_that_generate(rollout))
    fork_ranks(math.prod(shape), words[3:], tmp_path)
    same(run, of_one(model))
    (run / "checkpoints" / "step-000010").rename(tmp_path / "later")
    fork_ranks(2, command(file, run, TWO, "--resume")[3:], tmp_path)
    check_ten(run, of_one(model))


@SLOW
@pytest.mark.parametrize(
    ("model", "shape", "rollout", "placement"),
    [
        pytest.param("sums-policy", TWO, TENSOR_ENGINE, {"name": "disaggregated"}, id="tensor-shared"),
        pytest.param("qwen3", (1, 1, 1), STAGE_ENGINE, {"name": "disaggregated", "channel": "disk"}, id="stages-disk"),
        pytest.param(
            "llama", TENSOR, TENSOR_ENGINE, {"name": "async", "staleness": 0, "channel": "collective"}, id="async"
        ),
        pytest.param("qwen3", (2, 1, 2), TENSOR_ENGINE, {"name": "disaggregated", "channel": "reshard"}, id="reshard"),
        pytest.param(
            "sums-policy", STAGES, STAGE_ENGINE, {"name": "disaggregated", "channel": "reshard"}, id="stages-reshard"
        ),
    ],
)
def test_lora_with_separate_engines_matches_one_rank(
    model: str, shape: Shape, rollout: dict[str, int], placement: dict[str, Any], models: dict[str, str],
    of_one: Callable[[str], Path], tmp_path: Path,
) -> None:  # fmt: skip
    resources = {f"{name}_parallel": size for name, size in zip(KINDS, shape, strict=False)}
    tree = {**with_ten(tables_of(models[model])), "placement": placement}
    tree["resources"] = {**resources, "rollout": rollout}
    file, run = tmp_path / "recipe.toml", tmp_path / "many"
    file.write_text(to_toml(recipe(**tree)))
    done = subprocess.run(command(file, run, shape), env=ENV, capture_output=True, text=True, timeout=2 * LIMIT)
    assert done.returncode == 0, done.stderr
    same(run, of_one(model))


def same(run: Path, expected: Path) -> None:
    check_ten(run, expected)
    # With an outdated adapter, the engine's log-probs would differ from the learner's.
    assert max(values["mismatch/abs_max"] for values in steps(run)) < 1e-4
    assert max(values["kl/reference"] for values in steps(run)) > 1e-6
