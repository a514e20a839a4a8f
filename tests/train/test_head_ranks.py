"""Runs over ranks that shard latent attention by heads, and over more tensor-parallel ranks than key-value heads, have
the samples, losses and weights of one rank, whichever ranks generate; one rank can resume their checkpoint."""

import math
import subprocess
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoModelForCausalLM

from plaudit.core.proof.stand_in import stir
from plaudit.models import load_tokenizer, resolve, save
from tests.train.rank_update import CONFIGS
from tests.train.test_ranks import ENV, GRPO, LIMIT, Shape, back_to_step_2, close, command, run_alone, written

pytestmark = pytest.mark.slow

TWO, TENSOR, CONTEXT, STAGES = (2, 1, 1), (1, 1, 2), (1, 2, 2), (1, 1, 2, 2)
TENSOR_ENGINE = {"tensor_parallel": 2}
APART: dict[str, Any] = {"name": "disaggregated"}
LORA = {"model": {"lora": {"rank": 4}}}
LATENT_LORA = {
    "model": {"lora": {"rank": 4, "targets": ["q_a_proj", "q_b_proj", "kv_a_proj_with_mqa", "kv_b_proj", "o_proj"]}}
}


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], str]:
    root, tokenizer = tmp_path_factory.mktemp("models"), load_tokenizer(resolve("sums-policy"))

    def path(name: str) -> str:
        if not (root / name).exists():
            tree = {**CONFIGS[name].to_diff_dict(), "vocab_size": len(tokenizer), "max_position_embeddings": 256}
            torch.manual_seed(0)
            module = AutoModelForCausalLM.from_config(type(CONFIGS[name])(**tree)).float().eval()
            stir(module, 0)
            save(module, tokenizer, root / name)
        return str(root / name)

    return path


@pytest.mark.parametrize(
    ("model", "shape", "placement", "engine", "more"),
    [
        pytest.param("deepseek_v3", TENSOR, {**APART, "channel": "reshard"}, TENSOR_ENGINE, {}, id="v3-reshard"),
        pytest.param("deepseek_v3", TWO, {}, TENSOR_ENGINE, {}, id="v3-engine-of-both"),
        pytest.param("deepseek_v3", TENSOR, {}, {}, LATENT_LORA, id="v3-lora"),
        pytest.param("deepseek_v2", TENSOR, {**APART, "channel": "shared"}, {}, {}, id="v2-shared"),
        pytest.param("deepseek_v2", TWO, {**APART, "channel": "collective"}, TENSOR_ENGINE, {}, id="v2-collective"),
        pytest.param("one_key", TENSOR, {**APART, "channel": "reshard"}, TENSOR_ENGINE, {}, id="key-reshard"),
        pytest.param("one_key", TWO, {**APART, "channel": "reshard"}, TENSOR_ENGINE, {}, id="key-data-reshard"),
        pytest.param("one_key", TENSOR, {}, TENSOR_ENGINE, {}, id="key-engine-of-both"),
        pytest.param("one_key", TENSOR, {**APART, "channel": "collective"}, TENSOR_ENGINE, LORA, id="key-lora"),
        pytest.param(
            "one_key", TWO, {**APART, "channel": "disk", "delta": True}, TENSOR_ENGINE, {}, id="key-delta"
        ),
        pytest.param("norms", (1, 1, 4), {**APART, "channel": "reshard"}, {"tensor_parallel": 4}, {}, id="four-ranks"),
        pytest.param("deepseek_v3", CONTEXT, {}, {}, {}, id="v3-context"),
        pytest.param("one_key", STAGES, {}, {}, {}, id="key-stages"),
    ],
)  # fmt: skip
def test_run_equals_that_of_one_rank_which_can_resume_it(
    model: str, shape: Shape, placement: dict[str, Any], engine: dict[str, int], more: dict[str, Any],
    models: Callable[[str], str], tmp_path: Path,
) -> None:  # fmt: skip
    tables = {**GRPO, "model": {"path": models(model), **more.get("model", {})}}
    run_alone(tmp_path / "one", tables)
    file, run = written(tmp_path / "recipe.toml", tables), tmp_path / "many"
    keys = {f"placement.{name}": value for name, value in placement.items()}
    keys |= {f"resources.rollout.{name}": size for name, size in engine.items()}
    sets = [word for key, value in keys.items() for word in ("--set", f"{key}={str(value).lower()}")]
    words = command(file, run, shape, *sets)
    done = subprocess.run(words, env=ENV, capture_output=True, text=True, timeout=LIMIT * math.prod(shape))
    assert done.returncode == 0, done.stderr
    close(run, tmp_path / "one")
    if "delta" not in placement:  # which a run in one process cannot resume
        back_to_step_2(run)
        run_alone(run, tables, resume=True)
        close(run, tmp_path / "one")
